"""The items for one GPU, in order of worth: what a machine that is lost early has shown by then."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import NamedTuple

from bench.gpu.items import (
    BF16,
    DOCUMENTS,
    FAST,
    SEGMENTS,
    SHARED,
    SMALL,
    SMOLLM3,
    WAITS,
    Item,
    Variant,
    preset_settings,
)


class Rung(NamedTuple):
    """A setting that makes a step faster or smaller, on top of those of the rungs below it."""

    name: str
    what: str
    settings: tuple[str, ...]


LADDER = (
    Rung(
        *("eager", "a kernel per operation, whole logits, a wait for each step"),
        ("run.compile=false", "train.loss_chunk=0", WAITS),
    ),
    Rung("compile", "torch.compile of each block", ("run.compile=true",)),
    Rung("chunked loss", "logits in chunks of rows", ("train.loss_chunk=auto",)),
    Rung(
        *("relaxed order", "the host launches a step before it reads the last one's figures"),
        ("fault_tolerance.on_spike=none",),
    ),
    Rung("fp8", "matmuls of blocks in fp8", ("precision.mode=fp8",)),
)
BF16_RUNGS = LADDER[:-1]

SMOLLM3_3B = (*SHARED, *preset_settings("smollm3-3b"))
# fp32 shards and AdamW's state would take 120 GiB, so 8B is in bf16 on one GPU.
LLAMA3_8B = (*SHARED, *preset_settings("llama3-8b"), "precision.mode=bf16_pure", "recompute.mode=full")
LLAMA32_1B = (*SHARED, *preset_settings("llama3.2-1b"), "data.sequence_length=4096")
GUIDE = (
    *(*SHARED, f"model.hf={SMOLLM3}", "model.weights=none", "data.source=stdlib"),
    *("precision.mode=bf16_pure", "recompute.mode=full", "run.compile=false", "train.loss_chunk=0"),
)


def ladder_items(group: str, model: tuple[str, ...], *, rungs: Sequence[Rung]) -> list[Item]:
    """Returns an item for each rung, with its settings and those of the rungs below it."""
    items, settings = list[Item](), model
    for rung in rungs:
        settings = (*settings, *rung.settings)
        name = f"{group}/{rung.name.replace(' ', '-')}"
        items.append(Item(name, rung.what, "train", settings, microbatches=(1, 4)))
    return items


_FP8 = ("fp8", "fp8_rowwise")
_MIXTURE = (
    *(*SHARED, *FAST, "model.vocabulary=50304", "model.d_model=2048", "model.layers=8", "model.heads=16"),
    *("model.kv_heads=16", "model.d_ff=1024", "model.max_sequence=8192"),
    *("model.experts=64", "model.experts_per_token=8", "model.expert_d_ff=1024"),
)
_BEGUN = Variant("begun on the cpu", ("run.device=cpu", "train.steps=1"))
_TOGETHER = (
    Variant("cpu", ("run.device=cpu",)),
    Variant("fp32", like="cpu"),
    Variant("4 microbatches", ("train.microbatch=4",), like="fp32"),
    Variant("compiled", ("run.compile=true",), like="fp32"),
    Variant("whole logits", ("train.loss_chunk=0",), like="fp32"),
    Variant("recompute", ("recompute.mode=full",), like="fp32"),
    Variant("activations offloaded", ("recompute.mode=offload",), like="fp32"),
    Variant("optimizer:cpu", ("offload.tier=optimizer:cpu", "offload.update=host"), like="fp32"),
    Variant("updated by the device", ("offload.tier=optimizer:cpu", "offload.update=device"), like="fp32"),
    Variant("params+optimizer:cpu", ("offload.tier=params+optimizer:cpu",), like="fp32"),
    Variant("params+optimizer:nvme", ("offload.tier=params+optimizer:nvme",), like="fp32"),
    Variant("saved", ("checkpoint.every=2",), like="fp32", within=0),
    Variant(
        "saved in the background", ("checkpoint.every=2", "checkpoint.mode=async"), like="saved", within=0
    ),
)
_FP32_RUNS = (_BEGUN, *(one._replace(begins_as=_BEGUN.name) for one in _TOGETHER))
_IN_BF16 = (
    _BEGUN,
    Variant("relaxed order"),
    Variant("strict order", (WAITS,), like="relaxed order", within=0),
    Variant("bf16_pure, relaxed order", ("precision.mode=bf16_pure",)),
    Variant(
        *("bf16_pure, strict order", ("precision.mode=bf16_pure", WAITS)),
        like="bf16_pure, relaxed order",
        within=0,
    ),
    Variant("on the cpu", ("run.device=cpu",), begins_as=_BEGUN.name),
    Variant("on the device", like="on the cpu", within=2e-2, begins_as=_BEGUN.name),
    Variant("documents on the cpu", ("run.device=cpu", *DOCUMENTS), begins_as=_BEGUN.name),
    Variant(
        "documents",
        DOCUMENTS,
        like="documents on the cpu",
        within=2e-2,
        begins_as=_BEGUN.name,
    ),
    Variant("250 rows", ("data.sequence_length=250", "train.microbatch=1")),  # no multiple of 16
    *(
        Variant(
            f"250 rows, {mode}",
            (f"precision.mode={mode}", "data.sequence_length=250", "train.microbatch=1")
            + ("precision.fp8_min_features=256",),
            like="250 rows",
            within=5e-2,
        )
        for mode in _FP8
    ),
)
_SMOKE = (
    Variant("whole", ("train.steps=6", "train.validate_every=2")),
    Variant("begun", ("train.steps=3", "train.validate_every=2", "checkpoint.every=3")),
    Variant(
        "resumed", ("train.steps=6", "train.validate_every=2"), continues="begun", like="whole", within=0
    ),
)


def _first_and_correct() -> list[Item]:
    return [
        Item("kernels", "which attention kernel runs, and the rates of matmuls", "kernels", seconds=60),
        Item(
            *("smoke/train", "train 3 steps, validate twice, save, verify, resume", "runs", SMALL, 60),
            variants=_SMOKE,
        ),
        Item("smoke/generate", "`generate` of a sharded model", "generate", seconds=25),
        Item("tests", "the suite's CUDA tests", "tests", seconds=120),
        Item(
            *("waits", "where the host waits for the device in three steps", "waits", SMALL, 60),
            microbatches=(2,),
        ),
        Item("correct/fp32", "the same losses and norms", "runs", SMALL, 150, variants=_FP32_RUNS),
        Item(
            *("correct/bf16", "strict order, documents, fp8 of odd rows", "runs", (*SMALL, BF16), 120),
            variants=_IN_BF16,
        ),
        Item("calibrate", "the rates of this machine, as hardware.toml", "calibrate", seconds=50),
    ]


def _ladders_and_peers() -> list[Item]:
    eager = (*SMOLLM3_3B, "run.compile=false", "train.loss_chunk=0", WAITS)
    compiled = (*eager, "run.compile=true")
    relaxed = (*compiled, "fault_tolerance.on_spike=none")
    titan = (*relaxed, "model.tied=false")
    own_8b = (*LLAMA3_8B, "run.compile=true", "train.loss_chunk=0")
    return [
        *ladder_items("3b", SMOLLM3_3B, rungs=LADDER),
        Item("3b/plain-eager", "peer: a plain fully_shard loop", "plain", eager, 45),
        Item("3b/plain-compiled", "peer: compiled blocks", "plain", compiled, 50, (1, 4)),
        Item("3b/plain-no-waits", "peer: reads no figures", "plain", relaxed, 50, (1, 4)),
        Item("3b/torchtitan", "peer: torchtitan's Llama, its head not tied", "torchtitan", titan, 50, (1, 4)),
        *ladder_items("8b", LLAMA3_8B, rungs=BF16_RUNGS),
        Item("8b/plain-recompute", "peer: a plain fully_shard loop, compiled", "plain", own_8b, 60, (1, 4)),
        Item("guide/fullshard", "transformers' SmolLM3 with the guide's settings", "train", GUIDE),
        Item("guide/transformers", "peer: the guide's own loop", "transformers", (*GUIDE, WAITS)),
    ]


def _memory_documents_and_fp8() -> list[Item]:
    fast = (*SMOLLM3_3B, *FAST)
    smallest = (*fast, "precision.mode=bf16_pure", "recompute.mode=full")
    low_bits = (*smallest, BF16, "optimizer.name=adamw8bit")
    outside = (*fast, "recompute.mode=full", "offload.tier=params+optimizer:cpu")
    texts = (*fast, "data.source=stdlib", "train.steps=200", "train.global_batch=1")
    fixed = Item("memory/fixed-segments", "without expandable segments", "train", fast, 45)
    return [
        Item("memory/adamw", "the lowest memory of SmolLM3-3B: all in bf16", "train", smallest, 45),
        Item("memory/host", "all state in host memory", "train", outside, 90),
        replace(fixed, environment={"PYTORCH_ALLOC_CONF": SEGMENTS[False]}),
        Item("memory/adamw8bit", "fp32 shards with 8-bit moments", "train", low_bits),
        *(
            Item(f"documents/{count}", "attention within documents", "train", fast, 50, documents=count)
            for count in (0, 1, 4)
        ),
        Item("fp8/3b-rowwise", "rowwise scales at 3B", "train", (*fast, "precision.mode=fp8_rowwise")),
        Item(
            *("losses", "200 steps of SmolLM3-3B on text", "runs", texts, 420),
            variants=(
                Variant("bf16"),
                *(Variant(one, (f"precision.mode={one}",), 1, "bf16", 0.05) for one in _FP8),
            ),
        ),
        Item("experts", "a mixture of 64 experts, of 8 for each token", "train", _MIXTURE),
    ]


def _strategies_and_offload() -> list[Item]:
    offloaded = (*LLAMA32_1B, *FAST, "recompute.mode=full")
    hosts = ("none", "optimizer:cpu", "params+optimizer:cpu", "optimizer:nvme", "params+optimizer:nvme")
    longer = (*SMOLLM3_3B, *FAST, "data.sequence_length=16384")
    return [
        *(
            Item(f"offload/{tier}", "offload targets", "train", (*offloaded, f"offload.tier={tier}"), seconds)
            for tier, seconds in zip(hosts, (40, 50, 60, 120, 120), strict=True)
        ),
        *(
            Item(f"offload/update-{where}", f"optimizer:cpu, updated by the {where}", "train", settings)
            for where in ("host", "device")
            for settings in [(*offloaded, "offload.tier=optimizer:cpu", f"offload.update={where}")]
        ),
        Item(
            *("offload/CPUOffloadPolicy", "peer: a plain loop with FSDP2's policy", "plain"),
            settings=(*offloaded, "train.loss_chunk=0", "offload.tier=params+optimizer:cpu", WAITS),
            seconds=90,
        ),
        *(
            Item(f"activations/{mode}", "activations of long sequences", "train", settings, 60)
            for mode in ("none", "full", "offload")
            for settings in [(*longer, f"recompute.mode={mode}")]
        ),
        *(
            Item(f"zero/{name}", "strategies side by side", "train", (*SMOLLM3_3B, *FAST, strategy))
            for name in ("zero2", "no_shard")
            for strategy in [f"sharding.strategy={name}"]
        ),
    ]


# Items that follow all others, which take less than 40 minutes. For more time, or `--resume`.
LATER = (
    *("8b/eager", "8b/compile", "guide/*", "memory/adamw8bit", "memory/fixed*", "documents/1", "losses"),
    *("fp8/*", "offload/*nvme", "offload/update-*", "zero/*", "experts"),
)


def is_later(item: Item) -> bool:
    return any(fnmatch(item.name, pattern) for pattern in LATER)


ONE_GPU = tuple(
    sorted(
        [
            *_first_and_correct(),
            *_ladders_and_peers(),
            *_memory_documents_and_fp8(),
            *_strategies_and_offload(),
        ],
        key=is_later,
    )
)
