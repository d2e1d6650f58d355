"""RankFacts: what the ranks of a run have measured about themselves and each other."""

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
