"""`python -m tests.launch.command JOB DIR`: what `fullshard train` does, but with a test's job."""

import signal
import sys

from fullshard.launch.ending import Ending
from fullshard.launch.request import Request
from fullshard.launch.start import start
from fullshard.spec.run import Run


def main(job: str, directory: str) -> int:
    # A shell's background jobs ignore SIGINT, and their children would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run.load(overrides=[f"run.dir={directory}", "run.device=cpu", "run.ranks=2", "train.steps=7"])
    with Ending() as ending:
        request = {"run": run, "resume": True, "job": f"tests.launch.jobs:{job}"}
        sys.exit(start(Request.parse(request, source="this test")))
    if ending.failure is not None:
        print(ending.failure.text(), file=sys.stderr)
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
