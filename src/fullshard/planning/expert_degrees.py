"""Search over the number of ranks that divide the experts of a mixture (`sharding.expert_parallel = "auto"`).

Each number is traced once, with all other settings open. Numbers are tried from the smallest on, as long as
the best plan that fits gets faster: more ranks gather fewer experts, and send tokens further.
"""

from collections.abc import Iterator

from fullshard.errors import PlanError, ShardError, TraceError
from fullshard.planner.candidate_costs import step_seconds_with_startup
from fullshard.planner.candidates import run_with_settings
from fullshard.planner.search import SAME_SPEED
from fullshard.planning.parallel_degrees import DegreeSearch, Describe, search_parallel_degrees
from fullshard.spec.hardware import Hardware
from fullshard.spec.run import Run
from fullshard.spec.run_checks import divisors


def search_expert_degrees(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool = False
) -> DegreeSearch:
    """Searches as `search_parallel_degrees` does, also over an open number of ranks that divide experts.

    If no plan fits, the result is that of undivided experts. Raises PlanError as `search` does.
    """
    whole = search_parallel_degrees(describe, run, hardware=hardware, with_front=with_front)
    experts = whole.spec.experts if run.sharding.expert_parallel == "auto" else 0
    best, seconds = whole, _seconds(whole)
    for degree in iterate_expert_degrees(hardware, experts):
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
        if seconds is None or found < seconds / (1 + SAME_SPEED):
            best, seconds = searched, found
    return best


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
