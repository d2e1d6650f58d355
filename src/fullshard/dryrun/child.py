"""Process of one dry run: `python -m fullshard.dryrun.child <REQUEST >ANSWER`."""

import os
import sys

import torch

from fullshard.dryrun.exchange import ChildAnswer, ChildFailure, ChildRequest
from fullshard.dryrun.here import run_dry_step
from fullshard.dryrun.program import look_up
from fullshard.dryrun.result import DryRun
from fullshard.errors import FullshardError


def main() -> None:
    """Runs the request read from standard input and writes the answer to standard output.

    Anything that the model prints goes to standard error.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    request = ChildRequest.model_validate_json(sys.stdin.buffer.read())
    try:
        answer = ChildAnswer(result=_perform(request))
    except FullshardError as error:
        answer = ChildAnswer(failure=ChildFailure.of(error))
    with os.fdopen(answers, "w", encoding="utf-8") as file:
        file.write(answer.model_dump_json())


def _perform(request: ChildRequest) -> DryRun:
    program = request.program
    build = look_up(program.model)
    with torch.device("meta"):
        model = build(request.plan)
    return run_dry_step(
        model,
        request.plan,
        loss=look_up(program.loss),
        optimizer=look_up(program.optimizer),
        batch=look_up(program.batch),
        rank=request.rank,
    )


if __name__ == "__main__":
    main()
