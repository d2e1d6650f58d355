"""Search over the numbers of ranks that share sequences or matmuls, or divide experts, if they are `auto`.

Ranks that share sequences send keys and values, ranks that share matmuls send hidden states, and neither
computes less. So a plan in which each rank has whole sequences and matmuls is faster, unless

- it does not fit, or must offload;
- the batch has fewer sequences than ranks;
- between nodes, gathering and reducing parameters takes long (EXPOSED of the step): each of T ranks that
  share matmuls gathers 1/T of them.

Only in these cases are other numbers of ranks tried, each with all other settings open. The fastest plan that
fits is chosen if it is notably faster than one with fewer axes. One that offloads must be notably faster than
all that do not: the rates of hosts differ more than those of links. Each number needs a trace, which takes
seconds.

[Note: bounds of degrees]
Each number of ranks that divide experts has a lower bound on the seconds of its plans that may fit
(`least_seconds_that_may_fit`), and the search begins with the least of these. A number is left out if its
bound shows that it cannot be chosen: no plan of it is faster than the fastest so far, and it is no lower
number within NOTABLE of that. So the result is the same as if all were searched.

Plans that offload are compared only if none fits without. Ranks that share sequences or matmuls are tried
with the number that is chosen without them, if it has a plan that fits without offload.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fullshard.errors import PlanError, ShardError, TraceError
from fullshard.planner.search.advice import NOTABLE
from fullshard.planner.search.candidate_costs import require_prediction, step_seconds_with_startup
from fullshard.planner.search.candidates import run_with_settings
from fullshard.planner.search.search import (
    SearchResult,
    least_seconds_that_may_fit,
    list_offload_targets,
    search,
)
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Tier
from fullshard.spec.settings.model_section import DecoderConfig, can_decoder_be_split
from fullshard.spec.settings.run_checks import divisors, first_setting_without_tensor_parallel

LEAST_TOKENS = 8192
"""Fewest tokens of a sequence per rank that a search tries. Shorter parts make smaller matmuls."""
EXPOSED = 0.1
"""Fraction of a step in waiting for parameters and gradients above which shared matmuls are tried."""

Describe = Callable[[Run], ModelSpec]


class DegreeSearch(NamedTuple):
    """Result of a search, with its settings and spec."""

    run: Run
    spec: ModelSpec
    found: SearchResult


SearchOrError = Callable[[Run], tuple[DegreeSearch | None, PlanError | None]]


def search_parallel_degrees(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool = False
) -> DegreeSearch:
    """Searches for the best plan of `run`, also over open numbers of ranks that share work.

    describe: returns the spec of the run's model
    with_front: as for `search`

    If no plan fits, the result is that of whole sequences, matmuls and experts. Raises PlanError as `search`
    does.
    """

    def search_or_error(own: Run) -> tuple[DegreeSearch | None, PlanError | None]:
        return _search_or_error(describe, own, hardware=hardware, with_front=with_front)

    whole, error = search_or_error(run)
    best = None if whole is None else whole.found.best
    fits = best is not None and not _offloads_by_choice(best, run)
    if whole is not None and best is not None and fits and not may_pay_to_share_matmuls(best, hardware):
        return whole
    fitting = [whole] if whole is not None and best is not None else []
    if whole is not None and fits:
        run = whole.run
    if not fits:
        fitting += _iterate_context_searches(search_or_error, run, hardware=hardware)
    for degree in iterate_tensor_degrees(run, per_node=hardware.ranks_per_node):
        own = run_with_settings(run, {"sharding": {"tensor_parallel": degree}})
        fitting += _iterate_tensor_searches(search_or_error, own, hardware=hardware)
    if fitting:
        return choose_fastest(fitting, run)
    if whole is None:
        assert error is not None, "a search has a result or an error"
        raise error
    return whole


def choose_fastest(searches: Sequence[DegreeSearch], run: Run) -> DegreeSearch:
    """Returns the first of `searches`, all of which have a plan that fits, that none is notably faster than.

    So an axis that gains little is not taken: what axes cost is less certain than the rest. A plan that
    offloads although `run` leaves that open is chosen only if it is notably faster than all others.
    """
    resident = [one for one in searches if not _offloads_by_choice(_fitting_plan(one), run)]
    fastest = min(map(step_seconds_of, searches))
    if any(step_seconds_of(one) <= (1 + NOTABLE) * fastest for one in resident):
        searches, fastest = resident, min(map(step_seconds_of, resident))
    return next(one for one in searches if step_seconds_of(one) <= (1 + NOTABLE) * fastest)


def _iterate_context_searches(
    search_or_error: SearchOrError, run: Run, *, hardware: Hardware
) -> Iterator[DegreeSearch]:
    """Yields the searches that found a plan, over ranks that share sequences.

    Ends after the first that needs neither recompute nor offload: more ranks would only send more.
    """
    for degree in iterate_context_degrees(hardware, run):
        try:
            searched, _ = search_or_error(run_with_settings(run, {"sharding": {"context_parallel": degree}}))
        except (ShardError, TraceError):
            return  # no number of ranks can divide the sequences of this model
        best = None if searched is None else searched.found.best
        if searched is not None and best is not None:
            yield searched
            if best.run.recompute.mode == "none" and not _offloads_by_choice(best, run):
                return


def _iterate_tensor_searches(
    search_or_error: SearchOrError, run: Run, *, hardware: Hardware
) -> Iterator[DegreeSearch]:
    """Yields the first search that finds a plan for this number of ranks that share matmuls, if any.

    Sequences are whole, unless no plan with whole ones fits, or ranks outnumber the sequences of the batch.
    """
    for degree in (1, *iterate_context_degrees(hardware, run)):
        own = run_with_settings(run, {"sharding": {"context_parallel": degree}}) if degree > 1 else run
        try:
            searched, _ = search_or_error(own)
        except (ShardError, TraceError):
            return  # this many ranks cannot divide the matmuls of this model
        if searched is not None and searched.found.best is not None:
            yield searched
            return


def may_pay_to_share_matmuls(plan: Plan, hardware: Hardware) -> bool:
    """Returns whether a plan waits so long for parameters and gradients that dividing matmuls may pay."""
    time = require_prediction(plan).time
    waits = time.exposed_all_gather + time.exposed_reduce_scatter + time.exposed_all_reduce
    is_open = plan.tensor_parallel == 1 and hardware.nodes > 1
    return is_open and waits > EXPOSED * time.total


def _search_or_error(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool
) -> tuple[DegreeSearch | None, PlanError | None]:
    """Returns the search, or the error of impossible settings, which are not traced."""
    ranks = hardware.world_size // run.sharding.ranks_per_sequence
    try:
        if run.sharding.ranks_per_sequence > 1 and run.train.global_batch % max(ranks, 1):
            Plan.from_run_for_prediction(run, world_size=hardware.world_size, device=hardware.device)
        return _search_expert_degrees(describe, run, hardware=hardware, with_front=with_front), None
    except PlanError as error:
        return None, error


def _search_expert_degrees(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool
) -> DegreeSearch:
    """Searches over the ranks that divide experts, with the run's division of sequences and matmuls.

    The least number of ranks is chosen that no other is notably faster than. See [Note: bounds of degrees].
    """
    spec = describe(run)
    degrees = list(iterate_expert_degrees(hardware, spec.experts))
    if run.sharding.expert_parallel != "auto" or not degrees:
        return DegreeSearch(run, spec, search(spec, hardware, run, with_front=with_front))
    least_seconds_that_may_fit(spec, hardware, run)  # raises, if the batch cannot be divided
    questions = {1: (_with_experts(run, 1), spec)} | _describe_expert_degrees(describe, run, degrees=degrees)
    chosen = _choose_expert_degree(questions, hardware, tiers=(), with_front=with_front)
    tiers = list_offload_targets(hardware, run) if run.offload.tier == "auto" else ()
    if chosen is None and tiers:
        chosen = _choose_expert_degree(questions, hardware, tiers=tiers, with_front=with_front)
    if chosen is None:
        chosen = DegreeSearch(*questions[1], search(spec, hardware, questions[1][0], with_front=with_front))
    return chosen


def _describe_expert_degrees(
    describe: Describe, run: Run, *, degrees: Sequence[int]
) -> dict[int, tuple[Run, ModelSpec]]:
    """Returns the run and the spec for each number of ranks over 1 that can divide the experts."""
    found: dict[int, tuple[Run, ModelSpec]] = {}
    for degree in degrees:
        own = _with_experts(run, degree)
        try:
            spec = describe(own)
        except PlanError:
            continue  # other settings of the run cannot be combined with this number
        except (ShardError, TraceError):
            break  # no number of ranks can divide these experts
        if spec.expert_parallel == degree:  # a saved spec holds for one number
            found[degree] = own, spec
    return found


def _choose_expert_degree(
    questions: Mapping[int, tuple[Run, ModelSpec]],
    hardware: Hardware,
    *,
    tiers: Sequence[Tier],
    with_front: bool,
) -> DegreeSearch | None:
    """Returns the search of the number of ranks to choose; None if none has a plan that fits."""
    bounds: dict[int, float] = {}
    for degree, (run, spec) in questions.items():
        try:
            bounds[degree] = least_seconds_that_may_fit(spec, hardware, run, tiers=tiers)
        except PlanError:
            continue  # other settings of the run cannot be combined with this number
    found: dict[int, DegreeSearch] = {}
    for degree in sorted((one for one in bounds if bounds[one] < float("inf")), key=lambda one: bounds[one]):
        if not _may_be_chosen(degree, bounds[degree], found=found):
            continue
        run, spec = questions[degree]
        result = _search_on_device(spec, hardware, run=run, tiers=tiers, with_front=with_front)
        if result.best is not None:
            found[degree] = DegreeSearch(run, spec, result)
    return choose_fastest([found[degree] for degree in sorted(found)], questions[1][0]) if found else None


def _search_on_device(
    spec: ModelSpec, hardware: Hardware, *, run: Run, tiers: Sequence[Tier], with_front: bool
) -> SearchResult:
    """Searches with one of `tiers`; without any, without offload by choice."""
    resident = run_with_settings(run, {"offload": {"tier": "none"}}) if run.offload.tier == "auto" else run
    own = run if tiers else resident
    return search(spec, hardware, own, tiers=tiers, with_front=with_front)


def _may_be_chosen(degree: int, bound: float, *, found: Mapping[int, DegreeSearch]) -> bool:
    """Returns whether a number of ranks, whose plans take at least `bound` seconds, may be chosen."""
    if not found:
        return True
    seconds = {other: step_seconds_of(one) for other, one in found.items()}
    fastest = min(seconds.values())
    chosen = min(other for other in seconds if seconds[other] <= (1 + NOTABLE) * fastest)
    return bound < fastest or (degree < chosen and bound <= (1 + NOTABLE) * fastest)


def _with_experts(run: Run, degree: int) -> Run:
    return run_with_settings(run, {"sharding": {"expert_parallel": degree}})


def iterate_context_degrees(hardware: Hardware, run: Run) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search tries: whole nodes, or divisors of a node."""
    length, node, tensor = run.data.sequence_length, hardware.ranks_per_node, run.sharding.tensor_degree
    if run.sharding.context_parallel != "auto":
        return
    for degree in divisors(hardware.world_size // tensor):
        follows_nodes = node % (degree * tensor) == 0 or (degree * tensor) % node == 0
        cut = length % (2 * degree * tensor) == 0 and length // degree >= LEAST_TOKENS
        if degree > 1 and follows_nodes and cut:
            yield degree


def iterate_tensor_degrees(run: Run, *, per_node: int) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search lets share matmuls: divisors of a node's ranks."""
    section, model = run.sharding, run.model
    if section.tensor_parallel != "auto" or first_setting_without_tensor_parallel(run) is not None:
        return
    for degree in divisors(per_node):
        fits = not isinstance(model, DecoderConfig) or can_decoder_be_split(model, degree)
        if degree > 1 and fits and run.data.sequence_length % (degree * section.context_degree) == 0:
            yield degree


def sequences_for_sharing_ranks(run: Run, *, ranks: int, per_node: int, most_tokens: int) -> int | None:
    """Returns the most sequences up to `most_tokens`, fewer than `ranks`, that ranks can share.

    It is None if `run` sets the numbers of ranks that share sequences and matmuls, if parts of sequences
    would be too short, or if the model is not known to be divisible.
    """
    length, is_open = run.data.sequence_length, run.sharding.context_parallel == "auto"
    divisible = isinstance(run.model, DecoderConfig)
    degrees = (1, *(iterate_tensor_degrees(run, per_node=per_node) if divisible else ()))
    fewest = (one for one in reversed(divisors(ranks)) if one * length <= most_tokens and one < ranks)
    if (sequences := next(fewest, None)) is None:
        return None
    shared = ranks // sequences  # ranks of each sequence
    others = [shared // tensor for tensor in degrees if shared % tensor == 0]
    can_share = any(one == 1 or (is_open and length // one >= LEAST_TOKENS) for one in others)
    return sequences if can_share else None


def _offloads_by_choice(plan: Plan, run: Run) -> bool:
    """Returns whether a plan offloads although `run` does not ask for it."""
    return run.offload.tier == "auto" and plan.run.offload.tier != "none"


def _fitting_plan(searched: DegreeSearch) -> Plan:
    best = searched.found.best
    assert best is not None, "only plans that fit are compared"
    return best


def step_seconds_of(searched: DegreeSearch) -> float:
    """Returns the seconds of a step of the best plan, which fits, with each step's share of compiling."""
    return step_seconds_with_startup(_fitting_plan(searched))


def iterate_expert_degrees(hardware: Hardware, experts: int) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search tries: whole nodes, or divisors of a node."""
    node = hardware.ranks_per_node
    for degree in divisors(experts):
        follows_nodes = node % degree == 0 or degree % node == 0
        if degree > 1 and follows_nodes and hardware.world_size % degree == 0:
            yield degree
