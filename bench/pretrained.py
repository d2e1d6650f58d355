"""Weights in and out of a Hugging Face directory, against the disk: the page bench/results/…-pretrained.md.

torchrun --nproc-per-node 2 bench/pretrained.py [--gigabytes 4] [--turns 3] [--directory .probe]

A Llama in bf16 of so many bytes is made on the spot, in files of 1 GB. Each turn, in one order and the next
turn in the other, past the page cache: every rank reads its share of the files' bytes plainly; every rank
imports its shards (fp32 masters, full_shard). Then the model is saved, and rank 0 alone exports it: against
reading the checkpoint's bytes plainly and writing the export's. Memory is a rank's peak (VmHWM, which Linux
lets a process reset) over what it had after its imports of Python modules.
"""

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import save
from fullshard.models.huggingface import build_hf_model
from fullshard.parallel.mesh import process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.weights.export_hf import export_hf
from fullshard.weights.pretrained import load_pretrained

BLOCK = 256 << 10
VOCABULARY, WIDTH, FEED_FORWARD = 32_000, 2048, 5632
LAYER_PARAMETERS = 4 * WIDTH * WIDTH + 3 * WIDTH * FEED_FORWARD + 2 * WIDTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(".probe"))
    asked = parser.parse_args()
    directory = asked.directory / "pretrained"
    with process_group("cpu"):
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
            make(directory / "in", asked.gigabytes)
        dist.barrier()
        plan = plan_of(directory / "in")
        build_hf_model(HuggingFaceModel(hf=str(directory / "in")))  # imports what building imports
        for turn in range(asked.turns):
            importing(directory / "in", plan, turn)
        saved(directory, plan)
        gc.collect()
        for turn in range(asked.turns):
            if dist.get_rank() == 0:
                exporting(directory, turn)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory)


def make(directory: Path, gigabytes: float) -> None:
    """A Llama's directory, written a file at a time."""
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * VOCABULARY * WIDTH) / LAYER_PARAMETERS))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    model = build_hf_model(HuggingFaceModel(hf=str(directory)))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        part[name] = torch.randn(shape, dtype=torch.bfloat16)
        if sum(tensor.nbytes for tensor in part.values()) > 1e9 or name == list(shapes)[-1]:
            file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
            save_file(part, directory / file, metadata={"format": "pt"})
            names |= dict.fromkeys(part, file)
            part = {}
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    total = sum(path.stat().st_size for path in weights(directory))
    print(f"a Llama of {layers} layers, {total / 1e9:.2f} GB in {len(weights(directory))} files", flush=True)


def plan_of(source: Path) -> Plan:
    settings = [f"model.hf={source}", "sharding.strategy=full_shard", "precision.mode=fp32"]
    run = Run.load(overrides=[*settings, "train.global_batch=8"])
    return Plan.from_run(run, world_size=dist.get_world_size())


def importing(source: Path, plan: Plan, turn: int) -> None:
    """Shards are allocated before, in both ways: it is reading that is compared."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gc.collect()  # the model of the turn before
    before = memory("VmRSS")
    model = shard(build_hf_model(HuggingFaceModel(hf=str(source))), plan, init="none")
    shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    seconds = in_turn(
        {
            "plain": lambda: [read_share(path, rank, ranks) for path in weights(source)],
            "import": lambda: load_pretrained(model, source, plan=plan),
        },
        turn,
        forget_before=weights(source),
    )
    over = memory("VmHWM") - before - shards
    largest = torch.tensor([over / 2**20])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(
            f"import {turn}: plain {seconds['plain']:.2f} s, import {seconds['import']:.2f} s = "
            f"{seconds['import'] / seconds['plain']:.2f} of plain; peak over the shards "
            f"({shards / 2**20:.0f} MiB a rank): {largest.item():.0f} MiB",
            flush=True,
        )


def saved(directory: Path, plan: Plan) -> None:
    gc.collect()
    model = shard(build_hf_model(HuggingFaceModel(hf=str(directory / "in"))), plan, init="none")
    load_pretrained(model, directory / "in", plan=plan)
    save(TrainState(model, build_optimizer(model, plan)), directory / "checkpoints", plan=plan)


def exporting(directory: Path, turn: int) -> None:
    """Exports fp32 as it was saved, in files of 1 GB: as many bytes are read as written."""
    (checkpoint,) = (directory / "checkpoints").glob("step-*")
    data = sorted(checkpoint.glob("*.distcp"))
    target = directory / "out"
    before = memory("VmRSS")
    reset_peak()
    seconds = in_turn(
        {
            "plain": lambda: copy_plainly(data, directory / "plain"),
            "export": lambda: export_hf(checkpoint, target, shard_bytes=1_000_000_000),
        },
        turn,
        forget_before=data,
        collective=False,
    )
    over = (memory("VmHWM") - before) / 2**20
    same = sum(path.stat().st_size for path in weights(target)) / sum(path.stat().st_size for path in data)
    print(
        f"export {turn}: plain {seconds['plain']:.2f} s, export {seconds['export']:.2f} s = "
        f"{seconds['export'] / seconds['plain']:.2f} of plain ({100 * same:.0f} % of its bytes); "
        f"peak {over:.0f} MiB over what it had before",
        flush=True,
    )
    for path in (target, directory / "plain"):
        shutil.rmtree(path)


def weights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def read_share(path: Path, rank: int, ranks: int) -> None:
    """This rank's part of a file, one block after the other."""
    size = path.stat().st_size
    position, end = size * rank // ranks, size * (rank + 1) // ranks
    descriptor, buffer = os.open(path, os.O_RDONLY), memoryview(bytearray(BLOCK))
    while position < end:
        position += os.preadv(descriptor, [buffer[: end - position]], position)
    os.close(descriptor)


def copy_plainly(paths: list[Path], target: Path) -> None:
    target.mkdir()
    buffer = memoryview(bytearray(BLOCK))
    for path in paths:
        source = os.open(path, os.O_RDONLY)
        copy = os.open(target / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        while count := os.readv(source, [buffer]):
            os.write(copy, buffer[:count])
        os.fsync(copy)
        os.close(copy)
        os.close(source)


def in_turn(
    ways: dict[str, Callable[[], object]], turn: int, *, forget_before: list[Path], collective: bool = True
) -> dict[str, float]:
    """Seconds of each way, in the other order every other turn; the page cache is emptied before each."""
    seconds: dict[str, float] = {}
    for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
        forget(forget_before, collective=collective)
        if name == "import":
            reset_peak()
        began = time.perf_counter()
        ways[name]()
        if collective:
            dist.barrier()
        seconds[name] = time.perf_counter() - began
    return seconds


def forget(paths: list[Path], *, collective: bool) -> None:
    if collective:
        dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        time.sleep(0.5)
    if collective:
        dist.barrier()


def memory(key: str) -> int:
    """Bytes, as Linux tells of this process: VmRSS, VmHWM (the highest RSS)."""
    return next(value for name, value in status() if name == key)


def status() -> Iterator[tuple[str, int]]:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            yield name, int(value.split()[0]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
