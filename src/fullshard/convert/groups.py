"""Conversion of rates that axolotl and LLaMA-Factory give to some parameters, to [[optimizer.groups]].

Sources: axolotl/core/trainers/mixins/optimizer.py of 2026-07, peft/optimizers/loraplus.py (0.21),
llamafactory/train/trainer_utils.py.
"""

import re
from collections.abc import Sequence
from typing import Any, cast

from fullshard.convert.rules import ConversionState, parse_number

_TARGET = "optimizer.groups"
_EMBEDDINGS = ("embed_tokens", "lm_head")
_Group = dict[str, Any]


def convert_groups(state: ConversionState, *, tool: str, default_rate: float) -> None:
    """Records verdicts on rates of embeddings (`embedding_lr`), of modules (`lr_groups`), and of LoRA+.

    default_rate: the tool's learning rate, of which groups have a factor, if the file has none
    """
    rate = parse_number(state.get("learning_rate")) or default_rate
    if (ratio := parse_number(state.get("loraplus_lr_ratio"))) is not None:
        _convert_lora_plus(state, ratio, tool=tool)
        return
    named = _read_modules_with_rates(state)
    factor = parse_number(state.get("embedding_lr_scale"))
    if factor is None and (of_embeddings := parse_number(state.get("embedding_lr"))) is not None:
        factor = _factor(of_embeddings, rate)
    if factor is None and not named:
        return
    # axolotl's groups of embeddings come first, and do not decay.
    has_adapter = "adapter.rank" in state.settings  # which is set first
    saved = cast(Sequence[Any], state.get("lora_modules_to_save") or []) if has_adapter else _EMBEDDINGS
    embeddings = [f"*{name}*" for name in _EMBEDDINGS if name in saved]
    groups = [_Group(match=embeddings, lr_factor=factor or 1.0, weight_decay=0.0)] if embeddings else []
    groups += [
        _Group(match=[f"*{one}*" for one in names], lr_factor=_factor(own, rate)) for names, own in named
    ]
    why = "patterns of parameters' names, of which each must match"
    for key in ("embedding_lr_scale", "embedding_lr"):
        if not embeddings:
            state.record_not_needed(key, "no embedding is trained")
        elif parse_number(state.get(key)) is not None:
            state.record_setting(key, _TARGET, value=groups, why=why)
    for key in [key for key in state.leaves if key.startswith("lr_groups.") and named]:
        if key.endswith(".modules"):
            state.record_setting(key, _TARGET, value=groups, why=f"{why}; norms in them have the rate too")
        else:
            state.record_not_needed(key, "a group needs no name" if key.endswith(".name") else "lr_factor")
    if "*lm_head*" in embeddings:
        state.notes.append(
            'optimizer.groups: without "*lm_head*" if the model ties its head to the embedding'
        )


def _convert_lora_plus(state: ConversionState, ratio: float, *, tool: str) -> None:
    """Records the verdict on LoRA+ (Hayou et al., arXiv:2402.12354): a higher rate of the matrices B."""
    groups = [_Group(match=["*.lora_B.*"], lr_factor=ratio)]
    state.record_setting("loraplus_lr_ratio", _TARGET, value=groups, why="matrices B of the adapters")
    if tool == "axolotl":
        state.infer_setting("optimizer.weight_decay", 0.0, origin="LoRA+, which does not decay in axolotl")
        state.record_not_needed("weight_decay", "with LoRA+, axolotl's optimizer has none")
    if not any("embed" in str(one) for one in cast(Sequence[Any], state.get("lora_target_modules") or [])):
        state.record_not_needed("loraplus_lr_embedding", "no embedding has an adapter")
    for key in ("embedding_lr", "embedding_lr_scale"):
        state.record_not_needed(key, "not read with loraplus_lr_ratio")


def _read_modules_with_rates(state: ConversionState) -> list[tuple[list[str], float]]:
    """Returns the modules and the rate of each of axolotl's `lr_groups`; none if one is not valid."""
    numbers = {int(key.split(".")[1]) for key in state.leaves if re.match(r"lr_groups\.\d+\.", key)}
    found: list[tuple[list[str], float]] = []
    for number in sorted(numbers):
        modules = state.get(f"lr_groups.{number}.modules")
        rate = parse_number(state.get(f"lr_groups.{number}.lr"))
        if not isinstance(modules, list) or not modules or rate is None:
            return []
        found.append(([str(one) for one in cast(Sequence[Any], modules)], rate))
    return found


def _factor(rate: float, of: float) -> float:
    return float(f"{rate / of:.6g}")
