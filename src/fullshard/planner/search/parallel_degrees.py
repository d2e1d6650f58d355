"""Search over the numbers of ranks that share sequences or matmuls, or divide experts, if they are `auto`.

Ranks that share sequences send keys and values, ranks that share matmuls send hidden states, and neither
computes less. So a plan in which each rank has whole sequences and matmuls is faster, unless

- it does not fit, or must offload;
- the batch has fewer sequences than ranks;
- between nodes, gathering and reducing parameters takes long (EXPOSED of the step): each of T ranks that
  share matmuls gathers 1/T of them.

Only in these cases are other numbers of ranks tried, each with all other settings open. The fastest plan that
fits is chosen if it is notably faster than one with fewer axes. One that offloads must be notably faster than
all that do not: the rates of hosts differ more than those of links. Each number takes seconds to trace, so
none is tried after a plan that is not notably slower than the kernels and the update alone.

Of the numbers of ranks that divide experts, the least is chosen that no other is notably faster than.
Plans that offload are compared only if none fits without. Ranks that share sequences or matmuls are tried
with the number of the first plan that fits without offload, or with offload if the shards of the state alone
exceed the devices' memory, so that no plan fits without.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from fullshard.errors import PlanError, ShardError, TraceError
from fullshard.planner.predict.memory import least_bytes_of_mesh
from fullshard.planner.search import candidates
from fullshard.planner.search.explain import NOTABLE, Describe
from fullshard.planner.search.search import SearchResult, list_offload_targets, search
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Tier
from fullshard.spec.settings.model_section import DecoderConfig, can_decoder_be_split
from fullshard.spec.settings.run_checks import divisors, first_setting_that_excludes_tensor_parallel

LEAST_TOKENS = 8192
"""Fewest tokens of a sequence per rank that a search tries. Shorter parts make smaller matmuls."""
EXPOSED = 0.1
"""Fraction of a step in waiting for parameters and gradients above which shared matmuls are tried."""
_search_best = partial(search, only_best=True)


class DegreeSearch(NamedTuple):
    """Result of a search, with its settings and spec."""

    run: Run
    spec: ModelSpec
    found: SearchResult


class _DegreeSearcher(NamedTuple):
    """Searches plans of one model on one hardware, with any numbers of ranks that share work."""

    describe: Describe
    hardware: Hardware

    def search(self, run: Run) -> DegreeSearch:
        """Searches over the ranks that divide experts, with the run's division of sequences and matmuls.

        Raises PlanError for impossible settings, which are not traced.
        """
        hardware, shared = self.hardware, run.sharding.ranks_per_sequence
        if run.train.global_batch % max(hardware.world_size // shared, 1):
            Plan.from_run(run, world_size=hardware.world_size, device=hardware.device)
        spec = self.describe(run)
        degrees = list(iterate_expert_degrees(hardware, spec.expert_count_gcd))
        if run.sharding.expert_parallel != "auto" or not degrees:
            return DegreeSearch(run, spec, _search_best(spec, hardware, run))
        undivided = (_with_degree(run, "expert_parallel", degree=1), spec)
        questions = {1: undivided} | self._describe_expert_degrees(run, degrees)
        # By choice, plans offload only if none fits without.
        targets = list_offload_targets(hardware, run) if run.offload.tier == "auto" else ()
        for tiers in ((), targets) if targets else ((),):
            if (chosen := self._choose_expert_degree(questions, tiers)) is not None:
                return chosen
        return DegreeSearch(*undivided, _search_best(spec, hardware, undivided[0]))

    def search_fitting(self, run: Run) -> DegreeSearch | None:
        """Returns the search of `run`; None if no plan fits, or its settings are impossible."""
        try:
            searched = self.search(run)
        except PlanError:
            return None
        return None if searched.found.best is None else searched

    def _describe_expert_degrees(self, run: Run, degrees: Sequence[int]) -> dict[int, tuple[Run, ModelSpec]]:
        """Returns the run and the spec for each number of ranks over 1 that can divide the experts."""
        found: dict[int, tuple[Run, ModelSpec]] = {}
        for degree in degrees:
            own = _with_degree(run, "expert_parallel", degree=degree)
            try:
                spec = self.describe(own)
            except PlanError:
                continue  # other settings of the run cannot be combined with this number
            except (ShardError, TraceError):
                break  # no number of ranks can divide these experts
            if spec.expert_parallel == degree:  # a given spec holds for one number
                found[degree] = own, spec
        return found

    def _choose_expert_degree(
        self, questions: Mapping[int, tuple[Run, ModelSpec]], tiers: Sequence[Tier]
    ) -> DegreeSearch | None:
        """Returns the search of the number of ranks to choose; None if none has a plan that fits.

        tiers: the offload targets to try; without any, nothing is offloaded by choice
        """
        found: list[DegreeSearch] = []
        for own, spec in questions.values():
            only_resident = not tiers and own.offload.tier == "auto"
            run = own.with_settings({"offload": {"tier": "none"}}) if only_resident else own
            with suppress(PlanError):  # other settings of the run cannot be combined with this number
                searched = DegreeSearch(own, spec, _search_best(spec, self.hardware, run, tiers=tiers))
                found += [] if searched.found.best is None else [searched]
        return choose_first_not_notably_slower(found, questions[1][0]) if found else None


def search_parallel_degrees(
    describe: Describe, run: Run, *, hardware: Hardware, only_best: bool = False
) -> DegreeSearch:
    """Searches for the best plan of `run`, also over open numbers of ranks that share work.

    describe: returns the spec of the run's model
    only_best: as for `search`

    If no plan fits, the result is that of the search without such ranks. Raises PlanError as `search` does.
    """
    chosen = _choose_degrees(_DegreeSearcher(describe, hardware), run)
    return chosen if only_best else chosen._replace(found=search(chosen.spec, hardware, chosen.run))


def _choose_degrees(searcher: _DegreeSearcher, run: Run) -> DegreeSearch:
    """Returns the best of the searches over open numbers of ranks, of which each has its best plan alone."""
    hardware = searcher.hardware
    whole, error = None, None
    try:
        whole = searcher.search(run)
    except PlanError as caught:  # other numbers of ranks may be possible
        error = caught
    fitting = [whole] if whole is not None and whole.found.best is not None else []
    if whole is not None and not fitting:
        largest = max((unit.numel for unit in whole.spec.units), default=0)
        if largest > hardware.world_size * hardware.device_bytes_limit:  # all ranks share gathered units
            return whole
    is_resident = bool(fitting) and not _offloads_without_being_asked(_fitting_plan(fitting[0]), run)
    if is_resident and not may_pay_to_share_matmuls(_fitting_plan(fitting[0]), hardware):
        return fitting[0]
    fitting = fitting if is_resident else _search_context_degrees(searcher, run, fitting=fitting)
    for tensor in iterate_tensor_degrees(run, per_node=hardware.ranks_per_node):
        if any(_is_bound_by_kernels(one, run) for one in fitting):
            break  # other numbers compute as much
        own = _with_expert_degree_of_first_good_plan(fitting, run, hardware=hardware)
        fitting += _search_with_tensor_degree(searcher, own, tensor=tensor)
    if fitting:
        return choose_first_not_notably_slower(fitting, run)
    if whole is None:
        assert error is not None, "a search has a result or an error"
        raise error
    return whole


def choose_first_not_notably_slower(searches: Sequence[DegreeSearch], run: Run) -> DegreeSearch:
    """Returns the first of `searches`, all of which have a plan that fits, that none is notably faster than.

    So an axis that gains little is not taken: what axes cost is less certain than the rest. A plan that
    offloads although `run` leaves that open is chosen only if it is notably faster than all others.
    """
    resident = [one for one in searches if not _offloads_without_being_asked(_fitting_plan(one), run)]
    fastest = min(map(fitting_plan_step_seconds, searches))
    if any(fitting_plan_step_seconds(one) <= (1 + NOTABLE) * fastest for one in resident):
        searches, fastest = resident, min(map(fitting_plan_step_seconds, resident))
    return next(one for one in searches if fitting_plan_step_seconds(one) <= (1 + NOTABLE) * fastest)


def _search_context_degrees(
    searcher: _DegreeSearcher, run: Run, *, fitting: Sequence[DegreeSearch]
) -> list[DegreeSearch]:
    """Returns `fitting`, and the searches that found a plan, over ranks that share sequences.

    fitting: the search with whole sequences, if it found a plan

    Ends after the first that needs neither recompute nor offload, or whose kernels take nearly all of the
    step: more ranks would only send more.
    """
    found = [*fitting]
    with suppress(ShardError, TraceError):  # no number of ranks can divide the sequences of this model
        for degree in iterate_context_degrees(searcher.hardware, run):
            own = _with_expert_degree_of_first_good_plan(found, run, hardware=searcher.hardware)
            searched = searcher.search_fitting(_with_degree(own, "context_parallel", degree=degree))
            if searched is None:
                continue
            found.append(searched)
            best = _fitting_plan(searched)
            is_free = best.run.recompute.mode == "none" and not _offloads_without_being_asked(best, run)
            if is_free or _is_bound_by_kernels(searched, run):
                break
    return found


def _search_with_tensor_degree(searcher: _DegreeSearcher, run: Run, *, tensor: int) -> Iterator[DegreeSearch]:
    """Yields the first search that finds a plan for this number of ranks that share matmuls, if any.

    Sequences are whole, unless no plan with whole ones fits, or ranks outnumber the sequences of the batch.
    """
    own = _with_degree(run, "tensor_parallel", degree=tensor)
    degrees = iterate_context_degrees(searcher.hardware, own)
    longer = (_with_degree(own, "context_parallel", degree=d) for d in degrees)
    with suppress(ShardError, TraceError):  # this many ranks cannot divide the matmuls of this model
        for one in (own, *longer):
            searched = searcher.search_fitting(one)
            if searched is not None:
                yield searched
                return


def may_pay_to_share_matmuls(plan: Plan, hardware: Hardware) -> bool:
    """Returns whether a plan waits so long for parameters and gradients that dividing matmuls may pay."""
    time = candidates.require_prediction(plan).time
    waits = time.exposed_all_gather + time.exposed_reduce_scatter + time.exposed_all_reduce
    is_open = plan.tensor_parallel == 1 and hardware.nodes > 1
    return is_open and waits > EXPOSED * time.total


def _with_degree(run: Run, axis: str, *, degree: int | Literal["auto"]) -> Run:
    return run.with_settings({"sharding": {axis: degree}})


def iterate_context_degrees(hardware: Hardware, run: Run) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that a search lets share a sequence; none if `run` sets it.

    Each is of whole nodes, or divides a node, with LEAST_TOKENS or more of the sequence per rank.
    """
    length, node, tensor = run.data.sequence_length, hardware.ranks_per_node, run.sharding.tensor_degree
    if run.sharding.context_parallel != "auto":
        return
    for degree in divisors(hardware.world_size // tensor):
        follows_nodes = node % (degree * tensor) == 0 or (degree * tensor) % node == 0
        cut = length % (2 * degree * tensor) == 0 and length // degree >= LEAST_TOKENS
        if degree > 1 and follows_nodes and cut:
            yield degree


def iterate_tensor_degrees(run: Run, *, per_node: int) -> Iterator[int]:
    """Yields divisors over 1 of a node's ranks, to share matmuls; none if `run` sets or excludes it."""
    section, model = run.sharding, run.model
    if section.tensor_parallel != "auto" or first_setting_that_excludes_tensor_parallel(run) is not None:
        return
    for degree in divisors(per_node):
        fits = not isinstance(model, DecoderConfig) or can_decoder_be_split(model, degree)
        if degree > 1 and fits and run.data.row_length % (degree * section.context_degree) == 0:
            yield degree


def most_sequences_shared_by_ranks(run: Run, *, ranks: int, per_node: int, most_tokens: int) -> int | None:
    """Returns the most sequences within `most_tokens` that divide `ranks` and are fewer than these.

    Returns None if no number does, or if `ranks` cannot share that many sequences: by context parallelism
    that `run` leaves open, with LEAST_TOKENS or more per rank; by the tensor parallelism of a decoder
    (`iterate_tensor_degrees`); or both.
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


def _offloads_without_being_asked(plan: Plan, run: Run) -> bool:
    """Returns whether a plan offloads although `run` does not ask for it."""
    return run.offload.tier == "auto" and plan.run.offload.tier != "none"


def _with_expert_degree_of_first_good_plan(
    fitting: Sequence[DegreeSearch], run: Run, *, hardware: Hardware
) -> Run:
    """Returns `run` with the number of ranks that divide experts in the first plan that is good enough.

    A plan is good enough if it does not offload, or if every plan must offload. Returns `run` itself if no
    plan is, or if ranks that divide experts in that number cannot share matmuls.
    """
    for one in fitting:
        if not _offloads_without_being_asked(_fitting_plan(one), run) or _must_offload(one, hardware):
            own = _with_degree(run, "expert_parallel", degree=one.run.sharding.expert_parallel)
            return run if first_setting_that_excludes_tensor_parallel(own) else own
    return run


def _must_offload(searched: DegreeSearch, hardware: Hardware) -> bool:
    """Returns whether the state exceeds the memory of the ranks even if it is sharded over all of them."""
    settings = {"offload": {"tier": "none"}, "sharding": {"strategy": "full_shard", "shard_degree": None}}
    run = _fitting_plan(searched).run.with_settings(settings)
    plan = Plan.from_run(run, world_size=hardware.world_size, device=hardware.device)
    return least_bytes_of_mesh(searched.spec, plan).always > hardware.device_bytes_limit


def _is_bound_by_kernels(searched: DegreeSearch, run: Run) -> bool:
    """Returns whether no plan that computes as much can be notably faster than the one that fits.

    No plan takes less than the kernels of the fastest plan regardless of memory, without recompute, and the
    optimizer and stragglers of this one.
    """
    own = candidates.require_prediction(_fitting_plan(searched)).time
    kernels = candidates.require_prediction(searched.found.fastest).time.compute
    is_resident = not _offloads_without_being_asked(_fitting_plan(searched), run)
    least = kernels + own.optimizer + own.stragglers
    return is_resident and fitting_plan_step_seconds(searched) <= (1 + NOTABLE) * least


def _fitting_plan(searched: DegreeSearch) -> Plan:
    best = searched.found.best
    assert best is not None, "only plans that fit are compared"
    return best


def fitting_plan_step_seconds(searched: DegreeSearch) -> float:
    """Returns the seconds of a step of the best plan, which fits, with each step's share of compiling."""
    return candidates.step_seconds_with_compile_share(_fitting_plan(searched))


def iterate_expert_degrees(hardware: Hardware, experts: int) -> Iterator[int]:
    """Yields the numbers of ranks over 1 that can divide `experts`: whole nodes, or divisors of a node."""
    node = hardware.ranks_per_node
    for degree in divisors(experts):
        follows_nodes = node % degree == 0 or degree % node == 0
        if degree > 1 and follows_nodes and hardware.world_size % degree == 0:
            yield degree
