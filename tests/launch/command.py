"""`python -m tests.launch.command JOB DIR [SECTION.KEY=VALUE …]`: `fullshard train` with a test's job."""

import signal
import sys
from typing import Any

from fullshard.launch.outcome import ProcessOutcome
from fullshard.launch.request import LaunchRequest
from fullshard.launch.start import perform_request
from fullshard.spec.run import Run
from tests.launch.jobs import SMALL


def main(job: str, directory: str, *settings: str) -> int:
    # A shell's background jobs ignore SIGINT, and their children would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    overrides = [f"run.dir={directory}", "run.device=cpu", "run.ranks=2", "train.steps=7"]
    run = Run.load(overrides=[*SMALL, *overrides, *settings] if settings else overrides)
    return performed({"run": run, "resume": not settings, "job": f"tests.launch.jobs:{job}"})


def performed(request: dict[str, Any]) -> int:
    """Its exit code, as `fullshard train` has it; its failure is printed."""
    with ProcessOutcome() as ending:
        sys.exit(perform_request(LaunchRequest.parse(request, source="this test")))
    if ending.failure is not None:
        print(ending.failure.user_message(), file=sys.stderr)
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
