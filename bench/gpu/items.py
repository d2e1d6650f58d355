"""The items of the programme, in order of worth. Each is measured in a process of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Literal, NamedTuple

from fullshard.spec.pretrained import read_presets

Kind = Literal[
    *("kernels", "tensor_parallel", "grouped_matmuls", "context_parallel"),
    *("train", "losses", "plain", "transformers", "torchtitan", "calibrate", "tests"),
]

SEGMENTS = {False: "expandable_segments:False", True: "expandable_segments:True"}
SMOLLM3 = "examples/smollm3/config.json"


class Rung(NamedTuple):
    """A setting that makes a step faster or smaller, on top of those of the rungs below it.

    what: what changes, in a few words
    settings: `section.key=value`, which replace those of the rungs below
    expandable_segments: whether CUDA's allocator grows its segments from here on, instead of making new ones
    """

    name: str
    what: str
    settings: tuple[str, ...] = ()
    expandable_segments: bool = False


LADDER = (
    Rung("eager", "a kernel per operation, whole logits", ("run.compile=false", "train.loss_chunk=0")),
    Rung("compile", "torch.compile of each block", ("run.compile=true",)),
    Rung("chunked loss", "logits in chunks of rows", ("train.loss_chunk=auto",)),
    Rung("segments", "expandable segments of CUDA's allocator", expandable_segments=True),
    Rung("fp8", "matmuls of blocks in fp8", ("precision.mode=fp8",)),
)


@dataclass(frozen=True)
class Item:
    """One measurement.

    answers: the question that it answers
    kind: how it is measured, a key of `bench.gpu.measure.KINDS`
    settings: `section.key=value` of the run; a peer does by hand what they say
    seconds: expected on one H200, with the start of the process
    microbatches: numbers of microbatches per step, each measured
    environment: of its process
    most_seconds: after which its process is killed; 0: 2.5 times `seconds` and half a minute
    """

    name: str
    answers: str
    kind: Kind = "train"
    settings: tuple[str, ...] = ()
    seconds: int = 60
    microbatches: tuple[int, ...] = (1,)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    most_seconds: float = 0

    @property
    def limit_seconds(self) -> float:
        """Seconds after which the item's process is killed."""
        return self.most_seconds or 2.5 * self.seconds + 30

    @property
    def group(self) -> str:
        """The part of the name before the slash. Items of a group are compared with each other."""
        return self.name.partition("/")[0]


def preset_settings(name: str) -> tuple[str, ...]:
    """Returns the sizes of a preset as settings."""
    model = next(preset.model for preset in read_presets() if preset.name == name)
    return tuple(f"model.{key}={str(value).lower()}" for key, value in model)


def with_allocator(item: Item, *, expandable: bool) -> Item:
    """Returns the item with expandable segments of CUDA's allocator, or with fixed ones."""
    return replace(item, environment={**item.environment, "PYTORCH_ALLOC_CONF": SEGMENTS[expandable]})


def ladder_items(
    group: str, model: tuple[str, ...], *, rungs: Sequence[Rung] = LADDER, seconds: int = 90
) -> list[Item]:
    """Returns an item for each rung, with its settings and those of the rungs below it."""
    items, settings, expandable = list[Item](), model, False
    for rung in rungs:
        settings, expandable = (*settings, *rung.settings), expandable or rung.expandable_segments
        name = f"{group}/{rung.name.replace(' ', '-')}"
        item = Item(name, rung.what, "train", settings, seconds=seconds, microbatches=(1, 2, 4))
        items.append(with_allocator(item, expandable=expandable))
    return items


# One sequence of 8,192 random tokens per microbatch. The planner chooses what is not set.
SHARED = (
    *("run.device=cuda", "data.sequence_length=8192", "train.microbatch=1", "train.steps=1000000"),
    *("precision.mode=bf16", "recompute.mode=none", "offload.tier=none", "optimizer.learning_rate=1e-4"),
)
SMOLLM3_3B = (*SHARED, *preset_settings("smollm3-3b"))
# fp32 shards and AdamW's state would take 120 GiB, so 8B is in bf16 on one GPU.
LLAMA3_8B = (*SHARED, *preset_settings("llama3-8b"), "precision.mode=bf16_pure", "recompute.mode=auto")
LLAMA32_1B = (*SHARED, *preset_settings("llama3.2-1b"), "data.sequence_length=4096")
FAST = ("run.compile=true", "train.loss_chunk=auto")
GUIDE = (
    *(*SHARED, f"model.hf={SMOLLM3}", "model.weights=none", "data.source=stdlib"),
    *("precision.mode=bf16_pure", "recompute.mode=full", "run.compile=false", "train.loss_chunk=0"),
)
BF16_RUNGS = [rung for rung in LADDER if not any(one.startswith("precision.") for one in rung.settings)]


def _ladders_and_peers() -> list[Item]:
    eager = (*SMOLLM3_3B, "run.compile=false", "train.loss_chunk=0")
    compiled = (*eager, "run.compile=true")
    return [
        Item("kernels", "which attention kernel runs, and the rates of matmuls", "kernels", seconds=60),
        *ladder_items("3b", SMOLLM3_3B),
        Item("3b/plain-eager", "peer: a plain fully_shard loop", "plain", eager),
        Item("3b/plain-compiled", "peer: with compiled blocks", "plain", compiled, microbatches=(1, 2, 4)),
        Item(
            *("3b/torchtitan", "peer: torchtitan's Llama, its head not tied", "torchtitan"),
            settings=(*compiled, "model.tied=false"),
            microbatches=(1, 4),
        ),
        *ladder_items("8b", LLAMA3_8B, rungs=BF16_RUNGS),
        *(
            with_allocator(Item(name, answers, "plain", settings, microbatches=(1, 4)), expandable=True)
            for name, answers, mode in (
                ("8b/plain-compiled", "peer: a plain fully_shard loop, compiled blocks", "none"),
                ("8b/plain-recompute", "peer: with full recompute", "full"),
            )
            for settings in [(*LLAMA3_8B, "run.compile=true", "train.loss_chunk=0", f"recompute.mode={mode}")]
        ),
        Item("guide/fullshard", "transformers' SmolLM3 with the guide's settings", "train", GUIDE),
        Item("guide/transformers", "peer: the guide's own loop", "transformers", GUIDE),
    ]


def _memory_and_fp8() -> list[Item]:
    smallest = (*SMOLLM3_3B, *FAST, "precision.mode=bf16_pure", "recompute.mode=full")
    sgd = (*LLAMA3_8B, *FAST, "precision.mode=bf16", "optimizer.name=sgd")  # fp32 shards fit with SGD
    texts = (*SMOLLM3_3B, *FAST, "train.steps=200", "optimizer.learning_rate=3e-4")
    low_bits = (*smallest, "precision.mode=bf16", "optimizer.name=adamw8bit")
    outside = (*SMOLLM3_3B, *FAST, "recompute.mode=full", "offload.tier=params+optimizer:cpu")
    lowest = [
        Item("memory/adamw", "the lowest memory of SmolLM3-3B: all in bf16", "train", smallest),
        Item("memory/adamw8bit", "fp32 shards with 8-bit moments", "train", low_bits),
        Item("memory/host", "all state in host memory", "train", outside, seconds=120),
    ]
    return [
        *(with_allocator(item, expandable=True) for item in lowest),
        *(
            Item(
                f"fp8/8b-{mode}", "fp8 at 8B, with SGD so that it fits", "train", settings, microbatches=(4,)
            )
            for mode in ("bf16", "fp8", "fp8_rowwise")
            for settings in [(*sgd, f"precision.mode={mode}")]
        ),
        Item(
            *("fp8/3b-rowwise", "rowwise scales at 3B", "train"),
            settings=(*SMOLLM3_3B, *FAST, "precision.mode=fp8_rowwise"),
            microbatches=(1, 4),
        ),
        *(
            Item(f"losses/{mode}", "200 steps on text", "losses", (*texts, f"precision.mode={mode}"), 120)
            for mode in ("bf16", "fp8", "fp8_rowwise")
        ),
    ]


def _strategies_and_offload() -> list[Item]:
    offloaded = (*LLAMA32_1B, *FAST, "recompute.mode=full")
    hosts = ("none", "optimizer:cpu", "params+optimizer:cpu", "optimizer:nvme", "params+optimizer:nvme")
    longer = (*SMOLLM3_3B, *FAST, "data.sequence_length=16384")
    return [
        *(
            Item(f"zero/{name}", "strategies side by side", "train", settings, microbatches=(1, 4))
            for name in ("zero2", "zero3", "no_shard")
            for settings in [(*SMOLLM3_3B, *FAST, f"sharding.strategy={name}")]
        ),
        *(
            Item(f"offload/{tier}", "offload targets", "train", (*offloaded, f"offload.tier={tier}"), seconds)
            for tier, seconds in zip(hosts, (40, 60, 60, 120, 120), strict=True)
        ),
        *(
            Item(f"offload/update-{where}", f"optimizer:cpu, updated by the {where}", "train", settings)
            for where in ("host", "device")
            for settings in [(*offloaded, "offload.tier=optimizer:cpu", f"offload.update={where}")]
        ),
        Item(
            *("offload/CPUOffloadPolicy", "peer: a plain loop with FSDP2's policy", "plain"),
            settings=(*offloaded, "train.loss_chunk=0", "offload.tier=params+optimizer:cpu"),
            seconds=120,
        ),
        *(
            Item(f"activations/{mode}", "activations of 16,384 tokens on the host", "train", settings, 70)
            for mode in ("none", "full", "offload")
            for settings in [(*longer, f"recompute.mode={mode}")]
        ),
        Item("calibrate", "the rates of this machine, as hardware.toml", "calibrate", seconds=45),
        Item("split/tensor-parallel", "kernels of one rank of 2, 4 and 8", "tensor_parallel", seconds=60),
        Item("split/experts", "grouped matmuls of mixtures", "grouped_matmuls", seconds=30),
        Item(
            "split/context-parallel", "attention of one rank, 131,072 tokens", "context_parallel", seconds=90
        ),
        Item("tests", "the suite's CUDA tests", "tests", seconds=180),
    ]


# Items that follow all others, which take less than 40 minutes. For more time, or `--resume`.
LATER = (
    *("8b/eager", "8b/compile", "8b/chunked-loss", "8b/segments", "offload/*nvme", "split/*", "losses/*"),
    *("guide/*", "memory/adamw8bit", "tests"),
)


def _by_worth(items: Sequence[Item]) -> tuple[Item, ...]:
    def is_later(item: Item) -> bool:
        return any(fnmatch(item.name, pattern) for pattern in LATER)

    return tuple(sorted(items, key=is_later))


ITEMS = _by_worth([*_ladders_and_peers(), *_memory_and_fp8(), *_strategies_and_offload()])

_TOY_DECODER = (
    *("model.vocabulary=512", "model.d_model=64", "model.layers=3", "model.heads=4"),
    *("model.kv_heads=2", "model.d_ff=128", "model.max_sequence=64"),
)
_TOY_TRANSFORMERS = (
    *("model.options.hidden_size=64", "model.options.intermediate_size=128"),
    *("model.options.num_hidden_layers=4", "model.options.num_attention_heads=4"),
    *("model.options.num_key_value_heads=1", "model.options.vocab_size=512"),
    *(f"model.options.{name}_token_id=0" for name in ("bos", "eos", "pad")),
)
_TOY_SECONDS = 90
_TOY_MOST_SECONDS = 900  # beside other work, an item that compiles fp8 took 57 s, and once more than 255 s


def toy(item: Item) -> Item:
    """Returns the item at a size that a CPU rank runs in seconds."""
    sizes = _TOY_TRANSFORMERS if f"model.hf={SMOLLM3}" in item.settings else _TOY_DECODER
    steps = ("train.steps=8",) if item.kind == "losses" else ()
    own = tuple(one.replace("loss_chunk=auto", "loss_chunk=16") for one in item.settings)
    in_fp8 = any(one.startswith("precision.mode=fp8") for one in own)
    smallest = ("precision.fp8_min_features=32",) if in_fp8 else ()
    always = ("run.device=cpu", "data.sequence_length=32")
    settings = (*own, *sizes, *steps, *smallest, *always) if own else ()
    # Waiting threads of OpenMP spin, which is slow where ranks share cores.
    environment = {**item.environment, "OMP_NUM_THREADS": "1"}
    return replace(
        item,
        settings=settings,
        seconds=_TOY_SECONDS,
        most_seconds=_TOY_MOST_SECONDS,
        environment=environment,
    )
