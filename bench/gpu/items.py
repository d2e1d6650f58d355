"""An item of the programme, and its size on a card and on CPU ranks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fullshard.spec.pretrained import read_presets

Kind = Literal[
    *("kernels", "train", "plain", "transformers", "torchtitan", "calibrate", "tests"),
    *("runs", "waits", "generate", "groups"),
]
# Kinds that one process measures, which starts ranks of its own if it needs some.
ONCE: frozenset[Kind] = frozenset(("kernels", "calibrate", "tests", "runs", "generate"))
Card = Literal["h100", "h200"]

SEGMENTS = {False: "expandable_segments:False", True: "expandable_segments:True"}
SMOLLM3 = "examples/smollm3/config.json"
# The strict order: the host waits for each step's figures. Peers read theirs in each step as well.
WAITS = "fault_tolerance.on_spike=rollback"


class Variant(NamedTuple):
    """A run of `fullshard train`, whose losses and norms are compared with those of another one.

    settings: on top of those of the item
    like: the variant that it should agree with; empty: none
    within: greatest relative difference of a loss; of a norm, ten times as much; 0: bit for bit
    continues: the variant whose run it resumes
    begins_as: the variant whose run it resumes in a copy: random values differ between devices
    fault: what befalls rank 1 after step `fault_step`; one that is stopped must be named by the watchdog
    """

    name: str
    settings: tuple[str, ...] = ()
    ranks: int = 1
    like: str = ""
    within: float = 1e-3
    continues: str = ""
    begins_as: str = ""
    fault: Literal["", "kill", "stop"] = ""
    fault_step: int = 12


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
    ranks: the least number that it needs
    variants: of an item that compares runs
    documents: of each sequence, which do not attend to each other; 0: attention knows of none
    """

    name: str
    answers: str
    kind: Kind = "train"
    settings: tuple[str, ...] = ()
    seconds: int = 60
    microbatches: tuple[int, ...] = (1,)
    environment: Mapping[str, str] = field(default_factory=lambda: {"PYTORCH_ALLOC_CONF": SEGMENTS[True]})
    most_seconds: float = 0
    ranks: int = 1
    variants: tuple[Variant, ...] = ()
    documents: int = 0

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


# One sequence of 8,192 random tokens per microbatch. The planner chooses what is not set.
SHARED = (
    *("run.device=cuda", "data.sequence_length=8192", "train.microbatch=1", "train.steps=1000000"),
    *("precision.mode=bf16", "recompute.mode=none", "offload.tier=none", "optimizer.learning_rate=1e-4"),
    "plan.memory_margin=0",
)
FAST = ("run.compile=true", "train.loss_chunk=auto")
# Runs that are compared: a few steps of a small decoder on the standard library's source.
SMALL = (
    *("run.device=cuda", "model.d_model=256", "model.layers=4", "model.heads=4", "model.kv_heads=2"),
    *("model.d_ff=512", "data.sequence_length=256", "train.global_batch=16", "train.microbatch=2"),
    *("train.steps=5", "train.validate_every=4", "train.validate_sequences=16", "precision.mode=fp32"),
    *("schedule.kind=constant", "schedule.warmup_steps=0", "optimizer.learning_rate=1e-3"),
    *("sharding.strategy=full_shard", "run.compile=false", "recompute.mode=none"),
)
BF16 = "precision.mode=bf16"
# Long enough that some of the 80 sequences of five steps have several files of the standard library.
DOCUMENTS = ("data.document_mask=true", "data.sequence_length=2048")

_LENGTHS: dict[Card, dict[str, str]] = {"h200": {}, "h100": {"=8192": "=4096", "=16384": "=6144"}}


def at_card(item: Item, card: Card) -> Item:
    """Returns the item with sequences that fit into the card's memory: 80 GB take half of what 141 do."""
    settings = item.settings
    for before, after in _LENGTHS[card].items():
        wanted = re.escape(f"data.sequence_length{before}") + "$"
        settings = tuple(re.sub(wanted, f"data.sequence_length{after}", one) for one in settings)
    return replace(item, settings=settings)


_TOY_DECODER = (
    *("model.vocabulary=512", "model.d_model=64", "model.layers=3", "model.heads=4"),
    *("model.kv_heads=2", "model.d_ff=128", "model.max_sequence=64"),
)
_TOY_EXPERTS = ("model.experts=4", "model.experts_per_token=2", "model.expert_d_ff=32")
_TOY_TRANSFORMERS = (
    *("model.options.hidden_size=64", "model.options.intermediate_size=128"),
    *("model.options.num_hidden_layers=4", "model.options.num_attention_heads=4"),
    *("model.options.num_key_value_heads=1", "model.options.vocab_size=512"),
    *(f"model.options.{name}_token_id=0" for name in ("bos", "eos", "pad")),
)
_TOY_SECONDS = 90
_TOY_MOST_SECONDS = 900  # beside other work, an item that compiles fp8 took 57 s, and once more than 255 s


def toy(item: Item) -> Item:
    """Returns the item at a size that CPU ranks run in seconds: training items on at most two ranks."""
    own = tuple(map(_toy_setting, item.settings))
    sizes = _TOY_TRANSFORMERS if f"model.hf={SMOLLM3}" in own else _TOY_DECODER
    if item.kind == "runs":
        sizes = (*_TOY_DECODER, "model.layers=2", "model.max_sequence=512", "data.sequence_length=64")
    mixture = _TOY_EXPERTS if any(re.match(r"model\.experts=[1-9]", one) for one in own) else ()
    length = ("data.sequence_length=32",) if item.kind != "runs" else ()
    # Compiling takes a minute and more of a busy core: only the items that are named for it do.
    compiles = () if item.name.endswith("compile") else ("run.compile=false",)
    always = (*length, *_toy_fp8(own), *compiles, "run.device=cpu")
    return replace(
        item,
        settings=(*own, *sizes, *mixture, *always) if own else (),
        seconds=_TOY_SECONDS,
        most_seconds=_TOY_MOST_SECONDS,
        # Waiting threads of OpenMP spin, which is slow where ranks share cores.
        environment={**item.environment, "OMP_NUM_THREADS": "1"},
        microbatches=item.microbatches[:2],
        ranks=item.ranks
        if item.kind in ONCE
        else min(item.ranks, 4 if "sharding.shard_degree=2" in own else 2),
        variants=tuple(_toy_variant(one, halves=item.name != "axes/fp32") for one in item.variants),
    )


def _toy_variant(variant: Variant, *, halves: bool) -> Variant:
    ranks = max(2, variant.ranks // 2) if halves and variant.ranks > 1 else variant.ranks
    own = tuple(map(_toy_setting, variant.settings))
    return variant._replace(settings=(*own, *_toy_fp8(own)), ranks=ranks)


def _toy_fp8(settings: Sequence[str]) -> tuple[str, ...]:
    in_fp8 = any(one.startswith("precision.mode=fp8") for one in settings)
    return ("precision.fp8_min_features=32",) if in_fp8 else ()


def _toy_setting(setting: str) -> str:
    for pattern, value in (
        (r"(sharding\.(?:shard_degree|\w+_parallel)=)[48]$", r"\g<1>2"),
        (r"(train\.steps=)[24]00$", r"\g<1>40"),
        (r"(train\.loss_chunk=)auto$", r"\g<1>16"),
        (r"(precision\.fp8_min_features=)256$", r"\g<1>32"),
        (r"(data\.sequence_length=)250$", r"\g<1>62"),
        (r"(data\.sequence_length=)2048$", r"\g<1>512"),
    ):
        setting = re.sub(pattern, value, setting)
    return setting


def total_seconds(items: Sequence[Item]) -> int:
    return sum(item.seconds for item in items)
