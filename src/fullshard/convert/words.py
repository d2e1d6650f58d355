"""Vocabulary that FSDP1, FSDP2, Accelerate and Lightning share: strategies, prefetch, units, dtypes."""

from collections.abc import Iterable
from typing import Any

from fullshard.convert.account import ConfigReader, KeyVerdict, SourceText
from fullshard.convert.rules import is_on, positive

STRATEGIES = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid_shard",
    "_hybrid_shard_zero2": "hybrid_shard_zero2",
    "hybrid_shard_zero2": "hybrid_shard_zero2",
    # Names in FSDP wrappers of published courses.
    "full": "full_shard",
    "hybrid_full": "hybrid_shard",
    "hybrid_shard_grad_op": "hybrid_shard_zero2",
}
DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp32": "fp32",
}
PREFETCHES = {
    "backward_pre": "implicit",
    "backward_post": "implicit",
    "no_prefetch": "none",
    "1": "implicit",
    "2": "implicit",
}

OFFLOAD = 'the planner offloads where nothing else fits; offload.tier = "{tier}" does so in any case'
OFFLOAD_PARAMS = OFFLOAD.format(tier="params+optimizer:cpu")
TENSOR_PARALLEL = (
    "no step of training splits matmuls yet: fullshard plan run.toml --set sharding.tensor_parallel=N says "
    "what it would take"
)
BLOCKS = (
    "the repeated blocks are found by themselves; where not, sharding.units.names takes their paths, "
    'such as ["model.layers.*"]'
)
ORIGINAL_PARAMETERS = "always so: parameters keep their names, shapes and groups"
SYNC_STATES = "parameters are initialised shard by shard from one seed, or read straight into the shards"
RATE_LIMIT = "always so: one unit is gathered ahead, and no more"
IGNORED = 'sharding.units.overrides: match = "<path>", strategy = "no_shard" leaves a unit whole on all ranks'


def read_strategy(reading: ConfigReader, key: str, *, ranks_per_node: int | None) -> None:
    """Reads `sharding.strategy`; for a hybrid one also `shard_degree`, the ranks per node if known."""
    value = reading.get(key)
    if value is None and key in reading.leaves:
        reading.say(key, KeyVerdict.NOT_NEEDED, why="unset: the planner chooses, or full_shard")
        return
    strategy = STRATEGIES.get(last_name(value))
    if value is None or strategy is None:
        reading.say(
            key, KeyVerdict.NOT_SUPPORTED, why=f"sharding.strategy is one of {', '.join(_distinct())}"
        )
        return
    reading.set(key, "sharding.strategy", value=strategy)
    if strategy.startswith("hybrid") and "sharding.shard_degree" not in reading.settings:
        if ranks_per_node is None:
            reading.notes.append(
                f"{strategy} shards within a node and replicates over nodes: set sharding.shard_degree "
                "to the ranks of a node (left out, the planner chooses)"
            )
        else:
            reading.settings["sharding.shard_degree"] = ranks_per_node
            reading.origins["sharding.shard_degree"] = "the ranks of a node"


def read_reshard(reading: ConfigReader, key: str) -> None:
    """Reads FSDP2's `reshard_after_forward`: true is full_shard, false shard_grad_op, a number hpZ."""
    value = reading.get(key)
    if key not in reading.leaves:
        return
    degree = None if isinstance(value, bool) else positive(value)
    if degree is not None and degree > 1:
        reading.set(key, "sharding.reshard_to", value=degree, why="and the strategy full_shard (ZeRO++ hpZ)")
        reading.settings.setdefault("sharding.strategy", "full_shard")
        reading.origins.setdefault("sharding.strategy", key)
        return
    named = STRATEGIES.get(last_name(value)) if degree is None else None
    flag = {"true": "full_shard", "none": "full_shard", "false": "shard_grad_op"}.get(str(value).lower())
    strategy = named or flag
    if strategy is None:
        reading.say(
            key, KeyVerdict.NOT_SUPPORTED, why="true (full_shard), false (shard_grad_op), or a degree"
        )
        return
    if reading.settings.get("sharding.strategy") == "hybrid_shard":  # set by a two-axis mesh
        reading.settings["sharding.strategy"] = (
            "hybrid_shard" if strategy == "full_shard" else "hybrid_shard_zero2"
        )
        strategy = reading.settings["sharding.strategy"]
    why = "unset: all units but the root; here the root too" if value is None else ""
    reading.set(key, "sharding.strategy", value=strategy, why=why)


def suppose_full_shard(reading: ConfigReader, names: Iterable[str]) -> None:
    """Sets FSDP's default, full_shard, if none of its keys in the config sets a strategy.

    names: FSDP's own names of the keys in the config
    """
    if not {"sharding_strategy", "reshard_after_forward"} & set(names):
        reading.set_default("sharding.strategy", "full_shard", why="FSDP's default")


def read_prefetch(reading: ConfigReader, *, backward: str, forward: str) -> None:
    """Reads `backward_prefetch` and `forward_prefetch`, which `prefetch.mode` combines."""
    forward_on = is_on(reading.get(forward))
    if backward in reading.leaves:
        value = reading.get(backward)
        mode = "none" if value is None else PREFETCHES.get(last_name(value))
        if mode is None:
            reading.say(backward, KeyVerdict.NOT_SUPPORTED, why="prefetch.mode: none, implicit or explicit")
        else:
            post = last_name(value) in ("backward_post", "2")
            why = (
                "one unit ahead; here always issued before the gradients of the one that waits"
                if post
                else ""
            )
            reading.set(backward, "prefetch.mode", value="explicit" if forward_on else mode, why=why)
    if forward not in reading.leaves:
        return
    if isinstance(reading.get(forward), SourceText):
        reading.say(
            forward, KeyVerdict.NOT_SUPPORTED, why="known only when the program runs: set prefetch.mode"
        )
    elif forward_on:
        reading.set(
            forward, "prefetch.mode", value="explicit", why="prefetch.forward units ahead, 1 by default"
        )
    else:
        reading.say(forward, KeyVerdict.NOT_NEEDED, why="off: what overlaps is the engine's own one unit")


def read_dtypes(reading: ConfigReader, *, param: str, reduce: str) -> None:
    """Reads `precision.mode` from the dtypes of gathered parameters and reduced gradients."""
    named = {key: DTYPES.get(last_name(reading.get(key))) for key in (param, reduce) if key in reading.leaves}
    for key in named:
        if isinstance(reading.get(key), SourceText) and named[key] is None:
            reading.say(
                key, KeyVerdict.NOT_SUPPORTED, why="known only when the program runs: set precision.mode"
            )
    compute = named.get(param) or "fp32"
    wire = named.get(reduce) or compute
    mode = {"fp32": "fp32", "fp16": "fp16"}.get(compute) or ("bf16_reduce" if wire == "bf16" else "bf16")
    if named.get(param) or named.get(reduce):
        for key in named:
            why = _dtype_word(compute, wire) if key == reduce else ""
            reading.set(key, "precision.mode", value=mode, why=why)
    else:
        for key in named:
            reading.say(
                key, KeyVerdict.NOT_NEEDED, why="unset: the dtype that the module has; precision.mode decides"
            )


def _dtype_word(compute: str, wire: str) -> str:
    if compute == "fp16" and wire == "fp16":
        return "gradients are summed in fp32 here"
    if compute == "fp32" and wire != "fp32":
        return "gradients of fp32 parameters are summed in fp32 here"
    return ""


def last_name(value: Any) -> str:
    """`ShardingStrategy.FULL_SHARD`, `torch.bfloat16` -> `full_shard`, `bfloat16`."""
    return str(value).rpartition(".")[2].lower()


def _distinct() -> list[str]:
    return sorted(set(STRATEGIES.values()))
