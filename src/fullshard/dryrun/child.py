"""The process of one dry run: `python -m fullshard.dryrun.child REQUEST ANSWER`, two files."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fullshard.dryrun.exchange import Answer, Failure, Request
from fullshard.dryrun.here import dry_run_here
from fullshard.dryrun.program import look_up
from fullshard.dryrun.result import DryRun
from fullshard.errors import FullshardError


def main(argv: Sequence[str]) -> None:
    """Does what the first file asks, and writes the answer to the second."""
    request = Request.model_validate_json(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        answer = Answer(result=_perform(request))
    except FullshardError as error:
        answer = Answer(failure=Failure.of(error))
    Path(argv[1]).write_text(answer.model_dump_json(), encoding="utf-8")


def _perform(request: Request) -> DryRun:
    program = request.program
    build = look_up(program.model)
    with torch.device("meta"):
        model = build(request.plan)
    return dry_run_here(
        model,
        request.plan,
        loss=look_up(program.loss),
        optimizer=look_up(program.optimizer),
        batch=look_up(program.batch),
        rank=request.rank,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
