"""Search over the number of ranks that share each sequence (`sharding.context_parallel = "auto"`).

Ranks that share sequences send keys and values, and compute nothing less. So a plan in which each rank has
whole sequences is faster, unless it does not fit, or must offload. Only then other numbers of ranks are
tried, each with all other settings open, and the fastest plan that fits is chosen. One that offloads must be
notably faster than all that do not: the rates of hosts differ more than those of links.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fullshard.errors import PlanError, ShardError, TraceError
from fullshard.planner.advice import NOTABLE
from fullshard.planner.candidate_costs import step_seconds_with_startup
from fullshard.planner.candidates import divisors_largest_first, run_with_settings
from fullshard.planner.search import SAME_SPEED, SearchResult, search
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

LEAST_TOKENS = 8192
"""Fewest tokens of a sequence that a rank gets by choice. Parts that are shorter make smaller matmuls."""

Describe = Callable[[Run], ModelSpec]


class ContextSearch(NamedTuple):
    """Result of a search, with the settings and the spec that it was made for."""

    run: Run
    spec: ModelSpec
    found: SearchResult


def search_context_degrees(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool = False
) -> ContextSearch:
    """Searches for the best plan of `run`, also over an open number of ranks that share sequences.

    describe: returns the spec of the run's model
    with_front: as for `search`

    If no plan fits, the result is that of whole sequences. Raises PlanError as `search` does.
    """
    whole, error = _search_or_error(describe, run, hardware=hardware, with_front=with_front)
    if whole is not None and not _is_missing_or_offloads(whole, run):
        return whole
    fitting = [] if whole is None or whole.found.best is None else [whole]
    for degree in iterate_context_degrees(hardware, run) if run.sharding.context_parallel == "auto" else ():
        own = run_with_settings(run, {"sharding": {"context_parallel": degree}})
        try:
            searched, _ = _search_or_error(describe, own, hardware=hardware, with_front=with_front)
        except (ShardError, TraceError):
            break  # no number of ranks can divide the sequences of this model
        if searched is None or searched.found.best is None:
            continue
        fitting.append(searched)
        if searched.found.best.run.recompute.mode == "none" and not _is_missing_or_offloads(searched, run):
            break  # more ranks would only send more
    if fitting:
        return choose_fastest(fitting, run)
    if whole is None:
        assert error is not None, "a search has a result or an error"
        raise error
    return whole


def choose_fastest(searches: Sequence[ContextSearch], run: Run) -> ContextSearch:
    """Returns the first of the fastest of `searches`, all of which have a plan that fits.

    One that offloads although `run` leaves that open is chosen only if it is notably faster than all others.
    """
    resident = [one for one in searches if not _is_missing_or_offloads(one, run)]
    fastest = min(map(_seconds, searches))
    if any(_seconds(one) <= (1 + NOTABLE) * fastest for one in resident):
        searches, fastest = resident, min(map(_seconds, resident))
    return next(one for one in searches if _seconds(one) <= (1 + SAME_SPEED) * fastest)


def _search_or_error(
    describe: Describe, run: Run, *, hardware: Hardware, with_front: bool
) -> tuple[ContextSearch | None, PlanError | None]:
    """Returns the search, or the error of settings that are impossible, which are not traced."""
    ranks = hardware.world_size // run.sharding.ranks_per_sequence
    try:
        if run.sharding.context_degree > 1 and run.train.global_batch % max(ranks, 1):
            Plan.from_run_for_prediction(run, world_size=hardware.world_size, device=hardware.device)
        spec = describe(run)
        found = search(spec, hardware, run, with_front=with_front)
    except PlanError as error:
        return None, error
    return ContextSearch(run, spec, found), None


def iterate_context_degrees(hardware: Hardware, run: Run) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search tries: whole nodes, or divisors of a node."""
    length, node, tensor = run.data.sequence_length, hardware.ranks_per_node, run.sharding.tensor_parallel
    pieces = 2 if run.sharding.context_method == "gather" else 1
    for degree in reversed(divisors_largest_first(hardware.world_size // tensor)):
        follows_nodes = node % (degree * tensor) == 0 or (degree * tensor) % node == 0
        cut = length % (degree * pieces) == 0 and length // degree >= LEAST_TOKENS
        if degree > 1 and follows_nodes and cut:
            yield degree


def sequences_for_sharing_ranks(run: Run, *, ranks: int, most_tokens: int) -> int | None:
    """Returns the most sequences up to `most_tokens`, fewer than `ranks`, that ranks can share.

    It is None if `run` sets the number of ranks that share a sequence, or if their parts would be too short.
    """
    length = run.data.sequence_length
    if run.sharding.context_parallel != "auto":
        return None
    for sequences in divisors_largest_first(ranks):
        if sequences * length <= most_tokens and sequences < ranks:
            return sequences if length * sequences // ranks >= LEAST_TOKENS else None
    return None


def _is_missing_or_offloads(searched: ContextSearch, run: Run) -> bool:
    """Returns whether no plan fits, or only one that offloads although `run` does not ask for it."""
    best = searched.found.best
    return best is None or (run.offload.tier == "auto" and best.run.offload.tier != "none")


def _seconds(searched: ContextSearch) -> float:
    best = searched.found.best
    assert best is not None, "only plans that fit are compared"
    return step_seconds_with_startup(best)
