"""Describes a run at a few lengths of a sequence, so that `derive_spec` finds its spec at all others."""

import json
from collections.abc import Mapping, Sequence
from operator import ge
from typing import Any

from fullshard.models.build import build_model
from fullshard.models.loss import choose_loss
from fullshard.planner.describe.describe import build_recorder, build_spec, record_all_settings
from fullshard.planner.describe.describe_run import make_batch_unless_default
from fullshard.planner.describe.extrapolation import has_same_structure
from fullshard.planner.describe.interpolation import Weights, find_weights
from fullshard.planner.describe.sequence_lengths import POINTS, find_terms
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.plan import DeviceType
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig


def describe_lengths(
    run: Run, device: DeviceType, *, shared: bool, attention_kernel: AttentionKernel = "flash"
) -> str | None:
    """Returns the spec with terms that `derive_spec` takes; None if operations differ at `POINTS[shared]`."""
    recorders, recordings = [], []
    for length, ranks in POINTS[shared]:
        sections = {"data": {"sequence_length": length}, "sharding": {"context_parallel": ranks}}
        if isinstance(run.model, DecoderConfig):
            sections["model"] = {"max_sequence": length}
        own = run.with_settings(sections)
        model = build_model(own)
        loss, batch = choose_loss(own, model), make_batch_unless_default(own, model)
        recorders.append(build_recorder(model, own, loss=loss, batch=batch, device_type=device))
        recordings.append(record_all_settings(recorders[-1], own, attention_kernel=attention_kernel))
    for row in zip(*(one.settings for one in recordings), strict=True):
        for size in ("low", "high"):
            first, *others = (getattr(one, size).all_phases for one in row)
            if not all(has_same_structure(first, other) for other in others):
                return None
    built = [build_spec(*one, keep_all=True) for one in zip(recorders, recordings, strict=True)]
    specs = [one.model_dump(mode="json", exclude={"context_parallel"}) for one in built]
    known = [find_terms(*one) for one in POINTS[shared]]
    units = [[int(at == other) for other in range(len(known))] for at in range(len(known))]
    spec = _join(specs, [find_weights(known, unit) for unit in units])
    return json.dumps(_merge_launches_and_drop_moments(spec), separators=(",", ":"))


def _join(values: Sequence[Any], weights: Sequence[Weights]) -> Any:
    """Returns nests of equal structure as one, in which numbers that differ have coefficients of terms.

    weights: for each term, the weights of `values` in the sum that is its coefficient
    """
    first = values[0]
    if all(one == first for one in values):
        return first
    if isinstance(first, dict):
        return {name: _join([one[name] for one in values], weights) for name in first}
    if isinstance(first, list | tuple):
        return [_join(parts, weights) for parts in zip(*values, strict=True)]
    return {"terms": [_divide(_sum_products(values, one.numerators), one.denominator) for one in weights]}


def _sum_products(values: Sequence[float], weights: Sequence[int]) -> float:
    is_whole = all(value == int(value) for value in values)  # then the sum is exact
    return sum((int(a) if is_whole else a) * b for a, b in zip(values, weights, strict=True))


def _divide(total: float, divisor: int) -> float:
    return total // divisor if total % divisor == 0 else total / divisor


def _merge_launches_and_drop_moments(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec with equal launches as one kernel, without moments that are never the highest."""
    index: dict[str, int] = {}
    merged = [index.setdefault(json.dumps(one), len(index)) for one in spec["kernels"]]
    for trace in spec["traces"]:
        for phase in (*trace["phases"], *trace["accumulating"]):
            counts: dict[int, int] = {}
            for launch, _ in phase["work"]:
                counts[merged[launch]] = counts.get(merged[launch], 0) + 1
            phase["work"] = list(counts.items())
            phase["peaks"] = _drop_dominated(phase["peaks"])
    return spec | {"kernels": [json.loads(one) for one in index]}


def _drop_dominated(moments: Sequence[Any]) -> list[Any]:
    """Returns the moments whose coefficients no other exceeds or equals in all; of equal ones, the last."""
    sums = [_sum_of_kinds(one) for one in moments]
    return [
        moments[at]
        for at, own in enumerate(sums)
        if not any(all(map(ge, one, own)) and (one != own or other > at) for other, one in enumerate(sums))
    ]


def _sum_of_kinds(moment: Sequence[Sequence[Any]]) -> list[float]:
    """Returns the coefficients of the fixed bytes of all kinds, then of those per sequence."""
    rows = [[_list_coefficients(one) for one in line] for line in moment]
    return [sum(one) for part in (0, 1) for one in zip(*(row[part] for row in rows), strict=True)]


def _list_coefficients(number: Any) -> list[float]:
    own = number["terms"] if isinstance(number, Mapping) else [number]
    return own + [0] * (len(POINTS[True]) - len(own))
