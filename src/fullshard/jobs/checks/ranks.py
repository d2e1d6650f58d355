"""Facts that ranks have measured about themselves, their links and a sharded step, and checks of them."""

import math
import statistics

from fullshard.quantities import format_bytes
from fullshard.spec.records.finding import Finding
from fullshard.spec.value import FrozenModel


class PairRate(FrozenModel):
    """The rate at which two ranks exchange data, in bytes per second."""

    ranks: tuple[int, int]
    bytes_per_second: float


class ShardedComparison(FrozenModel):
    """The steps of a small copy of the model: sharded over the ranks, and unsharded.

    losses_sharded, losses_unsharded: of each step
    errors: largest difference of each parameter, relative to its norm
    """

    losses_sharded: tuple[float, ...]
    losses_unsharded: tuple[float, ...]
    errors: dict[str, float]


class RankFacts(FrozenModel):
    """Facts that the ranks of a run gathered on rank 0.

    hosts: host name of each rank
    settings: versions, code and environment of each rank
    unreachable: pairs of hosts of which the first cannot connect to the second, with the reason
    pairs: rates between pairs of ranks
    device: `cpu` or `cuda`
    catalog_bytes_per_second: rate of a link within a host, by the catalog or calibration; None if unknown
    comparison: sharded and unsharded steps, or the reason why there are none
    step_error: the error of a sharded step that works unsharded; None if the step succeeded
    state_dtypes: dtypes of the optimizer's state after a step, by name of the state
    master_dtype: dtype that the plan keeps parameters in
    """

    hosts: tuple[str, ...]
    settings: tuple[dict[str, str], ...] = ()
    unreachable: tuple[str, ...] = ()
    pairs: tuple[PairRate, ...] = ()
    device: str = "cpu"
    catalog_bytes_per_second: float | None = None
    comparison: ShardedComparison | str = "not measured"
    step_error: str | None = None
    state_dtypes: dict[str, str] | str = "not measured"
    master_dtype: str = "fp32"


FILE_NAME = "rank-facts.json"


_LEAST_OF_CATALOG, _LEAST_OF_MEDIAN = 0.5, 1 / 3
# fp32 sums of gradients in another order differ by 1e-6 of a parameter after two steps.
_LOSS_TOLERANCE, _PARAMETER_TOLERANCE = 1e-4, 1e-3
_ONE_HOST = "all ranks are on this machine"
_LOW_PRECISION = ("bfloat16", "float16")


def check_connections(facts: RankFacts) -> Finding:
    """Checks that every host can connect to every other."""
    if len(set(facts.hosts)) < 2:
        return Finding.skipped(_ONE_HOST)
    if facts.unreachable:
        return Finding.failure(
            "; ".join(facts.unreachable[:3]),
            why="a collective waits for a connection that a firewall or another interface does not allow",
            fix="open all ports between the hosts, or NCCL_SOCKET_IFNAME = the interface that they share",
        )
    return Finding.ok(f"every one of {len(set(facts.hosts))} hosts connects to every other")


def check_links(facts: RankFacts) -> Finding:
    """Compares the rates between pairs of ranks with the catalog on GPUs, and with each other."""
    if not facts.pairs:
        return Finding.skipped("a single rank has no link")
    slowest = min(facts.pairs, key=lambda pair: pair.bytes_per_second)
    usual = statistics.median(pair.bytes_per_second for pair in facts.pairs)
    one, other = slowest.ranks
    text = f"ranks {one} and {other} exchange {format_bytes(slowest.bytes_per_second)}/s"
    if len(facts.pairs) > 2 and slowest.bytes_per_second < _LEAST_OF_MEDIAN * usual:
        return Finding.warning(
            f"{text}, the median pair {format_bytes(usual)}/s",
            why="all ranks wait for the slowest pair",
            fix=f"a look at cable, switch or NUMA placement of {facts.hosts[one]} and {facts.hosts[other]}",
        )
    catalog, same_host = facts.catalog_bytes_per_second, len(set(facts.hosts)) == 1
    if facts.device == "cuda" and catalog and same_host and usual < _LEAST_OF_CATALOG * catalog:
        return Finding.warning(
            f"GPUs exchange {format_bytes(usual)}/s (median), by the catalog {format_bytes(catalog)}/s",
            why="the plan's step is too fast",
            fix="fullshard calibrate, after a look at NCCL's variables and nvidia-smi topo -m",
        )
    return Finding.ok(f"{len(facts.pairs)} pairs of ranks, {format_bytes(usual)}/s (median)")


def check_same_settings(facts: RankFacts) -> Finding:
    """Compares versions, code and environment of the ranks."""
    names = sorted({name for one in facts.settings for name in one})
    differing: list[str] = []
    for name in names:
        values = [one.get(name, "unset") for one in facts.settings]
        if len(set(values)) > 1:
            rank = next(i for i, value in enumerate(values) if value != values[0])
            differing.append(
                f"{name}: {values[0]} on rank 0, {values[rank]} on rank {rank} ({facts.hosts[rank]})"
            )
    if differing:
        return Finding.failure(
            "; ".join(differing[:3]),
            why="ranks that run different programs hang, or train different models",
            fix="one environment and one copy of the code for all hosts",
        )
    return Finding.ok(f"{len(facts.settings)} ranks have the same versions, code and environment")


def check_sharded_step(facts: RankFacts) -> Finding:
    """Compares sharded steps of a small copy of the model with unsharded ones, in fp32."""
    found = facts.comparison
    if facts.step_error is not None:
        return Finding.failure(
            f"a sharded step raises {facts.step_error}",
            why="the same step works unsharded",
            fix="fullshard.shard in a loop of your own, with FULLSHARD_TRACEBACK=1, shows where",
        )
    if isinstance(found, str):
        return Finding.skipped(found)
    pairs = list(zip(found.losses_sharded, found.losses_unsharded, strict=True))
    losses = max((abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=0.0)
    worst = max(found.errors, key=lambda name: found.errors[name], default="")
    error = found.errors.get(worst, 0.0)
    if not math.isfinite(losses + error) or losses > _LOSS_TOLERANCE or error > _PARAMETER_TOLERANCE:
        return Finding.failure(
            f"{len(pairs)} steps on {len(facts.hosts)} ranks differ from unsharded ones: loss {losses:.1e}, "
            f"{worst} {error:.1e}",
            why="the model or the loss depends on the rank, or computes with parameters outside of forward",
            fix="a look for ranks, cached weights, and own collectives in the model and the loss",
        )
    return Finding.ok(f"{len(pairs)} sharded steps equal unsharded ones within {max(losses, error):.0e}")


def check_state_dtypes(facts: RankFacts) -> Finding:
    """Checks that the optimizer keeps its state in the dtype of the master weights."""
    if isinstance(facts.state_dtypes, str):
        return Finding.skipped(facts.state_dtypes)
    low = {name: dtype for name, dtype in facts.state_dtypes.items() if dtype in _LOW_PRECISION}
    if low and facts.master_dtype == "fp32":
        names = ", ".join(f"{name} in {dtype}" for name, dtype in sorted(low.items()))
        return Finding.warning(
            f"the optimizer keeps {names}",
            why="small updates round to nothing in 8 bits of mantissa; the plan keeps master weights in fp32",
            fix="an optimizer whose state has the parameters' dtype",
        )
    kinds = ", ".join(sorted(set(facts.state_dtypes.values())))
    return Finding.ok(f"the optimizer's state is {kinds or 'empty'}")
