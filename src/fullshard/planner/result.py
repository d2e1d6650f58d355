"""The answer of `fullshard plan`: the plan, the reasons, and the alternatives; as a page or as JSON."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import typer

from fullshard.errors import PlanError, SpecError
from fullshard.planner.search.candidates import run_with_settings
from fullshard.planner.search.capacity import (
    fewest_ranks_for_deadline,
    largest_fitting_microbatch,
    largest_fitting_sequence_length,
)
from fullshard.planner.search.explain import PlanExplanation, explain_plan
from fullshard.planner.search.parallel_degrees import DegreeSearch, search_parallel_degrees
from fullshard.planner.search.search import SearchResult, no_plan_fits_error
from fullshard.planner.target import PlanTarget
from fullshard.quantities import format_bytes, format_count
from fullshard.report.plan import PlanReport, TrainingBudget, show_plan, show_plan_table
from fullshard.report.table import show_labelled_lines
from fullshard.spec.machine.certainty import certainty_of
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec, fp8_summary_text
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

# The most tokens of a step that --fewest-gpus-in-days chooses by itself: larger ones are rare in pretraining.
MOST_TOKENS = 2**26
# Lengths that --largest sequence tries: powers of two, and their midpoints.
LENGTHS = tuple(sorted(1024 * part << power for part in (2, 3) for power in range(10)))


@dataclass(frozen=True)
class PlanRequest:
    """A planning question: the model, its spec, the hardware, and the run with the user's settings."""

    subject: PlanTarget
    asked: Run
    hardware: Hardware
    spec: ModelSpec

    def plan_unusable_by_train_note(self, path: Path) -> str | None:
        if self.subject.spec is None:
            return None
        return f"{path} is for fs.shard in your own loop: fullshard train has no model to a saved spec"

    @property
    def model_summary(self) -> str:
        spec = self.spec
        blocks = sum(unit.is_block for unit in spec.units)
        text = f"{self.subject.name}: {_format_parameter_count(spec.numel)} parameters"
        # Active parameters are shown for sparse experts only; an embedding lookup is not worth a mention.
        if spec.active_numel is not None and spec.active_numel < 0.7 * spec.numel:
            text += f", {_format_parameter_count(spec.active_numel)} of them for each token"
        return f"{text}, {blocks} blocks" if blocks else text

    @property
    def hardware_summary(self) -> str:
        h = self.hardware
        where = f", {h.nodes:,} nodes of {h.ranks_per_node}" if h.nodes > 1 else ""
        links = h.within.name if h.across is None or h.nodes == 1 else f"{h.within.name}, {h.across.name}"
        joined = f"; {links}" if h.world_size > 1 else ""
        return f"{h.world_size:,} × {h.chip.name} of {format_bytes(h.chip.memory_bytes)}{where}{joined}"


@dataclass(frozen=True)
class PlanResult:
    """The answer to a planning question.

    best: the chosen plan
    found, explanation: the search that found it, and its reasons
    largest: name and size of the maximised quantity, for --largest
    """

    question: PlanRequest
    best: Plan
    found: SearchResult | None = None
    explanation: PlanExplanation | None = None
    largest: tuple[str, int] | None = None

    def print_page(self, budget: TrainingBudget | None, *, compare: bool) -> None:
        """Prints the page. With `compare`, adds the other strategies."""
        if self.largest is not None:
            what, size = self.largest
            show_labelled_lines([(f"largest {what}", f"{size:,}"), ("", "")])
        why: list[str] = []
        if self.explanation is not None:
            why = list(self.explanation.advice_lines())
        why += map(str, self.question.spec.untraced)
        certainty = certainty_of(self.question.spec, self.question.hardware)
        show_plan(
            PlanReport(
                self.best,
                self.question.asked,
                model=self.question.model_summary,
                hardware=self.question.hardware_summary,
                rates=self.question.hardware.source,
                why=why,
                budget=budget,
                fp8=fp8_summary_text(self.question.spec.fp8) if self.question.spec.fp8 else "",
                certainty=certainty,
            )
        )
        if compare and self.found is not None:
            typer.echo("")
            show_plan_table(self.best, self.found.by_strategy.values())

    def json_record(self, budget: TrainingBudget | None) -> dict[str, object]:
        """Returns the result as JSON values. `best` is the plan that --save writes."""
        best, spec, hardware = self.best, self.question.spec, self.question.hardware
        data: dict[str, object] = {
            "model": {"name": self.question.subject.name, "parameters": spec.numel},
            "hardware": {"name": hardware.name, "ranks": hardware.world_size, "source": hardware.source},
            "best": best.model_dump(mode="json"),
        }
        if spec.untraced:
            data["untraced"] = [one.model_dump(mode="json") for one in spec.untraced]
        if best.prediction is not None:
            data |= _prediction_record(best, budget)
        if self.largest is not None:
            data["largest"] = dict([self.largest])
        if self.explanation is not None:
            data["why"] = self.explanation.model_dump(mode="json", exclude={"plan"})
        if self.found is not None:
            data["considered"] = self.found.considered
            plans = self.found.by_strategy.items()
            data["by_strategy"] = {name: plan.model_dump(mode="json") for name, plan in plans}
        if (certainty := certainty_of(spec, hardware)) is not None:
            data["certainty"] = certainty._asdict()
        return data


def _prediction_record(plan: Plan, budget: TrainingBudget | None) -> Mapping[str, object]:
    prediction = plan.prediction
    assert prediction is not None, "the chosen plan is predicted"
    data: dict[str, object] = {
        "fits": prediction.fits_in_memory,
        "bytes_per_rank": prediction.required_device_bytes,
        "seconds_per_step": prediction.time.total,
    }
    if budget is not None:
        data["budget"] = budget.record(plan, prediction)
    return data


def fastest_plan(question: PlanRequest) -> Plan:
    """Returns the fastest plan that fits. Raises PlanError, with changes that would fit, if none does."""
    return _require_best_plan(_search_degrees(question, with_front=False).found, question)


def choose_fastest_plan(question: PlanRequest) -> PlanResult:
    """Searches for the fastest plan that fits, and explains it. Raises PlanError as `fastest_plan` does."""
    searched = _search_degrees(question, with_front=True)
    run, spec, found = searched
    best = _require_best_plan(found, question)
    explanation = explain_plan(found, question.hardware, spec=spec, run=run)
    return PlanResult(replace(question, asked=run, spec=spec), best, found, explanation=explanation)


def _search_degrees(question: PlanRequest, *, with_front: bool) -> DegreeSearch:
    asked, hardware, subject = question.asked, question.hardware, question.subject
    return search_parallel_degrees(
        lambda run: question.spec if run == asked else subject.describe_model(run, hardware),
        asked,
        hardware=hardware,
        with_front=with_front,
    )


def _require_best_plan(found: SearchResult, question: PlanRequest) -> Plan:
    if found.best is None:
        assert found.closest is not None, "a search that considered something has a best plan or a closest"
        spec, hardware, run = question.spec, question.hardware, question.asked
        raise no_plan_fits_error(found.closest, spec=spec, hardware=hardware, run=run)
    return found.best


def plan_largest_input(question: PlanRequest, what: Literal["microbatch", "sequence"]) -> PlanResult:
    """Searches for the largest microbatch or sequence that fits. Raises PlanError if none does."""
    spec, hardware, run = question.spec, question.hardware, question.asked
    if what == "microbatch":
        found = largest_fitting_microbatch(spec, hardware, run=run)
        return PlanResult(question, found.plan, largest=(what, found.size))
    if question.subject.spec is not None:
        raise SpecError(
            "--largest sequence needs the model itself.",
            got=question.subject.name,
            why="a saved spec holds for the sequences that it was traced with",
            fix="a preset, a config.json or a run.toml",
        )
    found = largest_fitting_sequence_length(
        lambda longer: question.subject.describe_model(longer, hardware), hardware, run=run, lengths=LENGTHS
    )
    longer = question.subject.describe_model(found.plan.run, hardware)
    return PlanResult(replace(question, spec=longer), found.plan, largest=("sequence", found.size))


def fewest_gpus_request(
    question: PlanRequest, *, days: float, budget: TrainingBudget | None, may_raise_batch: bool = False
) -> PlanRequest:
    """Returns `question` for the fewest GPUs that process the budget's tokens in `days`.

    may_raise_batch: whether the tokens of a step, which the user did not give, may be doubled for more GPUs

    Raises PlanError if no number of GPUs does, SpecError without a budget.
    """
    if budget is None:
        raise SpecError("to be done in days, it must be known with what.", fix="--budget 15T")
    hardware, run = question.hardware, question.asked
    tokens, largest = budget.tokens, MOST_TOKENS if may_raise_batch else 0
    while True:
        try:
            fleet = fewest_ranks_for_deadline(question.spec, hardware, run=run, tokens=tokens, days=days)
            break
        except PlanError:
            if 2 * run.tokens_per_step > largest:
                raise
            run = run_with_settings(run, {"train": {"global_batch": 2 * run.train.global_batch}})
    if run != question.asked:
        more = format_count(run.tokens_per_step)
        print(f"note: the deadline needs larger steps, planned with {more} tokens each", file=sys.stderr)
    hardware = hardware.with_rank_counts(nodes=fleet.nodes, ranks_per_node=fleet.ranks_per_node)
    return replace(question, hardware=hardware, asked=run)


def _format_parameter_count(count: int) -> str:
    """Formats a number of parameters as in `8.03B`: billions are customary here, not giga."""
    return format_count(count).replace("G", "B")
