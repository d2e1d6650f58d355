"""Search over the number of ranks that divide the experts of a mixture (`sharding.expert_parallel = "auto"`).

[Note: bounds of degrees]
Two of the numbers are traced, and the others derived from these (`tracing.expert_degrees`). Each has a lower
bound on the seconds of its plans that may fit (`least_seconds_that_may_fit`), and the search begins with the
least of these. A number is left out if its bound shows that it cannot be chosen: no plan of it is faster than
the fastest so far, and it is no lower number within NOTABLE of that. So the result is the same as if all were
searched.

Plans that offload are compared only if none fits without. Ranks that share sequences or matmuls are tried
with the number that is chosen without them, if it has a plan that fits without offload.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from fullshard.errors import PlanError, ShardError, TraceError
from fullshard.planner.advice import NOTABLE
from fullshard.planner.candidates import WhatIfSettings, run_with_settings
from fullshard.planner.search import (
    SearchResult,
    least_seconds_that_may_fit,
    list_offload_targets,
    search,
)
from fullshard.planning.parallel_degrees import (
    DegreeSearch,
    Describe,
    choose_fastest,
    search_parallel_degrees,
    step_seconds_of,
)
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run
from fullshard.spec.run_checks import divisors

DescribeDegrees = Callable[[Run, Sequence[int]], Mapping[int, ModelSpec]]
"""Returns the specs of a run's model for numbers of ranks that divide its experts."""


def search_expert_degrees(
    describe: Describe,
    run: Run,
    *,
    describe_degrees: DescribeDegrees,
    hardware: Hardware,
    with_front: bool = False,
) -> DegreeSearch:
    """Searches as `search_parallel_degrees` does, also over an open number of ranks that divide experts.

    If no plan fits, the result is that of undivided experts. Raises PlanError as `search` does.
    """

    def search_one_division(own: Run) -> DegreeSearch:
        return _search_degrees(
            own,
            describe(own),
            describe_degrees=describe_degrees,
            hardware=hardware,
            with_front=with_front,
        )

    return search_parallel_degrees(
        describe, run, hardware=hardware, with_front=with_front, search_whole=search_one_division
    )


def _search_degrees(
    run: Run, spec: ModelSpec, *, describe_degrees: DescribeDegrees, hardware: Hardware, with_front: bool
) -> DegreeSearch:
    """Searches over the ranks that divide experts, with the run's division of sequences and matmuls.

    The least number of ranks is chosen that no other is notably faster than. See [Note: bounds of degrees].
    """
    degrees = list(iterate_expert_degrees(hardware, spec.experts))
    if run.sharding.expert_parallel != "auto" or not degrees:
        return DegreeSearch(run, spec, search(spec, hardware, run, with_front=with_front))
    questions = {1: (_with_experts(run, 1), spec)}
    least_seconds_that_may_fit(spec, hardware, run)  # raises, if the batch cannot be divided
    try:
        specs = describe_degrees(run, degrees)
    except (PlanError, ShardError, TraceError):
        specs = dict[int, ModelSpec]()  # these experts, or other settings of the run, do not allow it
    questions |= {degree: (_with_experts(run, degree), one) for degree, one in specs.items()}
    chosen = _choose_degree(questions, hardware, what_if=None, with_front=with_front)
    tiers = list_offload_targets(hardware, run) if run.offload.tier == "auto" else ()
    if chosen is None and tiers:
        chosen = _choose_degree(questions, hardware, what_if=WhatIfSettings(tiers), with_front=with_front)
    if chosen is None:
        chosen = DegreeSearch(*questions[1], search(spec, hardware, questions[1][0], with_front=with_front))
    return chosen


def _choose_degree(
    questions: Mapping[int, tuple[Run, ModelSpec]],
    hardware: Hardware,
    *,
    what_if: WhatIfSettings | None,
    with_front: bool,
) -> DegreeSearch | None:
    """Returns the search of the number of ranks to choose; None if none has a plan that fits."""
    bounds: dict[int, float] = {}
    for degree, (run, spec) in questions.items():
        try:
            bounds[degree] = least_seconds_that_may_fit(spec, hardware, run, what_if=what_if)
        except PlanError:
            continue  # other settings of the run cannot be combined with this number
    found: dict[int, DegreeSearch] = {}
    for degree in sorted((one for one in bounds if bounds[one] < float("inf")), key=lambda one: bounds[one]):
        if not _may_be_chosen(degree, bounds[degree], found=found):
            continue
        run, spec = questions[degree]
        result = _search_on_device(spec, hardware, run=run, what_if=what_if, with_front=with_front)
        if result.best is not None:
            found[degree] = DegreeSearch(run, spec, result)
    return choose_fastest([found[degree] for degree in sorted(found)], questions[1][0]) if found else None


def _search_on_device(
    spec: ModelSpec, hardware: Hardware, *, run: Run, what_if: WhatIfSettings | None, with_front: bool
) -> SearchResult:
    """Searches without offload by choice, if `what_if` is None."""
    resident = run_with_settings(run, {"offload": {"tier": "none"}}) if run.offload.tier == "auto" else run
    own = run if what_if is not None else resident
    return search(spec, hardware, own, what_if=what_if, with_front=with_front)


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


def iterate_expert_degrees(hardware: Hardware, experts: int) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search tries: whole nodes, or divisors of a node."""
    node = hardware.ranks_per_node
    for degree in divisors(experts):
        follows_nodes = node % degree == 0 or degree % node == 0
        if degree > 1 and follows_nodes and hardware.world_size % degree == 0:
            yield degree
