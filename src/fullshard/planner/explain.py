"""explain(found, hardware): why this plan, what limits it, the cost of the others, and the rules of thumb."""

from typing import Literal

from fullshard.planner.rules import Rule, rules_of_thumb
from fullshard.planner.search import SearchResult, describe_plan
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.value import FrozenModel

Binding = Literal["memory", "links", "host", "computing"]
_LARGEST = 3
_RUNNERS_UP = 6
# Fraction of the step from which a term is reported: another plan, or other hardware, would be noticeable.
_NOTABLE = 0.05


class Term(FrozenModel):
    """One term of a prediction. `count`: bytes."""

    name: str
    count: int


class RunnerUp(FrozenModel):
    """A plan that was not chosen."""

    plan: Plan  # the plan
    seconds: float  # extra seconds per step over the chosen plan; negative if it is faster
    needed_bytes: int  # extra bytes over the chosen plan; negative if it needs fewer
    lacks_bytes: int = 0  # bytes by which it does not fit; 0 if it fits


class Explanation(FrozenModel):
    """Explanation of `plan`, the best plan (or, if nothing fits, the closest).

    Values of `binds`:

    memory      a faster plan is known, and does not fit
    links       a notable part of the step is waiting for collectives
    host        a notable part is neither computing nor waiting for links: the host, or copies by FSDP2 or an
                offload target
    computing   only the kernels themselves
    """

    plan: Plan  # the plan
    fits: bool  # whether it fits
    binds: Binding  # its limit, one of the values below
    because: str  # the reason, as text
    largest: tuple[Term, ...]  # the largest memory terms
    runners_up: tuple[RunnerUp, ...]  # plans that were not chosen
    rules: tuple[Rule, ...]  # the rules of thumb

    def lines(self) -> tuple[str, ...]:
        """Returns the explanation as text, line by line."""
        largest = ", ".join(
            f"{term.name.replace('_', ' ')} {format_bytes(term.count)}" for term in self.largest
        )
        return (
            f"{'chosen' if self.fits else 'closest'}: {describe_plan(self.plan)}",
            f"binds: {self.binds}; {self.because}",
            f"largest: {largest}",
            *(_runner_up_line(one) for one in self.runners_up),
            *(line for rule in self.rules for line in rule.lines()),
        )


def explain(found: SearchResult, hardware: Hardware, *, spec: ModelSpec) -> Explanation:
    """Explains the result of a search over `spec` and `hardware`."""
    plan = found.best or found.closest
    assert plan is not None, "a search that considered something has a best plan or a closest"
    prediction = _of(plan)
    binds, because = _binding(found, prediction)
    terms = sorted(prediction.memory.terms().items(), key=lambda term: -term[1])[:_LARGEST]
    return Explanation(
        plan=plan,
        fits=prediction.fits,
        binds=binds,
        because=because,
        largest=tuple(Term(name=name, count=count) for name, count in terms),
        runners_up=_runners_up(found, plan),
        rules=rules_of_thumb(plan, hardware, spec=spec),
    )


def _binding(found: SearchResult, prediction: Prediction) -> tuple[Binding, str]:
    fastest = _of(found.fastest)
    if found.best is None:
        over = prediction.needed_bytes - prediction.capacity_bytes
        return "memory", f"{format_bytes(over)} more than there is" if over > 0 else "the host has too little"
    total, time = prediction.time.total, prediction.time
    saved = total - fastest.time.total
    if not fastest.fits and saved > _NOTABLE * total:
        over = format_bytes(fastest.needed_bytes - fastest.capacity_bytes)
        return (
            "memory",
            f"with {over} more, {describe_plan(found.fastest)} would save {format_seconds(saved)} a step",
        )
    if time.offload > _NOTABLE * total:
        tier = prediction.offload
        binds = tier.binds if tier is not None else "copies of activations"
        share = 100 * time.offload / total
        return "host", f"{share:.0f} % of the step is waiting for the host and its drive: {binds}"
    waits = {
        "all-gather": time.exposed_all_gather,
        "reduce-scatter": time.exposed_reduce_scatter,
        "all-reduce": time.exposed_all_reduce,
        "contention with collectives": time.contention,
        "ranks that share matmuls": time.tensor_parallel,
    }
    if sum(waits.values()) > _NOTABLE * total:
        name, longest = max(waits.items(), key=lambda one: one[1])
        share = 100 * sum(waits.values()) / total
        return "links", f"{share:.0f} % of the step, most of it {name} ({format_seconds(longest)})"
    if time.engine > _NOTABLE * total:
        return "host", f"the engine's own copies and hooks are {100 * time.engine / total:.0f} % of the step"
    share = 100 * (time.compute + time.recompute) / total
    again = f", {100 * time.recompute / total:.0f} % a second time" if time.recompute else ""
    return "computing", f"{share:.0f} % of the step{again}"


def _runners_up(found: SearchResult, chosen: Plan) -> tuple[RunnerUp, ...]:
    """Returns the next fastest plan, the fastest regardless of memory, and the best of each other kind."""
    best = _of(chosen)
    others: list[Plan] = []
    for plan in (*found.ranked[1:2], found.fastest, *found.by_strategy.values()):
        if plan not in (chosen, *others):
            others.append(plan)
    found_up = (
        RunnerUp(
            plan=plan,
            seconds=_of(plan).time.total - best.time.total,
            needed_bytes=_of(plan).needed_bytes - best.needed_bytes,
            lacks_bytes=max(0, _of(plan).needed_bytes - _of(plan).capacity_bytes),
        )
        for plan in others
    )
    ranked = sorted(found_up, key=lambda one: (one.lacks_bytes > 0, one.seconds))
    shown = ranked[:_RUNNERS_UP]
    return tuple(shown + [one for one in ranked[_RUNNERS_UP:] if one.plan == found.fastest])


def _runner_up_line(one: RunnerUp) -> str:
    time = f"{'+' if one.seconds >= 0 else '-'}{format_seconds(abs(one.seconds))}"
    space = f"{'+' if one.needed_bytes >= 0 else ''}{format_bytes(one.needed_bytes)}"
    lacks = f" (does not fit: {format_bytes(one.lacks_bytes)} over)" if one.lacks_bytes else ""
    return f"instead: {describe_plan(one.plan)}: {time} a step, {space}{lacks}"


def _of(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "plans of a search are predicted"
    return plan.prediction
