"""Suggestions for a plan that fits its device but not its host."""

from fullshard.planner.step_time import StepTimer
from fullshard.quantities import format_bytes
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan

_SMALLEST_GROUP = 1_000_000  # parameters; smaller groups make reads and writes too short for any drive


def suggest_host_memory_changes(plan: Plan, spec: ModelSpec, *, hardware: Hardware) -> list[str]:
    """Returns settings under which `plan`, which fits its device, also fits its host."""
    prediction, section = plan.prediction, plan.run.offload
    assert prediction is not None, "only what is predicted is found not to fit"
    ways: list[str] = []
    if section.host_bytes is not None:
        least = prediction.host_bytes
        ways.append(f"offload.host_bytes = {least} ({format_bytes(least)}), the least that fits")
    if prediction.offload is not None:
        largest = _largest_group(plan, spec, hardware=hardware)
        ways += [f"offload.group_parameters = {largest}"] if largest is not None else []
        ways.append('offload.tier = "none" or another, or more ranks')
    if prediction.activations is not None:
        ways.append('recompute.mode = "full", recompute.every = 2 or more, or a smaller train.microbatch')
    return ways


def _largest_group(plan: Plan, spec: ModelSpec, *, hardware: Hardware) -> int | None:
    """Halves the group size until the plan fits; None if it never does."""
    prediction, section = plan.prediction, plan.run.offload
    assert prediction is not None, "as above"
    assert prediction.offload is not None, "it has a tier"
    capacity, timer = prediction.offload.host_capacity_bytes, StepTimer(spec, hardware)
    beside = prediction.host_bytes - prediction.offload.host_bytes
    size = section.group_parameters // 2
    while section.on_disk and capacity is not None and size >= _SMALLEST_GROUP:
        smaller = section.model_copy(update={"group_parameters": size})
        terms = timer.offload(
            plan.model_copy(update={"run": plan.run.model_copy(update={"offload": smaller})})
        )
        if terms is not None and terms.host_bytes + beside <= capacity:
            return size
        size //= 2
    return None
