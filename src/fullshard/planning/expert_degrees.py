"""Search over the number of ranks that divide the experts of a mixture (`sharding.expert_parallel = "auto"`).

Where whole experts fit, and a step waits little for parameters and gradients, no other number is tried. Else
each number is traced once, with all other settings open. Numbers are tried from the smallest on, as long as
the best plan that fits gets faster: more ranks gather fewer experts, and send tokens further.
"""

from collections.abc import Iterator

from fullshard.errors import PlanError, ShardError, TraceError
from fullshard.planner.advice import NOTABLE
from fullshard.planner.candidate_costs import step_seconds_with_startup
from fullshard.planner.candidates import run_with_settings
from fullshard.planning.parallel_degrees import (
    DegreeSearch,
    Describe,
    search_parallel_degrees,
    waits_long_for_parameters,
)
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.run_checks import divisors


def search_expert_degrees(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool = False
) -> DegreeSearch:
    """Searches as `search_parallel_degrees` does, also over an open number of ranks that divide experts.

    If no plan fits, the result is that of undivided experts. Raises PlanError as `search` does.
    """
    whole = search_parallel_degrees(describe, run, hardware=hardware, with_front=with_front)
    best, seconds = whole, _seconds(whole)
    if not may_pay_to_divide_experts(whole.found.best, whole.spec, run):
        return whole
    for degree in iterate_expert_degrees(hardware, whole.spec.experts):
        own = run_with_settings(run, {"sharding": {"expert_parallel": degree}})
        try:
            searched = search_parallel_degrees(describe, own, hardware=hardware, with_front=with_front)
        except (PlanError, ShardError, TraceError):
            continue  # other settings of the run cannot be combined with this number
        found = _seconds(searched)
        if found is None:
            continue
        if seconds is not None and found > seconds and best is not whole:
            break
        if seconds is None or found < seconds / (1 + NOTABLE):
            best, seconds = searched, found
    return best


def may_pay_to_divide_experts(plan: Plan | None, spec: ModelSpec, run: Run) -> bool:
    """Returns whether ranks may divide experts, instead of gathering all in `plan`; None: no plan fits."""
    is_open = spec.experts > 0 and run.sharding.expert_parallel == "auto"
    return is_open and (plan is None or waits_long_for_parameters(plan))


def iterate_expert_degrees(hardware: Hardware, experts: int) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search tries: whole nodes, or divisors of a node."""
    node = hardware.ranks_per_node
    for degree in divisors(experts):
        follows_nodes = node % degree == 0 or degree % node == 0
        if degree > 1 and follows_nodes and hardware.world_size % degree == 0:
            yield degree


def _seconds(searched: DegreeSearch) -> float | None:
    best = searched.found.best
    return None if best is None else step_seconds_with_startup(best)
