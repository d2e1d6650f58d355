"""Conversion of the arguments of FSDP1, FSDP2, wrappers around them, and Lightning.

Sources: torch.distributed.fsdp (2.13), lightning_fabric.strategies.fsdp (2.6).
"""

import re
from collections.abc import Mapping

from fullshard.convert.reader import (
    ConversionState,
    UnevaluatedExpression,
    is_true_yes_on,
    is_variable,
    last_dotted_part_lower,
    parse_positive_integer,
)
from fullshard.convert.rules import (
    DTYPES,
    STAGES,
    apply_rules,
    convert_offload,
    keys_without_wildcards,
    load_rules,
    strategy_for_zero_stage,
)

# In the order of their numbers in FSDP1's ShardingStrategy, which begin at 1.
_SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_STRATEGIES = {
    **{str(number): name for number, name in enumerate(_SHARDING_STRATEGIES, start=1)},
    **{name: name for name in _SHARDING_STRATEGIES},
    "_hybrid_shard_zero2": "hybrid_shard_zero2",
    # Names in FSDP wrappers of published courses.
    "full": "full_shard",
    "hybrid_full": "hybrid_shard",
    "hybrid_shard_grad_op": "hybrid_shard_zero2",
}
_PREFETCHES = {
    **dict.fromkeys(("backward_pre", "backward_post", "1", "2"), "implicit"),
    "no_prefetch": "none",
}


def convert_sharding_and_prefetch(
    state: ConversionState, keys: Mapping[str, str], *, by_default: bool, ranks_per_node: int | None = None
) -> None:
    """Converts the sharding strategy and the prefetch of FSDP1 or FSDP2.

    keys: the config's key for each argument of FSDP that it contains
    by_default: whether FSDP is used even if no key sets a strategy; the strategy is then full_shard
    """
    _convert_reshard_after_forward(state, keys.get("reshard_after_forward", ""))
    _convert_strategy(state, keys.get("sharding_strategy", ""), ranks_per_node=ranks_per_node)
    if by_default and not {"sharding_strategy", "reshard_after_forward"} & keys.keys():
        state.set_default_of_other_tool("sharding.strategy", "full_shard", why="FSDP's default")
    _convert_prefetch(state, keys.get("backward_prefetch", ""), forward=keys.get("forward_prefetch", ""))


def convert_fsdp_arguments(state: ConversionState, *, prefix: str = "") -> None:
    """Records verdicts on the keys with `prefix`, which are arguments of FSDP, fully_shard or FSDP2Config."""
    keys = {key.removeprefix(prefix): key for key in state.leaves if key.startswith(prefix)}
    _convert_mesh_shape(state, keys)
    convert_sharding_and_prefetch(
        state, keys, by_default=bool(keys) and not {"parallelize_fn", "stage"} & keys.keys()
    )
    for part in ("mixed_precision", "mp_policy"):
        param, reduce = keys.get(f"{part}.param_dtype", ""), keys.get(f"{part}.reduce_dtype", "")
        _convert_dtypes(state, param=param, reduce=reduce)
    mixed = keys.get("mixed_precision", "")
    if "compute_dtype" in keys and (not mixed or is_true_yes_on(state.get(mixed))):
        _convert_dtypes(state, param=keys["compute_dtype"], reduce=keys.get("reduce_dtype", ""))
        state.record_not_needed(mixed, "on: precision.mode says which")
    for policy in ("OffloadPolicy()", "MixedPrecisionPolicy()"):  # FSDP2's defaults, which change nothing
        for key in [key for key in keys.values() if state.get(key) == policy]:
            state.record_not_needed(key, "as it is here")
    for name, mode in {"use_fp16": "fp16", "pure_bf16": "bf16_pure"}.items():
        for key in (keys.get(name, ""), mixed) if is_true_yes_on(state.get(keys.get(name, ""))) else ():
            state.record_setting(key, "precision.mode", value=mode)
    rules = load_rules("fsdp")
    apply_rules(state, rules, named=lambda key: key.removeprefix(prefix) if key.startswith(prefix) else "")


def convert_fsdp(state: ConversionState) -> None:
    """Records a verdict on every key of a config that consists of FSDP's arguments only."""
    state.rename_keys({key: key.removeprefix("fsdp_") for key in state.leaves if key.startswith("fsdp_")})
    convert_fsdp_arguments(state)
    known = keys_without_wildcards(load_rules("fsdp"))
    state.record_unknown_keys([*known, "sharding_strategy", "backward_prefetch", "forward_prefetch"])


def convert_lightning(state: ConversionState) -> None:
    """Records a verdict on every argument of a Fabric or Trainer and its strategy, or of a strategy alone."""
    nodes = state.checked_positive_integer("num_nodes") or 1
    if state.checked_positive_integer("max_steps", unset=(-1,)) or is_variable(state.get("max_steps")):
        state.record_unsupported("max_epochs", "max_steps says the duration; nothing ends it earlier")
    devices = state.get("devices")
    each = len(devices) if isinstance(devices, list) else parse_positive_integer(devices)
    if each:
        state.ranks = state.ranks or each * nodes
        if nodes == 1:
            state.record_setting("devices", "run.ranks", value=each)
        else:
            state.notes.append(
                f"{each} ranks on each of {nodes} nodes: torchrun --nnodes {nodes} starts them"
            )
    _convert_lightning_strategy(state)
    convert_fsdp_arguments(state, prefix="strategy.")
    rules = load_rules("lightning")
    apply_rules(state, rules)
    if "gradient_clip_val" not in state.leaves:
        state.set_default_of_other_tool("optimizer.clip_norm", 0.0, why="Lightning clips only if asked")
    fsdp_keys = [f"strategy.{key}" for key in keys_without_wildcards(load_rules("fsdp"))]
    state.record_unknown_keys([*keys_without_wildcards(rules), *fsdp_keys])


def _convert_lightning_strategy(state: ConversionState) -> None:
    """Sets the strategy from a name (`deepspeed_stage_2_offload`) or the stage of a DeepSpeedStrategy."""
    # `DDPStrategy(find_unused_parameters=True)` -> `ddpstrategy`
    name = last_dotted_part_lower(str(state.get("strategy")).partition("(")[0]).removesuffix("strategy")
    base, _, place = name.partition("_offload")
    found = re.fullmatch(r"(dp|ddp)(_\w+)?|(fsdp)(_cpu)?|deepspeed(_stage_([0-3]))?", base)
    if found is not None:
        stage = int(found[6] or 2)
        strategy = "no_shard" if found[1] else "full_shard" if found[3] else STAGES[stage]
        state.record_setting("strategy", "sharding.strategy", value=strategy)
        if base != name:
            params = "params+" if found[3] or stage == 3 else ""
            tier = f"{params}optimizer:{place.strip('_') or 'cpu'}"
            state.infer_setting("offload.tier", tier, origin="strategy")
    strategy = strategy_for_zero_stage(state.get("strategy.stage"))
    if strategy is not None:
        state.record_setting("strategy.stage", "sharding.strategy", value=strategy)
        optimizer, params = "strategy.offload_optimizer", "strategy.offload_parameters"
        convert_offload(state, optimizer=optimizer, params=params)


def _convert_mesh_shape(state: ConversionState, keys: Mapping[str, str]) -> None:
    """Sets a hybrid strategy and its shard degree from the shape of a mesh, (replicas, shards)."""
    for name in ("mesh.mesh_shape", "device_mesh.mesh_shape", "device_mesh", "mesh"):
        key = keys.get(name, "")
        shape = state.get(key)
        if isinstance(shape, UnevaluatedExpression):
            state.record_open(key, "sharding.shard_degree")
        if not isinstance(shape, list) or not all(isinstance(one, int) for one in shape):
            continue
        if len(shape) == 2 and shape[1] > 1 and shape[0] > 1:
            state.infer_setting("sharding.strategy", "hybrid_shard", origin=key)
            why = "ranks / shard_degree replicas"
            state.record_setting(key, "sharding.shard_degree", value=shape[1], why=why)
            state.ranks = state.ranks or shape[0] * shape[1]
        elif len(shape) == 2 and shape[0] > 1:
            state.record_setting(key, "sharding.strategy", value="no_shard", why="nothing is sharded")
    # The named strategy may be the ZeRO-2 variant of the mesh's.
    if state.settings.get("sharding.strategy") == "hybrid_shard" and "sharding_strategy" in keys:
        state.settings.pop("sharding.strategy")


def _convert_strategy(state: ConversionState, key: str, *, ranks_per_node: int | None) -> None:
    """Sets `sharding.strategy`, and for a hybrid one the shard degree: the ranks per node, if known."""
    value = state.get(key)
    strategy = None if value is None else _STRATEGIES.get(last_dotted_part_lower(value))
    if value is None:
        state.record_not_needed(key, "unset: the planner chooses, or full_shard")
    elif strategy is None:
        _record_missed(state, key, target="sharding.strategy", known=", ".join(_SHARDING_STRATEGIES))
    else:
        state.record_setting(key, "sharding.strategy", value=strategy)
        if strategy.startswith("hybrid") and "sharding.shard_degree" not in state.settings:
            if ranks_per_node is None:
                state.notes.append(
                    f"{strategy} shards within a node and replicates over nodes: set sharding.shard_degree "
                    "to the ranks of a node (left out, the planner chooses)"
                )
            else:
                state.infer_setting("sharding.shard_degree", ranks_per_node, origin="the ranks of a node")


def _record_missed(state: ConversionState, key: str, *, target: str, known: str) -> None:
    """Records that the value of `key` is a variable, or none of the `known` values of `target`."""
    if isinstance(state.get(key), UnevaluatedExpression):
        state.record_open(key, target)
    else:
        state.record_unsupported(key, f"{target}: {known}", misses=target)


def _convert_reshard_after_forward(state: ConversionState, key: str) -> None:
    """Converts FSDP2's `reshard_after_forward`: true is full_shard, false shard_grad_op, a number hpZ."""
    value = state.get(key)
    if key not in state.leaves:
        return
    degree = None if isinstance(value, bool) else parse_positive_integer(value)
    if degree is not None and degree > 1:
        why = "and the strategy full_shard (ZeRO++ hpZ)"
        state.record_setting(key, "sharding.reshard_after_forward", value=degree, why=why)
        state.infer_setting("sharding.strategy", "full_shard", origin=key)
        return
    named = _STRATEGIES.get(last_dotted_part_lower(value)) if degree is None else None
    flag = {"true": "full_shard", "none": "full_shard", "false": "shard_grad_op"}.get(str(value).lower())
    strategy = named or flag
    if strategy is None:
        known = "true (full_shard), false (shard_grad_op), or a degree"
        _record_missed(state, key, target="sharding.strategy", known=known)
        return
    if state.settings.get("sharding.strategy") == "hybrid_shard":  # set by a two-axis mesh
        strategy = "hybrid_shard" if strategy == "full_shard" else "hybrid_shard_zero2"
        state.settings["sharding.strategy"] = strategy
    why = "unset: all units but the root; here the root too" if value is None else ""
    state.record_setting(key, "sharding.strategy", value=strategy, why=why)


def _convert_prefetch(state: ConversionState, backward: str, *, forward: str) -> None:
    """Sets `prefetch.mode` from `backward_prefetch` and `forward_prefetch`."""
    forward_on = is_true_yes_on(state.get(forward))
    if backward in state.leaves:
        name = last_dotted_part_lower(state.get(backward))
        mode = "none" if state.get(backward) is None else _PREFETCHES.get(name)
        if mode is None:
            _record_missed(state, backward, target="prefetch.mode", known="none, implicit, explicit")
        else:
            post = "one unit ahead; here always issued before the gradients of the one that waits"
            why = post if name in ("backward_post", "2") else ""
            state.record_setting(backward, "prefetch.mode", value="explicit" if forward_on else mode, why=why)
    if isinstance(state.get(forward), UnevaluatedExpression):
        state.record_open(forward, "prefetch.mode")
    elif forward_on:
        why = "prefetch.forward units ahead, 1 by default"
        state.record_setting(forward, "prefetch.mode", value="explicit", why=why)
    else:
        state.record_not_needed(forward, "off: FSDP2 itself overlaps one unit")


def _convert_dtypes(state: ConversionState, *, param: str, reduce: str) -> None:
    """Sets `precision.mode` from the keys of the dtypes of gathered parameters and reduced gradients."""
    named = {
        key: DTYPES.get(last_dotted_part_lower(state.get(key)))
        for key in (param, reduce)
        if key in state.leaves
    }
    for key in named:
        if isinstance(state.get(key), UnevaluatedExpression) and named[key] is None:
            state.record_open(key, "precision.mode")
    compute = named.get(param) or "fp32"
    wire = named.get(reduce) or compute
    mode = {"fp32": "fp32", "fp16": "fp16"}.get(compute) or ("bf16_reduce" if wire == "bf16" else "bf16")
    summed = ""
    if compute == "fp16" and wire == "fp16":
        summed = "gradients are summed in fp32 here"
    elif compute == "fp32" and wire != "fp32":
        summed = "gradients of fp32 parameters are summed in fp32 here"
    for key in named:
        if any(named.values()):
            state.record_setting(key, "precision.mode", value=mode, why=summed if key == reduce else "")
        else:
            state.record_not_needed(key, "unset: the dtype that the module has; precision.mode decides")
