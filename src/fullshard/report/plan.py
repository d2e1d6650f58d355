"""Report about a plan before it runs: settings, bytes, seconds, speed, cost, and reasons."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO, cast

from fullshard.quantities import count_text, format_bytes, format_count, format_decimal, format_seconds
from fullshard.report.table import labelled_lines, show_table
from fullshard.spec.machine.certainty import SpeedDeviation
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import (
    CALIBRATION_MARKS,
    ActivationOffloadTerms,
    Prediction,
    fits_in_host_memory,
)
from fullshard.spec.run import Run, Strategy
from fullshard.spec.value import FrozenModel, PositiveFloat, PositiveInt

BAR_COLUMNS = 24
_OWN = "run.dir"  # differs between any two runs, and says nothing
CRUMB = 1e-3  # fraction of the whole below which a term gets no line of its own

_COMPARED = ("strategy", "mesh", "batch", "recompute", "memory", "tokens/s", "")
# Labels of terms whose label is not the name of the term with blanks.
_LABELS = {
    "rest": "activations, rest",
    "loss": "logits and loss",
    "workspace": "kernels' workspace",
    "launch_gaps": "waiting: launches",
    "exposed_all_gather": "waiting: all-gather",
    "exposed_reduce_scatter": "waiting: reduce-scatter",
    "exposed_all_reduce": "waiting: all-reduce",
    "engine": "copies of FSDP2",
    "offload": "waiting: host and drive",
}

# Labels of the work of an offload target: see `OffloadTerms.step_bottleneck`.
HOST_WORK = {"disk": "drive", "update": "update and sums of gradients", "copies": "copies"}


def term_label(term: str) -> str:
    """Returns the printed label for a field of `MemoryTerms` or `TimeTerms`, or for the `rest`."""
    return _LABELS.get(term, term.replace("_", " "))


class TrainingBudget(FrozenModel):
    """A number of tokens to train on, and the price of a rank's hour in dollars: None if unknown."""

    tokens: PositiveInt | None = None
    price_per_hour: PositiveFloat | None = None

    def json_record(self, plan: Plan, prediction: Prediction) -> dict[str, float | None]:
        """Returns tokens, seconds, rank hours and dollars as JSON values."""
        an_hour = self.price_per_hour and self.price_per_hour * plan.world_size
        seconds = self.tokens and self.tokens / prediction.tokens_per_second
        return {
            "tokens": self.tokens,
            "seconds": seconds,
            "rank_hours": seconds and seconds / 3600 * plan.world_size,
            "dollars": seconds and an_hour and seconds / 3600 * an_hour,
            "dollars_per_hour": an_hour,
            "dollars_per_billion_tokens": an_hour and 1e9 / prediction.tokens_per_second / 3600 * an_hour,
        }

    def texts(self, plan: Plan, prediction: Prediction) -> Iterator[str]:
        """Yields time and dollars for the tokens; or without these, dollars per hour and billion tokens."""
        record = cast(dict[str, float], self.json_record(plan, prediction))
        if self.tokens:
            dollars = f" for ${format_amount(record['dollars'])}" if self.price_per_hour else ""
            yield f"{format_count(self.tokens)} tokens in {format_duration(record['seconds'])}{dollars}"
        elif self.price_per_hour:
            yield f"${format_amount(record['dollars_per_hour'])} an hour"
            yield f"${format_amount(record['dollars_per_billion_tokens'])} per billion tokens"


class PlanReport(NamedTuple):
    """Contents of the report about one plan."""

    plan: Plan
    asked: Run = Run()  # the settings that the user pinned or left open
    model: str = ""  # one line about the model
    hardware: str = ""  # one line about the hardware
    rates: str = ""  # source of the hardware's rates
    why: Sequence[str] = ()  # paragraphs of reasons
    budget: TrainingBudget | None = None  # tokens to train on and a price, if any
    fp8: str = ""  # which matrices are multiplied in fp8, if any
    certainty: SpeedDeviation | None = None  # how far the speed may be wrong, if anything is known about it
    answer: str = ""  # the answer to a question beyond the plan, if there was one


def plan_page(plan: Plan) -> str:
    """Returns the page about a plan, as `print(plan)` prints it, without lines about what it was chosen from.

    >>> fs.plan_page(plan) == str(plan)
    True
    """
    hardware = plan.prediction.hardware if plan.prediction is not None else ""
    return "\n".join(labelled_lines(plan_rows(PlanReport(plan, hardware=hardware))))


def plan_rows(page: PlanReport) -> Iterator[tuple[str, str]]:
    """Yields the (label, text) lines of the report, the answer first. Empty parts have none."""
    plan, prediction = page.plan, page.plan.prediction
    if prediction is not None:
        budget = () if page.budget is None else page.budget.texts(plan, prediction)
        texts = (page.answer, _fit_text(prediction), _rate_text(prediction), *budget)
        yield "plan", "; ".join(filter(None, texts))
    about = {"model": page.model, "hardware": page.hardware, "  rates": page.rates}
    yield from ((label, text) for label, text in about.items() if text)
    yield from settings_rows(plan, page.asked)
    if page.fp8:
        yield "fp8", page.fp8
    if prediction is None:
        yield "prediction", "none was made"
        return
    yield from _memory_rows(prediction, margin=page.asked.memory_margin)
    if plan.run.checkpoint.mode == "async":
        staged = format_bytes(prediction.memory.checkpoint_bytes(plan.run.adapter))
        yield "checkpoints", f"{staged} more host memory per rank, for the copy that is written"
    if prediction.offload is not None:
        yield from _offload_rows(prediction)
    if prediction.activations is not None:
        yield from _host_activation_rows(prediction.activations, held=prediction.host_bytes_per_rank)
    yield from _step_time_rows(prediction)
    yield from _speed_rows(plan, prediction, certainty=page.certainty)
    if page.budget is not None:
        yield from _budget_rows(page.budget, plan, prediction=prediction)
    for index, text in enumerate(page.why):
        yield "why" if index == 0 else "", text


def _fit_text(prediction: Prediction) -> str:
    """Returns `fits`, or by how much the plan does not fit."""
    over = prediction.required_device_bytes - prediction.capacity_bytes
    if over > 0:
        return f"does not fit: {format_bytes(over)} more than a rank has"
    host = prediction.host_bytes_per_rank
    used = f", with {format_bytes(host)} of host memory per rank" if host else ""
    if not prediction.fits_in_memory:
        return f"does not fit{used}"
    parts = (prediction.offload, prediction.activations)
    is_known = all(part.host_capacity_bytes for part in parts if part is not None)
    return f"fits{used}" if is_known else f"fits{used}, which is not checked"


def _rate_text(prediction: Prediction) -> str:
    most = "" if prediction.has_complete_step_time else "at most "
    return f"{most}{format_count(prediction.tokens_per_second)} tokens/s"


def show_plan_table(chosen: Plan, others: Iterable[Plan], *, file: TextIO | None = None) -> None:
    """Prints a table of the plans that have a prediction, `chosen` first, to `file` (standard output)."""
    show_table(_COMPARED, plan_table_rows(chosen, others), file=file)


def plan_table_rows(chosen: Plan, others: Iterable[Plan]) -> list[tuple[str, ...]]:
    """Returns the table's cells: the chosen plan, other plans that fit, by speed, then the rest, by bytes."""
    assert chosen.prediction is not None, "the chosen plan is predicted"
    predicted = [(plan, plan.prediction) for plan in others if plan.prediction is not None and plan != chosen]
    predicted.sort(key=lambda one: _plan_sort_key(one[1]))
    rows = [(chosen, chosen.prediction), *predicted]
    return [
        (
            str(plan.strategy),
            f"{plan.replicate_degree}×{plan.shard_degree}",
            f"{plan.microbatch}×{plan.accumulation}",
            recompute_text(plan.run).removesuffix(" block"),
            format_bytes(prediction.required_device_bytes),
            format_count(prediction.tokens_per_second),
            _extra_time_or_missing_bytes_text(prediction, chosen=chosen.prediction),
        )
        for plan, prediction in rows
    ]


def _plan_sort_key(prediction: Prediction) -> tuple[int, float]:
    if prediction.fits_in_memory:
        return (0, -prediction.tokens_per_second)
    return (1, prediction.required_device_bytes)


def _extra_time_or_missing_bytes_text(prediction: Prediction, *, chosen: Prediction) -> str:
    """Returns a plan's extra time per token over the chosen one, or the bytes by which it does not fit."""
    if not prediction.fits_in_memory:
        return f"{format_bytes(prediction.required_device_bytes - prediction.capacity_bytes)} over"
    if prediction is chosen:
        return "chosen"
    longer = 100 * (chosen.tokens_per_second / prediction.tokens_per_second - 1)
    return f"{longer:+.0f} % time" if abs(longer) >= 0.5 else "as fast"


def sharding_text(plan: Plan) -> str:
    """Returns the mesh as `full_shard over 8 ranks` or `hybrid_shard over 8 ranks, in 4 replicas`."""
    if plan.world_size == 1:
        freed = "gathered when used" if plan.reshard_after_forward else "kept gathered over the step"
        return f"{plan.strategy} on one rank: parameters are {freed}"
    if plan.strategy is Strategy.NO_SHARD:
        return f"{plan.strategy}: {count_text(plan.replicate_degree, 'replica')}"
    text = f"{plan.strategy} over {count_text(plan.shard_degree, 'rank')}"
    if plan.replicate_degree > 1:
        text += f", in {plan.replicate_degree} replicas"
    return text


def recompute_text(run: Run) -> str:
    """Returns `the first 8 blocks`, `selective, the first block`, or the mode if it is that of all blocks."""
    section = run.recompute
    inputs = "; their inputs wait on the host" if section.inputs == "host" else ""
    if (first := section.blocks) is None:
        return section.mode + inputs
    selective = "selective, " if section.mode == "selective" else ""
    return f"{selective}the first {first} blocks{inputs}" if first > 1 else f"{selective}the first block"


def _model_parallel_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (label, text) lines about the axes of ranks that share one computation."""
    for axis, ranks, before, after in (
        ("tensor", plan.tensor_parallel, "matmuls", "and the sequence between"),
        ("context", plan.context_parallel, "each sequence", "which gather keys and values"),
        ("expert", plan.expert_parallel, "experts", "which send each other tokens"),
    ):
        if ranks > 1:
            yield f"{axis} parallel", f"{before} over {count_text(ranks, 'rank')}, {after}"


def settings_rows(plan: Plan, asked: Run) -> Iterator[tuple[str, str]]:
    """Yields (label, text) lines about a plan's settings.

    Strategy, microbatch, loss chunk, recompute and compile are marked `(as asked)` if `asked` pins them.
    """

    def mark_as_asked(text: str, *, pinned: bool) -> str:
        return f"{text}  (as asked)" if pinned else text

    run, precision = plan.run, plan.precision
    yield "strategy", mark_as_asked(sharding_text(plan), pinned=asked.sharding.strategy != "auto")
    yield from _model_parallel_rows(plan)
    if run.adapter.rank:
        packed = f", packed in {form}" if (form := run.adapter.packed_format) else ""
        yield "adapter", f"rank {run.adapter.rank}; the base is frozen{packed}"
    if run.offload.tier != "none":
        there = ", updated in the device's memory" if run.offload.update == "device" else ""
        yield "offload", run.offload.tier + there
    sequences = plan.data_parallel_degree * plan.microbatch * plan.accumulation
    batch = f"microbatch {plan.microbatch}"
    if plan.accumulation > 1:
        when = "in each microbatch" if plan.sync_each_microbatch else "once a step"
        batch += f" × {plan.accumulation} accumulated, gradients reduced {when}"
    yield "batch", mark_as_asked(batch, pinned=asked.train.microbatch is not None)
    shared = "group" if plan.world_size > plan.data_parallel_degree else "rank"
    ranks, length = count_text(plan.data_parallel_degree, shared), run.data.sequence_length
    tokens = format_count(sequences * length)
    yield "", f"× {ranks} = {count_text(sequences, 'sequence')} of {length:,} = {tokens} tokens a step"
    kept = "" if precision.master == precision.reduce else f", kept in {precision.master}"
    fp8 = f"fp8 ({precision.fp8.scaling}) and " if precision.fp8 else ""
    yield "precision", f"{fp8}{precision.param} computed, {precision.reduce} reduced{kept}"
    if isinstance(run.train.loss_chunk, int) and run.train.loss_chunk:
        rows = f"logits in chunks of {run.train.loss_chunk:,} rows"
        yield "loss", mark_as_asked(rows, pinned=asked.train.loss_chunk != "auto")
    yield "recompute", mark_as_asked(recompute_text(run), pinned=asked.recompute.mode != "auto")
    compiled = "blocks" if run.run.compile is True else "no"
    if plan.prediction is not None and plan.prediction.compile_seconds:
        compiled += f", {format_seconds(plan.prediction.compile_seconds)} before the first step (assumed)"
    yield "compile", mark_as_asked(compiled, pinned=asked.run.compile != "auto")


def _memory_rows(prediction: Prediction, *, margin: float) -> Iterator[tuple[str, str]]:
    needed, capacity = prediction.required_device_bytes, prediction.capacity_bytes
    rest = f"{format_bytes(abs(capacity - needed))} {'free' if prediction.fits_in_memory else 'TOO MUCH'}"
    share = f"{format_bytes(needed)} of {format_bytes(capacity)} usable, on the fullest rank"
    yield "memory", f"{share} ({100 * needed / capacity:.0f} %): {rest}"
    if margin:
        used = "" if needed <= (1 - margin) * capacity else ", which this plan uses"
        yield "  margin", f"{format_bytes(margin * capacity)} ({100 * margin:g} %) to be left free{used}"
    terms = {term_label(name): float(count) for name, count in prediction.memory.terms().items()}
    terms["allocator reserve"] = prediction.allocator_reserve_bytes
    terms["device context"] = prediction.context_bytes
    yield from _bar_rows(terms, format_bytes, whole=needed)
    yield "  highest", _time_of_peak_text(prediction.memory.moment)


def _time_of_peak_text(moment: str) -> str:
    """Returns `microbatch 2, pre forward of norm+head` as `before the forward of norm+head, microbatch 2`."""
    number, _, event = moment.rpartition(", ")
    place, _, phase = event.partition(" ")
    word = {"pre": "before the", "post": "after the", "end": "at the end of"}.get(place)
    text = f"{word} {phase}" if word and phase else event
    return f"{text}, {number}" if number else text


def _offload_rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    terms = prediction.offload
    assert terms is not None, "there is a tier"
    capacity = terms.host_capacity_bytes
    of = f" of {format_bytes(capacity)}" if capacity is not None else ""
    room = "" if fits_in_host_memory(terms) else ": TOO MUCH"
    yield "host memory", f"{format_bytes(terms.host_bytes)}{of} per rank{room}"
    if terms.disk_bytes:
        yield "drive", f"{format_bytes(terms.disk_bytes)} per rank"
        all_there = "" if terms.disk_read_bytes else " (the state that an update needs is still in memory)"
        written = format_bytes(terms.disk_written_bytes)
        yield "", f"a step reads {format_bytes(terms.disk_read_bytes)}{all_there} and writes {written}"
        wear = "what is written wears it"
        if prediction.has_complete_step_time:
            a_day = terms.disk_written_bytes / prediction.time.total * 86_400
            wear += f" by {format_decimal(a_day)}B a day for each rank"
        yield "", wear
    seconds = {"disk": terms.disk_seconds, "update": terms.update_seconds, "copies": terms.copy_seconds}
    each = ", ".join(f"{HOST_WORK[name]} {format_seconds(value)}" for name, value in seconds.items() if value)
    yield "  at least", f"the longest of {each}"
    if terms.disk_seconds is None:
        yield "", "the drive's time is not known: fullshard calibrate --drive DIRECTORY"


def _host_activation_rows(terms: ActivationOffloadTerms, *, held: int) -> Iterator[tuple[str, str]]:
    """Yields lines about the activations' use of the host. `held`: host bytes with the offload target's."""
    capacity = terms.host_capacity_bytes
    of = f" of {format_bytes(capacity)}" if capacity is not None else ""
    room = "" if capacity is None or held <= capacity else ": TOO MUCH"
    yield "on the host", f"{format_bytes(terms.host_bytes)}{of} per rank for activations{room}"
    copied, seconds = format_bytes(terms.copied_bytes), format_seconds(terms.copy_seconds)
    yield "", f"a step copies {copied} there and back, {seconds} in all"


def _step_time_rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    total = prediction.time.total
    notes = "" if prediction.has_complete_step_time else ", without its drive"
    mark = CALIBRATION_MARKS[prediction.calibration]
    notes += f"  ({mark})" if mark else ""
    yield "step", format_seconds(total) + notes
    terms = {term_label(name): seconds for name, seconds in prediction.time.terms().items()}
    yield from _bar_rows(terms, format_seconds, whole=total)


def _bar_rows(
    terms: Mapping[str, float], show: Callable[[float], str], *, whole: float
) -> Iterator[tuple[str, str]]:
    """Yields one line per term with its figure, its share of `whole` and a bar. Small terms share a line."""
    crumbs = {label: value for label, value in terms.items() if value < CRUMB * whole}
    shown = {label: value for label, value in terms.items() if label not in crumbs}
    shown["other"] = sum(crumbs.values())
    width = max(len(show(value)) for value in shown.values())
    for label, value in shown.items():
        part = value / whole if whole else 0.0
        if value > CRUMB / 10 * whole:
            bar = "█" * round(part * BAR_COLUMNS)
            share = f"{100 * part:3.0f} %" if part >= 0.005 else " <1 %"
            yield f"  {label}", f"{show(value):>{width}}  {share}  {bar}".rstrip()


def _speed_rows(
    plan: Plan, prediction: Prediction, *, certainty: SpeedDeviation | None
) -> Iterator[tuple[str, str]]:
    rate = prediction.tokens_per_second
    each = f", {format_count(rate / plan.world_size)} per rank" if plan.world_size > 1 else ""
    yield "speed", _rate_text(prediction) + each
    if certainty is not None:
        slow, fast = (format_count(rate / plan.world_size / (1 + error)) for error in reversed(certainty[:2]))
        yield "  certainty", f"{slow} to {fast} per rank: {certainty.text}"
    if prediction.mfu is not None:
        yield "MFU", f"{100 * prediction.mfu:.1f} %"


def _budget_rows(budget: TrainingBudget, plan: Plan, *, prediction: Prediction) -> Iterator[tuple[str, str]]:
    kind, record = "GPU" if plan.device == "cuda" else "rank", budget.json_record(plan, prediction)
    if budget.tokens and (hours := record["rank_hours"]):
        yield f"{format_count(budget.tokens)} tokens", f"{format_amount(hours)} {kind} hours"
    if price := budget.price_per_hour:
        each = format_amount(record["dollars_per_billion_tokens"] or 0.0)
        yield "price", f"${format_amount(price)} for a {kind} hour, ${each} per billion tokens"


def format_duration(seconds: float) -> str:
    """Returns the seconds as text: `90` -> `1 min 30 s`; from two days on, `41.2 days`."""
    days = seconds / 86400
    return format_seconds(seconds) if days < 2 else f"{days:,.1f} days"


def format_amount(value: float) -> str:
    """Returns `1234567.8` as `1,234,568`, and values below 100 with two decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns (key, each run's value) of settings that differ, except `run.dir`. Absent values are ""."""
    each = [dict(_flatten(run.model_dump(mode="json"), "")) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    rows = [(key, [settings.get(key, "") for settings in each]) for key in keys if key != _OWN]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in cast(Mapping[str, Any], value).items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str):
        yield key, value
    else:
        yield key, json.dumps(value)
