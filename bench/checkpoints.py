"""Saving and loading against the disk itself, in pairs in one job: the page bench/results/…-checkpoints.md.

torchrun --nproc-per-node 2 bench/checkpoints.py [--turns 5] [--beside-only] [--directory .probe]

A decoder of 520M parameters with AdamW's state (6.2 GB in fp32) over the ranks. Each turn, in this order
and the next turn in the other: plain sequential writes of as many bytes by as many processes, with one fsync
each; a save; a save without digests. Then the page cache is emptied (as root, else each file is put
out of it) and the checkpoint is read plainly and loaded. Then training: so many steps alone, and as many from
the moment that a save in the background begins.
"""

import argparse
import gc
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from fullshard.checkpoint import BackgroundSaver, load, save
from fullshard.models.decoder import DecoderModel
from fullshard.parallel.mesh import process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows

DIRECT_BLOCK = 16 << 20
BLOCK = 256 << 10  # of 256 KiB, 1, 4 and 16 MiB the quickest here, in writing and in reading
SIZES = [
    "model.d_model=1536",
    "model.layers=20",
    "model.heads=12",
    "model.kv_heads=6",
    "model.d_ff=4096",
    "data.sequence_length=32",
    "train.global_batch=4",
    "train.steps=100000",
    "sharding.strategy=full_shard",
    "precision.mode=fp32",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=Path(".probe"))
    parser.add_argument("--beside-only", action="store_true", help="not the writing and reading alone")
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args()
    with process_group("cpu"):
        state, plan = trained(asked.settings)
        if dist.get_rank() == 0:
            asked.directory.mkdir(exist_ok=True)
            print(f"{own_bytes(state) * plan.world_size / 1e9:.2f} GB of state on {plan.world_size} ranks")
        for turn in range(0 if asked.beside_only else asked.turns):
            writing(state, asked.directory / "checkpoints", turn)
            reading(state, asked.directory / "checkpoints", turn)
        for turn in range(asked.turns):
            beside_training(state, plan, asked.directory / "checkpoints", steps=asked.steps, turn=turn)


def trained(settings: list[str]) -> tuple[TrainState, Plan]:
    """With one step behind it, so that the optimizer has its state."""
    run = Run.load(overrides=[*SIZES, *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=Rows(run.decoder_config.vocabulary))
    next(train(state, plan))
    return state, plan


def local_shards(state: TrainState) -> Iterator[torch.Tensor]:
    return (t.to_local() for t in state.tensors().values() if hasattr(t, "to_local"))


def own_bytes(state: TrainState) -> int:
    return sum(shard.nbytes for shard in local_shards(state))


def writing(state: TrainState, directory: Path, turn: int) -> None:
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: write_plainly(state, directory.parent),
        "direct": lambda: write_directly(state, directory.parent),
        "save": lambda: save(state, directory),
        "undigested": lambda: save_undigested(state, directory),
    }
    seconds = in_turn(ways, turn, before=lambda: clear(directory))
    say(
        f"write {turn}: plain {seconds['plain']:.2f} s, direct {seconds['direct']:.2f} s, save "
        f"{seconds['save']:.2f} s, without digests {seconds['undigested']:.2f} s; save at "
        f"{seconds['plain'] / seconds['save']:.3f} of plain, {seconds['direct'] / seconds['save']:.3f} of "
        f"direct, digests cost {100 * (seconds['save'] / seconds['undigested'] - 1):+.1f} %"
    )


def reading(state: TrainState, directory: Path, turn: int) -> None:
    clear(directory)
    save(state, directory)
    (path,) = directory.glob("step-*")
    file = path / f"__{dist.get_rank()}_0.distcp"
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: read_plainly(file),
        "load": lambda: load(state, directory),
    }
    seconds = in_turn(ways, turn, before=lambda: forget(file))
    say(
        f"read {turn}: plain {seconds['plain']:.2f} s, load {seconds['load']:.2f} s; load at "
        f"{seconds['plain'] / seconds['load']:.3f} of plain"
    )


def beside_training(state: TrainState, plan: Plan, directory: Path, *, steps: int, turn: int) -> None:
    """As many steps as the save takes, and at least `steps`; as many alone before and after."""
    gc.collect()  # the copies of the turn before: two of them do not fit into 24 GiB
    clear(directory)
    at_once = timed(lambda: save(state, directory))
    clear(directory)
    running = train(state, plan)
    with BackgroundSaver(directory) as saver:
        saver.save(state)  # the copies' memory is allocated by the first
        next(running)
        saver.wait()
        saver.outcomes()
        clear(directory)
        alone = [next(running).seconds for _ in range(steps)]
        began = time.perf_counter()
        saver.save(state)
        called = time.perf_counter() - began
        beside: list[float] = []
        while not (ended := agreed(saver)):
            beside.append(next(running).seconds)
        alone += [next(running).seconds for _ in range(steps)]
    (outcome,) = ended
    assert outcome.error is None, outcome.error
    with_it, without = statistics.mean(beside), statistics.mean(alone)
    say(
        f"beside {turn}: save at once {at_once:.2f} s; in the background {outcome.seconds:.2f} s, training "
        f"waited {outcome.stalled_seconds:.3f} s ({100 * outcome.stalled_seconds / at_once:.1f} %, the call "
        f"{called:.3f} s); steps {with_it:.2f} s beside it ({len(beside)}), {without:.2f} s alone: "
        f"{100 * (with_it / without - 1):+.1f} %; "
        f"{saver.staged_bytes / 1e9:.2f} GB a rank for the copy of {own_bytes(state) / 1e9:.2f} GB"
    )


def agreed(saver: BackgroundSaver) -> list:
    """Outcomes, once every rank has one: all leave the loop together."""
    done = torch.tensor([float(saver.is_idle)])
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    return saver.outcomes() if done.item() else []


def write_plainly(state: TrainState, directory: Path) -> None:
    path = directory / f"plain-{dist.get_rank()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in local_shards(state):
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, data.nbytes, BLOCK):
            part = data[begin : begin + BLOCK]
            while part.nbytes:
                part = part[os.write(descriptor, part) :]
    os.fsync(descriptor)
    os.close(descriptor)


def write_directly(state: TrainState, directory: Path) -> None:
    """Past the page cache, from one block that is aligned: the quickest way to this disk that is known."""
    path, block = directory / f"plain-{dist.get_rank()}", mmap.mmap(-1, DIRECT_BLOCK)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    for _ in range(own_bytes(state) // DIRECT_BLOCK + 1):
        os.write(descriptor, block)
    os.fsync(descriptor)
    os.close(descriptor)


def read_plainly(path: Path) -> None:
    descriptor, buffer = os.open(path, os.O_RDONLY), bytearray(BLOCK)
    while os.readv(descriptor, [buffer]):
        pass
    os.close(descriptor)


def save_undigested(state: TrainState, directory: Path) -> None:
    with undigested():
        save(state, directory)


@contextmanager
def undigested() -> Iterator[None]:
    class NoDigest:
        def __init__(self, data: object = b"") -> None: ...

        def update(self, data: object) -> None: ...

        def hexdigest(self) -> str:
            return "0" * 32

    before = xxhash.xxh3_128
    xxhash.xxh3_128 = NoDigest
    try:
        yield
    finally:
        xxhash.xxh3_128 = before


def in_turn(
    ways: dict[str, Callable[[], object]], turn: int, *, before: Callable[[], None]
) -> dict[str, float]:
    """Seconds of each way, in the other order every other turn. What is done `before` each does not count."""
    seconds: dict[str, float] = {}
    for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
        before()
        seconds[name] = timed(ways[name])
    return seconds


def timed(act: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - began


def clear(directory: Path) -> None:
    """Nothing is left to write, and the disk has done what it was given."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        for path in directory.parent.glob("plain-*"):
            path.unlink()
        os.sync()
        time.sleep(0.5)
    dist.barrier()


def forget(path: Path) -> None:
    """Empties the page cache."""
    dist.barrier()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if dist.get_rank() == 0:
        os.sync()
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3")
    dist.barrier()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
