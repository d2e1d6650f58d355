"""The optimizer's step on a drive against what drive and processor allow: bench/results/…-offload.md.

python bench/offload.py [--parameters 96000000] [--groups 8000000] [--turns 7] [--directory DIR]

In each turn, in this and the other order: `step`, AdamW streamed through the drive, until the generation is
committed; `drive`, as many bytes read from one file and written to another at once, past the page cache, in
pieces of a group's size, flushed at the end; `adam`, torch's fused AdamW on as many elements in memory. The
step can be no quicker than the longer of both.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.distributed.host import allocate_host_memory, as_memoryview
from fullshard.offload.drive import DriveFile
from fullshard.offload.drive_store import DriveStore
from fullshard.offload.state import find_offloaded_state
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard

WIDTH = 2048


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=96_000_000)
    parser.add_argument("--groups", type=int, default=8_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path(".probe"))
    asked = parser.parse_args()
    asked.directory.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="offload-", dir=asked.directory)).absolute()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compare(directory, count=asked.parameters // WIDTH**2, groups=asked.groups, turns=asked.turns)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(directory)


def compare(directory: Path, *, count: int, groups: int, turns: int) -> None:
    elements = count * WIDTH**2
    step = streamed_step(directory, count=count, groups=groups)
    drive = plain_loop(directory, size_bytes=12 * elements, piece_bytes=12 * groups)
    adam = in_memory(elements)
    print(f"{elements / 1e6:.0f}M parameters, {24 * elements / 1e9:.2f} GB read and written a step")
    for act in (step, drive, adam):
        seconds(act)  # what is written for the first time is slower
    ratios: list[float] = []
    for turn in range(turns):
        acts = (step, drive, adam) if turn % 2 == 0 else (adam, drive, step)
        took = {act: seconds(act) for act in acts}
        ratios.append(took[step] / max(took[drive], took[adam]))
        print(
            f"turn {turn}: step {took[step]:.2f} s, drive {took[drive]:.2f} s, adam {took[adam]:.2f} s: "
            f"{ratios[-1]:.2f} of the longer",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def seconds(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def streamed_step(directory: Path, *, count: int, groups: int) -> Callable[[], None]:
    run = Run.load(
        overrides=[
            f"run.dir={directory}/run",
            "offload.tier=optimizer:nvme",
            f"offload.sub_group_parameters={groups}",
            "train.global_batch=1",
        ]
    )
    plan = Plan.from_run(run, world_size=1)
    with torch.device("meta"):
        model = Layers(count)
    shard(model, plan)
    optimizer = build_optimizer(model, plan)
    offloaded = find_offloaded_state(model)
    assert offloaded is not None
    store = offloaded.store
    assert isinstance(store, DriveStore)
    gradients = [torch.randn_like(p.detach()) for p in model.parameters()]
    done = 0

    def act() -> None:
        nonlocal done
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        offloaded.wait_for_update()
        done += 1
        store.commit_generation(100 + done, b"")

    return act


def plain_loop(directory: Path, *, size_bytes: int, piece_bytes: int) -> Callable[[], None]:
    files = [DriveFile.open_or_create(directory / f"plain-{one}", size_bytes) for one in range(2)]
    buffers = [as_memoryview(allocate_host_memory(piece_bytes, pinned=False)) for _ in files]
    turn = 0

    def through(transfer: Callable[[memoryview, int], None], buffer: memoryview) -> None:
        for begin in range(0, size_bytes, piece_bytes):
            transfer(buffer[: min(piece_bytes, size_bytes - begin)], begin)

    def act() -> None:
        nonlocal turn
        source, target = files[turn % 2], files[1 - turn % 2]
        turn += 1
        reading = threading.Thread(target=through, args=(source.read, buffers[0]))
        reading.start()
        through(target.write, buffers[1])
        reading.join()
        target.flush()

    act()  # each is written once before it is read
    return act


def in_memory(elements: int) -> Callable[[], None]:
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def act() -> None:
        optimizer.step()

    return act


if __name__ == "__main__":
    main()
