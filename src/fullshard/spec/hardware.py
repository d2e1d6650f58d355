"""Hardware: what a run is planned for. Chips, how many, how joined, and how fast all that really is."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field

from fullshard.errors import SpecError
from fullshard.spec.hardware_file import read_tables, write_toml
from fullshard.spec.plan import DeviceType
from fullshard.spec.value import FrozenModel, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

MOST_RANKS = 2**20

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


class Chip(FrozenModel):
    """One accelerator. `flops_per_second`: the dense matmul peak for each dtype that is known.

    `memory_bytes` is what the chip carries: vendors print GB and mean GiB, and the driver keeps some percent.
    `device_names`: all that drivers call it, in lower case and without the vendor.
    """

    name: str
    device_names: tuple[str, ...]
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[ComputeDtype, float]
    source: str


class Point(NamedTuple):
    """At this size of one launch (FLOP or bytes), this rate (FLOP/s or bytes/s)."""

    size: float
    rate: float


Curve = Annotated[tuple[Point, ...], Field(min_length=1)]


def rate_at(curve: tuple[Point, ...], size: float) -> float:
    """The rate at `size`: straight in the logarithms between two points; beyond the last, its own rate.

    Before the first, as if it took the first's time however small it is: a launch has a least duration.
    """
    if size >= curve[-1].size:
        return curve[-1].rate
    if size <= curve[0].size:
        return curve[0].rate * max(size, 1.0) / curve[0].size
    above = bisect_left(curve, size, key=lambda point: point.size)
    (s0, r0), (s1, r1) = curve[above - 1], curve[above]
    along = math.log(size / s0) / math.log(s1 / s0)
    return r0 * (r1 / r0) ** along


def slower(curve: tuple[Point, ...], factor: float) -> tuple[Point, ...]:
    """The curve on which everything takes so many times as long."""
    return tuple(point._replace(rate=point.rate / factor) for point in curve)


class Rates(FrozenModel):
    """What one rank does in a second while the others work too. Measured, or fractions of the chip's peaks.

    `matmul`, `attention`, `attention_backward`: by dtype, FLOP of one launch -> FLOP/s. `memory`: bytes read
    and written by one elementwise launch -> bytes/s; `optimizer`: the same for the fused update.
    `launch_seconds`: host time of issuing one operation (on the CPU: on top of doing it), forward and
    backward averaged. `unit_seconds`: host time of one act of the engine on a unit: gathering its parameters,
    or reducing its gradients. `step_seconds`: host time of a step outside
    the model and engine. `watched_seconds`: what a launch takes longer where selective recompute watches it.
    """

    matmul: Mapping[ComputeDtype, Curve]
    attention: Mapping[ComputeDtype, Curve]
    attention_backward: Mapping[ComputeDtype, Curve]
    memory: Curve
    optimizer: Curve
    launch_seconds: NonNegativeFloat
    unit_seconds: NonNegativeFloat = 0.0
    step_seconds: NonNegativeFloat = 0.0
    watched_seconds: NonNegativeFloat = 0.0


class CollectiveRate(FrozenModel):
    """Seconds of one collective of B bytes (the whole, unsharded) over n ranks of an axis:

        base_seconds + hop_seconds * (n - 1) + x / bytes_per_second,    x = B * (n - 1) / n

    which is a ring's; an all-reduce has its own rate, as measured (a ring's is half). Where `curve` was
    measured over `curve_ranks` ranks (x -> x / seconds, latency and all), it goes before the line:

        x / curve(x) + hop_seconds * (n - curve_ranks)

    `wait_seconds` comes on top of either: what ranks in the midst of a step wait for each other, who started
    at once when the rate was measured.
    """

    base_seconds: NonNegativeFloat
    hop_seconds: NonNegativeFloat
    bytes_per_second: PositiveFloat
    curve: Curve | None = None
    curve_ranks: PositiveInt | None = None
    wait_seconds: NonNegativeFloat = 0.0

    def seconds(self, count: float, ranks: int) -> float:
        if ranks <= 1:
            return 0.0
        moved = count * (ranks - 1) / ranks
        if self.curve is not None and self.curve_ranks is not None and moved > 0:
            measured = moved / rate_at(self.curve, moved)
            return max(measured + self.hop_seconds * (ranks - self.curve_ranks), 0.0) + self.wait_seconds
        line = self.base_seconds + self.hop_seconds * (ranks - 1) + moved / self.bytes_per_second
        return line + self.wait_seconds

    def slower(self, factor: float) -> "CollectiveRate":
        """The same, taking so many times as long."""
        curve = self.curve and slower(self.curve, factor)
        return self.model_copy(
            update={
                "base_seconds": self.base_seconds * factor,
                "hop_seconds": self.hop_seconds * factor,
                "bytes_per_second": self.bytes_per_second / factor,
                "curve": curve,
            }
        )


class Link(FrozenModel):
    """What joins ranks. `bytes_per_second` is the peak of one rank in one direction; `source` says whose."""

    name: str
    bytes_per_second: PositiveFloat
    all_gather: CollectiveRate
    reduce_scatter: CollectiveRate
    all_reduce: CollectiveRate
    source: str = ""


_FILE_HEAD = """hardware.toml: what `fullshard plan` and `fullshard train` take this hardware to be.
Rates are what one rank gets while all work. Figures may be edited; `fullshard calibrate` measures them."""


class Hardware(FrozenModel):
    """`nodes` × `ranks_per_node` ranks of one chip.

    `within` joins the ranks of a node, `across` the nodes (its rates are those of one rank while all ranks of
    its node use their share: one collective over all ranks of several nodes has `ranks_per_node` shares). A
    node is what `within` joins: for GB200, all 72 of a rack.

    `overlap`: which part of a collective's time can pass beside computing (1 on GPUs; 0 where ranks share the
    cores with their collectives). `contention`: how much longer computing takes meanwhile. `stragglers`: by
    which part the slowest of many ranks is behind. `context_bytes`: what a process takes of the device beside
    the allocator, `workspace_bytes`: what matmul libraries take of the allocator. `fragmentation`: what the
    allocator reserves beyond the peaks of its streams, as a part of them.
    `price_per_hour`: of one chip.

    `host_memory_bytes`: one rank's share of the host's. `adam_per_second`: parameters that the host's fused
    AdamW updates in a second for one rank while all ranks' do: 5.2e8 is torch 2.13's on two cores (32M fp32
    parameters; two cores of another machine did 1.66e9: the host's memory decides, so measure it).
    """

    name: str
    device: DeviceType
    chip: Chip
    nodes: Annotated[int, Field(gt=0, le=MOST_RANKS)] = 1
    ranks_per_node: Annotated[int, Field(gt=0, le=MOST_RANKS)] = 1
    rates: Rates
    within: Link
    across: Link | None = None
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    contention: NonNegativeFloat = 0.0
    stragglers: NonNegativeFloat = 0.0
    context_bytes: NonNegativeInt = 0
    workspace_bytes: NonNegativeInt = 0
    fragmentation: NonNegativeFloat = 0.0
    usable_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    host_bytes_per_second: PositiveFloat | None = None
    disk_bytes_per_second: PositiveFloat | None = None
    host_memory_bytes: PositiveInt | None = None
    adam_per_second: PositiveFloat = 5.2e8
    price_per_hour: PositiveFloat | None = None
    source: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def capacity_bytes(self) -> int:
        """Bytes of one rank's device that a process may take, its context included."""
        return int(self.chip.memory_bytes * self.usable_fraction)

    def on(self, *, nodes: int, ranks_per_node: int) -> "Hardware":
        """The same chips and links, more or fewer of them. Raises SpecError for more than MOST_RANKS."""
        if nodes * ranks_per_node > MOST_RANKS:
            raise SpecError(
                "there is no machine of so many ranks.",
                got=f"{nodes:,} nodes of {ranks_per_node:,}",
                fix=f"at most {MOST_RANKS:,}",
            )
        return self.model_copy(update={"nodes": nodes, "ranks_per_node": ranks_per_node})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a whole hardware.toml, as `save` writes it. Raises SpecError for anything else.

        `fullshard.spec.catalog.hardware_on` also takes one that leaves out what the catalog knows.
        """
        return cls.parse(read_tables(Path(path)), source=str(path))

    def save(self, path: str | Path) -> None:
        """Writes TOML that people can edit, and that reads back equal. Raises SpecError if it cannot."""
        write_toml(Path(path), self.model_dump(mode="json", exclude_none=True), head=_FILE_HEAD)
