"""Plans for GPUs, run whole on the fake CUDA: nothing uses memory in an order that no stream keeps."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.data.batches import MicrobatchPrefetcher
from fullshard.distributed.tensors import local_tensor
from fullshard.training.loop import train
from fullshard.training.state import TrainState
from tests.fakes.cuda import FakeCuda
from tests.training.runs import Pairs, mean_square, run_of, sharded
from tests.training.test_offloaded import Odd

OWN = 3  # the rank's device; threads begin on device 0
CLEAN = {"faults": [], "contexts": {OWN}, "registered": {}, "stalls": []}
Found = tuple[list[tuple[float, float]], dict[str, Tensor]]  # losses and norms, and values at the end


def values(state: TrainState) -> dict[str, Tensor]:
    """This rank's parts of the parameters and of the optimizer's state, copied to the host."""
    return {name: local_tensor(one).detach().cpu().clone() for name, one in state.tensors().items()}


def run(*more: str, saves: str) -> Found:
    """Trains four steps of several microbatches that a thread prefetches, and saves two states in `saves`."""
    state, plan = sharded(run_of("train.steps=4", *more), model=Odd, device="cuda")
    steps = []
    with MicrobatchPrefetcher(Pairs(), steps=1) as state.data, BackgroundSaver(saves) as saver:
        for step in train(state, plan, loss=mean_square):
            steps.append(step)
            if step.index in (1, 3):
                saver.save(state)
        saver.wait()
        assert [str(one.error) for one in saver.outcomes()] == ["None"] * 2
        shards = [local_tensor(one) for one in state.tensors().values() if isinstance(one, DTensor)]
        assert 0 < saver.staged_bytes <= sum(one.nbytes + 64 for one in shards) + 4096, "one slab"
    return [(one.loss, one.grad_norm) for one in steps], values(state)


def run_on_fake_cuda(*more: str, saves: str) -> tuple[Found, dict[str, Any]]:
    """Returns the result of `run`, and what the fake CUDA has noted once its objects are dropped."""
    with FakeCuda(index=OWN) as cuda:
        found = run(*more, saves=saves)
        gc.collect()
        # Only the thread of a save waits for its copies.
        stalls = [one for one in cuda.waits if "background.py" in one and "wait_for_copies" not in one]
        noted = {name: getattr(cuda, name) for name in ("faults", "contexts", "registered")}
        return found, noted | {"stalls": stalls}


def differences(cases: list[tuple[str, ...]], directory: str, common: tuple[str, ...]) -> list[Any]:
    """Returns how the runs with the settings of each case differ from the run with `common` alone."""
    (figures, tensors), noted = run_on_fake_cuda(*common, saves=f"{directory}/saves")
    found: list[Any] = [noted]
    for i, case in enumerate(cases):
        where = f"{directory}/{i}"
        settings = (*common, *case, f"run.dir={where}")
        (own, others), noted = run_on_fake_cuda(*settings, saves=f"{where}/saves")
        same = own == figures and all(torch.equal(tensors[name], others[name]) for name in tensors)
        found.append(noted if same else (case, own, figures))
    return found


def tier(name: str, update: str) -> tuple[str, ...]:
    return f"offload.tier={name}", f"offload.update={update}", "offload.sub_group_parameters=1"


@pytest.mark.parametrize(
    ("n", "common", "cases"),
    [
        (
            *(1, ("train.microbatch=3",)),
            [
                *(tier("optimizer:cpu", "host"), tier("params+optimizer:cpu", "device")),
                *(tier("optimizer:nvme", "device"), tier("params+optimizer:nvme", "host")),
                ("recompute.mode=offload",),
            ],
        ),
        (2, ("train.microbatch=2",), [tier("optimizer:cpu", "device")]),
    ],
)
def test_tiers_train_the_same_numbers_and_leave_nothing_unordered(  # signature: the parameters'
    n: int, common: tuple[str, ...], cases: Any, ranks: Any, tmp_path: Path
) -> None:
    """Gradients are accumulated; a scalar stays on the device; a second model follows the first."""
    found = ranks(n).run(differences, cases, str(tmp_path), common)
    assert found == [[CLEAN] * (1 + len(cases))] * n
