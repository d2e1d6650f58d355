"""Sensitivity of a plan: what a tenth more of each property of the hardware would gain."""

from collections.abc import Mapping
from typing import NamedTuple

from fullshard.planner.candidate_costs import require_prediction
from fullshard.planner.candidates import WhatIfSettings, run_with_settings
from fullshard.planner.search import search
from fullshard.spec.hardware import ComputeDtype, Curve, Hardware, Link, curve_with_slowdown
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

MORE = 0.1


class SensitivityLine(NamedTuple):
    """Effect of `MORE` of one property of the hardware."""

    name: str
    gain: float  # extra tokens/s, as a fraction
    plan: Plan  # the best plan then


def plan_sensitivity(
    best: Plan, spec: ModelSpec, *, hardware: Hardware, run: Run
) -> tuple[SensitivityLine, ...]:
    """Returns the effect of each property, the largest first. `best`: the plan on `hardware` itself.

    The plan is chosen again for each, with the offload target, prefetch and compiling of `best`.
    """
    section = best.run
    alike = WhatIfSettings((section.offload.tier,)) if section.offload.tier != "auto" else None
    settings = {"prefetch": section.prefetch.model_dump(), "run": {"compile": section.run.compile}}
    run = run_with_settings(run, settings)
    own = require_prediction(best).tokens_per_second
    lines: list[SensitivityLine] = []
    for name, better in better_hardware(hardware).items():
        found = search(spec, better, run, what_if=alike).best
        if found is not None:
            lines.append(SensitivityLine(name, require_prediction(found).tokens_per_second / own - 1, found))
    return tuple(sorted(lines, key=lambda line: -line.gain))


def better_hardware(hardware: Hardware) -> Mapping[str, Hardware]:
    """Returns `hardware` with `MORE` of one property each, by the property's name."""
    rates, chip = hardware.rates, hardware.chip
    memory = chip.model_copy(update={"memory_bytes": round(chip.memory_bytes * (1 + MORE))})
    matmul = {
        name: _faster_curves(getattr(rates, name)) for name in ("matmul", "attention", "attention_backward")
    }
    moved = {name: _faster_curve(getattr(rates, name)) for name in ("memory", "optimizer")}
    times = (
        *("launch_seconds", "unit_seconds", "step_seconds", "watched_seconds"),
        *("recomputed_seconds", "model_parallel_seconds"),
    )
    host = {name: getattr(rates, name) / (1 + MORE) for name in times}
    copies = hardware.host_bytes_per_second and hardware.host_bytes_per_second * (1 + MORE)
    disk = hardware.disk_bytes_per_second and hardware.disk_bytes_per_second * (1 + MORE)
    found = {
        "memory": hardware.model_copy(update={"chip": memory}),
        "matmul rate": hardware.model_copy(update={"rates": rates.model_copy(update=matmul)}),
        "memory bandwidth": hardware.model_copy(update={"rates": rates.model_copy(update=moved)}),
        "host": hardware.model_copy(
            update={
                "rates": rates.model_copy(update=host),
                "host_bytes_per_second": copies,
                "adam_per_second": hardware.adam_per_second * (1 + MORE),
                "disk_bytes_per_second": disk,
            }
        ),
    }
    if hardware.ranks_per_node > 1:
        found["links in a node"] = hardware.model_copy(update={"within": _faster_link(hardware.within)})
    if hardware.nodes > 1 and hardware.across is not None:
        found["network"] = hardware.model_copy(update={"across": _faster_link(hardware.across)})
    return found


def _faster_curve(curve: Curve) -> Curve:
    return curve_with_slowdown(curve, 1 / (1 + MORE))


def _faster_curves(curves: Mapping[ComputeDtype, Curve]) -> Mapping[ComputeDtype, Curve]:
    return {dtype: _faster_curve(curve) for dtype, curve in curves.items()}


def _faster_link(link: Link) -> Link:
    rates = {kind: rate.with_slowdown(1 / (1 + MORE)) for kind, rate in link.known_rates.items()}
    return link.model_copy(update={"bytes_per_second": link.bytes_per_second * (1 + MORE), **rates})
