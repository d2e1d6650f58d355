"""A planning question, and its answer: the plan, the reasons, and the alternatives; as a page or as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from fullshard.planner.search.explain import PlanExplanation, explain_plan
from fullshard.planner.search.parallel_degrees import DegreeSearch, search_parallel_degrees
from fullshard.planner.search.search import SearchResult, require_best
from fullshard.planner.target import ModelToPlan, choose_global_batch, choose_hardware, resolve_model_to_plan
from fullshard.quantities import count_text, format_bytes, format_count
from fullshard.report.plan import PlanReport, TrainingBudget, plan_rows, show_plan_table
from fullshard.report.table import show_labelled_lines
from fullshard.spec.machine.certainty import speed_deviation_of_plan
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec, fp8_summary_text
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import check_own_model_has_data, count_groups, unused_setting_notes
from fullshard.system.targets import check_output_file, convert_write_errors, make_load_predicate
from fullshard.system.terminal import print_to_stderr


@dataclass(frozen=True)
class PlanRequest:
    """A planning question: model, hardware, the run with the user's settings, and the spec if it is known."""

    subject: ModelToPlan
    asked: Run
    hardware: Hardware
    described: ModelSpec | None = None

    @cached_property
    def spec(self) -> ModelSpec:
        return self.described or self.subject.describe_model(self.asked, self.hardware)

    @property
    def model_summary(self) -> str:
        spec = self.spec
        blocks = sum(unit.is_block for unit in spec.units)
        text = f"{self.subject.name}: {format_count(spec.numel)} parameters"
        if (trained := spec.numel - spec.frozen_numel) < spec.numel:
            packed = f", {format_count(spec.packed_numel)} packed" if spec.packed_numel else ""
            text += f" ({format_count(trained)} trained{packed})"
        # Active parameters are shown for sparse experts only, as an embedding lookup is not worth a mention.
        if spec.active_numel is not None and spec.active_numel < 0.7 * spec.numel:
            text += f", {format_count(spec.active_numel)} of them for each token"
        return f"{text}, {count_text(blocks, 'block')}" if blocks else text

    @property
    def hardware_summary(self) -> str:
        h = self.hardware
        where = f", {h.nodes:,} nodes of {h.ranks_per_node}" if h.nodes > 1 else ""
        links = h.within.name if h.across is None or h.nodes == 1 else f"{h.within.name}, {h.across.name}"
        joined = f"; {links}" if h.world_size > 1 else ""
        return f"{h.world_size:,} × {h.chip.name} of {format_bytes(h.chip.memory_bytes)}{where}{joined}"


class PlanOptions(NamedTuple):
    """Options of `fullshard plan` that hold for every machine that it plans on."""

    model: str | None
    pinned: tuple[str, ...]
    ranks: int | None = None
    tokens_per_step: int | None = None
    budget: int | None = None
    price: float | None = None

    def build_request(
        self, machine: str | None, *, size: tuple[int, int] | None = None, quiet: bool = False
    ) -> PlanRequest:
        """Returns the planning question on a machine; None is this one.

        size: (nodes, ranks per node) in place of the machine's own
        quiet: prints no notes to standard error
        """
        subject, pinned, notes = resolve_model_to_plan(self.model), [*self.pinned], list[str | None]()
        asked, ranks = subject.load_run(pinned), self.ranks
        if not subject.chosen_here:  # a whole run, which trains; a model by name has no data
            check_own_model_has_data(asked)
        if machine is not None:  # ranks in a run.toml are of another machine; those of --set count
            ranks = ranks or (asked.run.ranks if _is_key_overridden("run.ranks", pinned) else None) or None
            pinned += ["run.ranks=0", "run.device=auto"]
            asked = subject.load_run(pinned)
        hardware = choose_hardware(machine, ranks=ranks, run=asked)
        if size is not None:
            hardware = hardware.with_rank_counts(nodes=size[0], ranks_per_node=size[1])
        if asked.precision.mode == "auto":
            pinned.append(f"precision.mode={'bf16' if hardware.device == 'cuda' else 'fp32'}")
            asked = subject.load_run(pinned)
        is_open = subject.chosen_here and not _is_key_overridden("train.global_batch", pinned)
        if self.tokens_per_step is not None or is_open:
            sequences, note = choose_global_batch(
                asked,
                tokens=self.tokens_per_step,
                ranks=max(1, hardware.world_size // asked.sharding.ranks_per_sequence),
                per_node=hardware.ranks_per_node,
            )
            notes.append(note)
            asked = subject.load_run([*pinned, f"train.global_batch={sequences}"])
        notes += [f"planned as the reference decoder: {text}" for text in subject.differs]
        notes += unused_setting_notes(asked)
        for note in () if quiet else filter(None, notes):
            print_to_stderr(f"note: {note}")
        degree = asked.sharding.tensor_degree  # before the trace, which would fail without its name
        count_groups(hardware.world_size, degree, key="tensor_parallel", shared="the matmuls")
        sharding = asked.sharding
        is_degree_open = sharding.strategy.startswith("hybrid") and sharding.shard_degree is None
        if "auto" not in (sharding.tensor_parallel, sharding.context_parallel) and not is_degree_open:
            # A batch or ranks that cannot be divided are refused before the trace, too, which takes seconds.
            Plan.from_run(asked, world_size=hardware.world_size, device=hardware.device)
        return PlanRequest(subject, asked, hardware)

    def budget_on(self, hardware: Hardware, price: float | None = None) -> TrainingBudget | None:
        """Returns the tokens of --budget and the price of --price or the hardware; None without either."""
        price = price or self.price or hardware.price_per_hour
        if self.budget is None and price is None:
            return None
        figures = {"tokens": self.budget, "price_per_hour": price}
        return TrainingBudget.parse(figures, source="--budget and --price")


def _is_key_overridden(key: str, overrides: Sequence[str]) -> bool:
    return any(text.partition("=")[0].strip() == key for text in overrides)


@dataclass(frozen=True)
class PlanResult:
    """The answer to a planning question.

    best: the chosen plan
    found, explanation: the search that found it, and its reasons
    fewest_for_days: days for which the plan's GPUs are the fewest, for --fewest-gpus-in-days; else None
    """

    question: PlanRequest
    best: Plan
    found: SearchResult
    explanation: PlanExplanation
    fewest_for_days: float | None = None

    @property
    def answer(self) -> str:
        """The answer to a question beyond the plan, with which the page begins; empty without one."""
        days, ranks = self.fewest_for_days, self.best.world_size
        return "" if days is None else f"fewest for {count_text(days, 'day')}: {count_text(ranks, 'GPU')}"

    def print_report(self, budget: TrainingBudget | None, *, compare: bool) -> None:
        """Prints the page. With `compare`, adds the other strategies."""
        why = [*self.explanation.lines(), *map(str, self.question.spec.untraced)]
        certainty = speed_deviation_of_plan(self.question.spec, self.question.hardware, plan=self.best)
        page = PlanReport(
            self.best,
            self.question.asked,
            model=self.question.model_summary,
            hardware=self.question.hardware_summary,
            rates=self.question.hardware.source,
            why=why,
            budget=budget,
            fp8=fp8_summary_text(self.question.spec.fp8) if self.question.spec.fp8 else "",
            certainty=certainty,
            answer=self.answer,
        )
        show_labelled_lines(plan_rows(page))
        if compare:
            print()
            show_plan_table(self.best, self.found.by_strategy.values())

    def save(self, path: Path) -> None:
        """Saves the best plan. Raises SpecError for a file that cannot be written."""
        with convert_write_errors(path):
            self.best.save(path)

    def json_record(self, budget: TrainingBudget | None) -> dict[str, object]:
        """Returns the result as JSON values. `best` is the plan that --save writes."""
        best, spec, hardware = self.best, self.question.spec, self.question.hardware
        counts = {"parameters": spec.numel, "frozen": spec.frozen_numel, "packed": spec.packed_numel}
        data: dict[str, object] = {
            "model": {"name": self.question.subject.name, **counts},
            "hardware": {"name": hardware.name, "ranks": hardware.world_size, "source": hardware.source},
            "best": best.model_dump(mode="json"),
        }
        if spec.untraced:
            data["untraced"] = [one.model_dump(mode="json") for one in spec.untraced]
        if (prediction := best.prediction) is not None:
            data["fits"] = prediction.fits_in_memory
            data["bytes_per_rank"] = prediction.required_device_bytes
            data["seconds_per_step"] = prediction.time.total
            if budget is not None:
                data["budget"] = budget.json_record(best, prediction)
        data["why"] = self.explanation.model_dump(mode="json")
        data["considered"] = self.found.considered
        plans = self.found.by_strategy.items()
        data["by_strategy"] = {name: plan.model_dump(mode="json") for name, plan in plans}
        if (certainty := speed_deviation_of_plan(spec, hardware, plan=best)) is not None:
            data["certainty"] = certainty._asdict()
        return data


def check_output_replaceable(path: Path, *, force: bool) -> None:
    """Raises SpecError if the file of the plan must not be replaced, or has no directory."""
    with convert_write_errors(path):
        path.parent.stat()
    check_output_file(path, is_kind=make_load_predicate(Plan.load), force=force, streams=True)


def search_and_explain(question: PlanRequest) -> PlanResult:
    """Finds and explains the fastest plan that fits. Raises PlanError, with changes that would, if none."""
    searched = search_degrees(question)
    run, spec, found = searched
    best = require_best(found, spec=spec, hardware=question.hardware, run=question.asked)
    describe = partial(question.subject.describe_model, hardware=question.hardware)
    explanation = explain_plan(found, question.hardware, spec=spec, run=run, describe=describe)
    return PlanResult(replace(question, asked=run, described=spec), best, found, explanation)


def search_degrees(question: PlanRequest, *, only_best: bool = False) -> DegreeSearch:
    """Searches for the best plan, also over open numbers of ranks that share work, as `search` does."""
    asked, hardware, subject = question.asked, question.hardware, question.subject
    return search_parallel_degrees(
        lambda run: question.spec if run == asked else subject.describe_model(run, hardware),
        asked,
        hardware=hardware,
        only_best=only_best,
    )
