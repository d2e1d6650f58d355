"""`fullshard check` on ranks that a launcher started."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch.distributed as dist

from fullshard.cli.main import main


def check_on_ranks() -> tuple[int, str, str]:
    """Checks a run that cannot be planned on rank 0. Returns the exit code, and what is printed."""
    batch = 5 if dist.get_rank() == 0 else 6
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    words = ["check", "--set", f"train.global_batch={batch}", "--set", "run.device=cpu"]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        return main(words), out.getvalue(), err.getvalue()


def test_the_error_of_rank_0s_plan_is_the_finding_of_all_ranks(ranks: Any) -> None:
    (code, shown, _), *others = ranks(2).run(check_on_ranks)
    assert (code, shown.count("failure: plan: ")) == (10, 1)
    unused = "note: rank 1: not used, because rank 0's hold: train.global_batch = 6 (used: 5)\n"
    assert others == [(0, "", unused)], "it planned nothing, or would wait for rank 0"
