"""The programs in examples/ run, on one rank and on two, and say what they promise."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sampling import sampled

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "fsdp_basics.py": "loss",
    "fsdp_transformer.py": "step 30: loss",
    "fsdp_checkpoint.py": "no_shard to step 20",
    "fsdp_memory_efficient.py": "and 4 microbatches",
}


def run_example(name: str) -> str:
    sys.argv = [name]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", sampled(SAYS, here=["fsdp_basics.py", "fsdp_checkpoint.py"]))
def test_the_example_runs(name: str, world_size: int, ranks: Any) -> None:
    outputs = ranks(world_size).run(run_example, name)
    assert SAYS[name] in outputs[0]
    assert not any(outputs[1:]), "rank 0 speaks for all"


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys()
