"""Explanation of a search's result: what limits the plan, and the cost of other plans."""

from collections.abc import Iterator, Sequence
from typing import Literal

from fullshard.planner.search.advice import (
    NOTABLE,
    Lever,
    RunnerUpPlan,
    choose_runners_up,
    find_largest_lever,
    format_difference,
)
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.planner.search.search import SearchResult, format_plan
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel

Binding = Literal["memory", "links", "host", "computing"]
_LIMITS: dict[Binding, str] = {
    "memory": "memory is the limit",
    "links": "the links are the limit",
    "host": "the host is the limit",
    "computing": "computing is the limit",
}


class PlanExplanation(FrozenModel):
    """Explanation of the best plan, or of the closest if none fits.

    `binds` is the limit of the plan: what costs the largest part of the step, or `computing` if no other part
    is notable.

    memory      the seconds that the nearest notably faster plan would save, which does not fit
    links       waiting for collectives
    host        neither computing nor waiting for links: the host, or copies by FSDP2 or an offload target
    computing   the kernels themselves
    """

    plan: Plan
    fits: bool
    binds: Binding
    because: str  # reason for `binds`, as text
    runners_up: tuple[RunnerUpPlan, ...]  # other plans of the front of speed and memory
    lever: Lever | None  # the change that gains most, if any is notable

    def advice_lines(self) -> tuple[str, ...]:
        """Returns what binds, the largest lever, and the alternatives, a sentence or two each."""
        lines = [f"{_LIMITS[self.binds]}: {self.because}"]
        lines += [f"largest lever: {self.lever.text}"] if self.lever is not None else []
        named = self.fits and self.binds == "memory"  # `because` names the nearest step up
        others = [one for one in self.runners_up if not (named and one.lacks_bytes)]
        return (*lines, *(one.text(self.plan) for one in others))


def explain_plan(found: SearchResult, hardware: Hardware, *, spec: ModelSpec, run: Run) -> PlanExplanation:
    """Returns the explanation of `found`, the result of a search of `run` with its front."""
    plan = found.best or found.closest
    assert plan is not None, "a search that considered something has a best plan or a closest"
    prediction = require_prediction(plan)
    runners_up = choose_runners_up(found, plan)
    binds, because = _binding_limit_and_reason(plan, found, runners_up=runners_up)
    return PlanExplanation(
        plan=plan,
        fits=prediction.fits_in_memory,
        binds=binds,
        because=because,
        runners_up=runners_up,
        lever=find_largest_lever(plan, hardware, spec=spec, run=run) if found.best else None,
    )


def _binding_limit_and_reason(
    plan: Plan, found: SearchResult, *, runners_up: Sequence[RunnerUpPlan]
) -> tuple[Binding, str]:
    prediction = require_prediction(plan)
    if found.best is None:
        over = prediction.required_device_bytes - prediction.capacity_bytes
        return "memory", f"{format_bytes(over)} more than there is" if over > 0 else "the host has too little"
    limits = _notable_limits(prediction, runners_up, plan=plan)
    if (largest := max(limits, key=lambda one: one[0], default=None)) is not None:
        return largest[1:]
    total, time = prediction.time.total, prediction.time
    share = 100 * (time.compute + time.recompute) / total
    again = f", {100 * time.recompute / total:.0f} % of it to recompute activations" if time.recompute else ""
    return "computing", f"the model's kernels take {share:.0f} % of the step{again}"


def _notable_limits(
    prediction: Prediction, runners_up: Sequence[RunnerUpPlan], *, plan: Plan
) -> Iterator[tuple[float, Binding, str]]:
    """Yields (fraction of the step, limit, reason) of each limit that is notable."""
    total, time = prediction.time.total, prediction.time
    step_up = next((one for one in runners_up if one.lacks_bytes), None)
    if step_up is not None and step_up.speedup >= NOTABLE:
        more = f"{format_bytes(step_up.lacks_bytes)} more than the {format_bytes(prediction.capacity_bytes)}"
        change = f"{format_difference(step_up.plan, plan)}, {100 * step_up.speedup:.0f} % faster"
        yield step_up.speedup / (1 + step_up.speedup), "memory", f"with {more} per rank: {change}"
    if time.offload > NOTABLE * total:
        tier = prediction.offload
        cause = tier.step_bottleneck if tier is not None else "copies of activations"
        text = (
            f"{100 * time.offload / total:.0f} % of the step is waiting for the host and its drive: {cause}"
        )
        yield time.offload / total, "host", text
    waits = {
        "all-gather": time.exposed_all_gather,
        "reduce-scatter": time.exposed_reduce_scatter,
        "all-reduce": time.exposed_all_reduce,
        "contention with collectives": time.contention,
        "ranks that share matmuls or sequences": time.model_parallel,
    }
    share = sum(waits.values()) / total
    if share > NOTABLE:
        name, longest = max(waits.items(), key=lambda one: one[1])
        most = f"most of it {name} ({format_seconds(longest)})"
        yield share, "links", f"{100 * share:.0f} % of the step waits for them, {most}"
    if time.engine > NOTABLE * total:
        share = time.engine / total
        yield share, "host", f"FSDP2's own copies and hooks are {100 * share:.0f} % of the step"
