"""Hardware that a run is planned for: its chip, links, number of ranks and rates."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field

from fullshard.errors import SpecError
from fullshard.spec.plan import DeviceType
from fullshard.spec.prediction import CalibrationState
from fullshard.spec.value import (
    FrozenModel,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_descriptions,
)
from fullshard.system.files import write_file_atomically
from fullshard.system.small_files import read_toml, toml_text
from fullshard.system.targets import convert_write_errors

MOST_RANKS = 2**20
CALIBRATE = "fullshard calibrate, which writes one"  # fix for a hardware.toml that cannot be read

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
AttentionKernel = Literal["flash", "cudnn", "cudnn_256"]


class Chip(FrozenModel):
    """A kind of accelerator.

    device_names: all names that drivers use for it, in lower case and without the vendor
    memory_bytes: memory on the chip, bytes. Vendors print GB and mean GiB; the driver keeps a few percent.
    memory_bytes_per_second: peak, bytes/s
    flops_per_second: dense matmul peak for each dtype whose peak is known, FLOP/s
    source: the datasheet
    """

    name: str
    device_names: tuple[str, ...]
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[ComputeDtype, float]
    source: str


class RatePoint(NamedTuple):
    """A point of a rate curve: a launch of `size` (FLOP or bytes) runs at `rate` (FLOP/s or bytes/s)."""

    size: float
    rate: float


Curve = Annotated[tuple[RatePoint, ...], Field(min_length=1)]


def interpolate_rate(curve: tuple[RatePoint, ...], size: float) -> float:
    """Returns the rate of a launch of `size`, interpolated linearly in the logarithms between two points.

    Beyond the last point, the rate is constant. Before the first point, the duration is constant, because a
    launch has a minimum duration.
    """
    if size >= curve[-1].size:
        return curve[-1].rate
    if size <= curve[0].size:
        return curve[0].rate * max(size, 1.0) / curve[0].size
    above = bisect_left(curve, size, key=lambda point: point.size)
    (s0, r0), (s1, r1) = curve[above - 1], curve[above]
    along = math.log(size / s0) / math.log(s1 / s0)
    return r0 * (r1 / r0) ** along


def curve_with_slowdown(curve: tuple[RatePoint, ...], factor: float) -> tuple[RatePoint, ...]:
    """Returns a copy of the rate curve on which every launch takes `factor` times as long."""
    return tuple(point._replace(rate=point.rate / factor) for point in curve)


class Rates(FrozenModel):
    """Compute rates and host times of one rank while all ranks work: measured, or fractions of peaks.

    matmul: by dtype, [FLOP of one launch, FLOP/s]
    attention, attention_backward: by dtype, [FLOP of one launch, for computed pairs of positions, FLOP/s]
    attention_by_head_dim, attention_backward_by_head_dim: [width of a head, factor on these rates]
    flash_by_head_dim, flash_backward_by_head_dim: the same for attention that runs by flash attention where
        these are the rates of another kernel; None if they are flash attention's own
    grouped_matmul: [FLOP of one matrix of a grouped matmul in bf16, part of the rate of large matmuls]; None
        for a device that multiplies the matrices in turn
    grouped_tile_rows: rows of a tile of this kernel; the last tile of each matrix is half empty on average
    memory: elementwise operations, [bytes read and written by one launch, bytes/s]
    half_memory: part of this rate that elementwise operations in half precision reach
    optimizer: the fused update, [bytes read and written, bytes/s]
    launch_seconds: host time to issue one operation (on the CPU, in addition to computing it), forward and
        backward averaged, s
    unit_seconds: host time of FSDP2 to gather one unit's parameters or to reduce its gradients, s
    single_rank_matmul: factor on the rates of matmuls of a rank that works alone: it waits for no slower one
    unaligned_matmul: part of the rate that a matmul reaches whose rows are no multiple of 16 bytes
    """

    matmul: Mapping[ComputeDtype, Curve]
    attention: Mapping[ComputeDtype, Curve]
    attention_backward: Mapping[ComputeDtype, Curve]
    attention_by_head_dim: Curve = (RatePoint(1.0, 1.0),)
    attention_backward_by_head_dim: Curve = (RatePoint(1.0, 1.0),)
    flash_by_head_dim: Curve | None = None
    flash_backward_by_head_dim: Curve | None = None
    grouped_matmul: Curve | None = None
    grouped_tile_rows: NonNegativeFloat = 0.0
    memory: Curve
    half_memory: float = Field(default=1.0, gt=0, le=1)
    optimizer: Curve
    launch_seconds: NonNegativeFloat
    unit_seconds: NonNegativeFloat = 0.0
    unaligned_matmul: float = Field(default=1.0, gt=0, le=1)
    single_rank_matmul: float = Field(default=1.0, ge=1)


class CollectiveRate(FrozenModel):
    """Parameters of the duration of one kind of collective, of B unsharded bytes over n ranks of a mesh axis:

        base_seconds + hop_seconds * (n - 1) + x / bytes_per_second,    x = B * (n - 1) / n

    This is the time of a ring. A measured curve replaces it by
    x / curve(x) + hop_seconds * (n - curve_ranks).

    base_seconds: latency of a collective, s
    hop_seconds: additional latency for each rank beyond the first, s
    bytes_per_second: bytes/s
    curve: [bytes that a rank receives, bytes/s including latency]
    curve_ranks: number of ranks of the curve's measurement
    """

    base_seconds: NonNegativeFloat
    hop_seconds: NonNegativeFloat
    bytes_per_second: PositiveFloat
    curve: Curve | None = None
    curve_ranks: PositiveInt | None = None

    def predict_seconds(self, unsharded_bytes: float, ranks: int) -> float:
        """Returns the duration of a collective of `unsharded_bytes`."""
        if ranks <= 1:
            return 0.0
        moved = unsharded_bytes * (ranks - 1) / ranks
        if self.curve is not None and self.curve_ranks is not None and moved > 0:
            measured = moved / interpolate_rate(self.curve, moved)
            return max(measured + self.hop_seconds * (ranks - self.curve_ranks), 0.0)
        return self.base_seconds + self.hop_seconds * (ranks - 1) + moved / self.bytes_per_second


class Link(FrozenModel):
    """The connection between ranks, with the rates of its collectives.

    bytes_per_second: peak of one rank in one direction, bytes/s
    all_to_all: by the bytes that a rank sends, its own part included; if unset, the rate of an all-gather
    source: the source of the peak
    """

    name: str
    bytes_per_second: PositiveFloat
    all_gather: CollectiveRate
    reduce_scatter: CollectiveRate
    all_reduce: CollectiveRate
    all_to_all: CollectiveRate | None = None
    source: str = ""

    @property
    def known_rates(self) -> dict[str, CollectiveRate]:
        """The rate of each kind of collective that has one."""
        return {name: rate for name, rate in self if isinstance(rate, CollectiveRate)}


_FILE_HEAD = """hardware.toml: the hardware that `fullshard plan` and `fullshard train` plan for.
Rates are those of one rank while all ranks work. They may be edited; `fullshard calibrate` measures them."""


class Hardware(FrozenModel):
    """The machines of a run: `nodes` × `ranks_per_node` ranks of one chip.

    nodes: groups of ranks that `across` joins
    ranks_per_node: ranks of a node
    within: the link between the ranks of a node. A node is the set of ranks that `within` joins: for GB200,
        all 72 of a rack.
    across: the link between nodes. Its rates are those of one rank while all ranks of its node use their
        share; one collective over all ranks of several nodes has `ranks_per_node` shares.
    overlap: fraction of a collective's time that can overlap compute (1 on GPUs; 0 where ranks share the
        cores with their collectives)
    contention: relative slowdown of compute beside a collective
    stragglers: fraction by which the slowest of many ranks is behind
    context_bytes: device memory of a process outside the allocator, without communicators, bytes
    communicator_bytes: device memory of a communicator of NCCL, bytes
    peer_bytes: what its all-to-alls take in addition for each other rank of the node, bytes
    workspace_bytes: memory that matmul libraries take from the allocator, bytes
    fragmentation: memory that the allocator reserves beyond the peaks of its streams, as a fraction of them
    usable_fraction: fraction of the chip's memory that a plan may use
    host_bytes_per_second: device <-> host copies of one rank while all ranks copy, bytes/s
    disk_bytes_per_second: reads and writes together of one rank while all ranks use the drive, bytes/s
    host_memory_bytes: one rank's share of the host's memory, bytes
    adam_per_second: parameters that the host updates for one rank while it updates for all ranks, 1/s. 5.2e8
        is the rate of torch 2.13's fused AdamW on two cores (32M fp32 parameters). Two cores of another
        machine reached 1.66e9: the host's memory decides, so measure it.
    price_per_hour: dollars per hour for one chip
    is_calibrated: whether the rates were measured on this hardware
    is_busy: whether other programs used the cores during the measurement; always False for GPUs
    attention_kernel: kernel that torch's attention prefers in half precision: with cuDNN above 9.15,
        "cudnn_256" on Hopper (heads of up to 256), and "cudnn" (up to 128) on Blackwell of data centres. The
        rates of attention are this kernel's.
    """

    name: str
    device: DeviceType
    chip: Chip
    attention_kernel: AttentionKernel = "flash"
    nodes: Annotated[int, Field(gt=0, le=MOST_RANKS)] = 1
    ranks_per_node: Annotated[int, Field(gt=0, le=MOST_RANKS)] = 1
    rates: Rates
    within: Link
    across: Link | None = None
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    contention: NonNegativeFloat = 0.0
    stragglers: NonNegativeFloat = 0.0
    context_bytes: NonNegativeInt = 0
    communicator_bytes: NonNegativeInt = 0
    peer_bytes: NonNegativeInt = 0
    workspace_bytes: NonNegativeInt = 0
    fragmentation: NonNegativeFloat = 0.0
    usable_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    host_bytes_per_second: PositiveFloat | None = None
    disk_bytes_per_second: PositiveFloat | None = None
    host_memory_bytes: PositiveInt | None = None
    adam_per_second: PositiveFloat = 5.2e8
    price_per_hour: PositiveFloat | None = None
    is_calibrated: bool = False
    is_busy: bool = False
    source: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def rates_at_world_size(self) -> Rates:
        """The rates in a step: of a single rank with faster matmuls, by `rates.single_rank_matmul`."""
        factor = self.rates.single_rank_matmul
        if self.world_size > 1 or factor == 1:
            return self.rates
        matmul = {name: curve_with_slowdown(curve, 1 / factor) for name, curve in self.rates.matmul.items()}
        return self.rates.model_copy(update={"matmul": matmul})

    @property
    def calibration(self) -> CalibrationState:
        """The state of the rates: measured on this hardware, idle or beside other programs, or not."""
        return ("busy" if self.is_busy else "idle") if self.is_calibrated else "none"

    @property
    def device_bytes_limit(self) -> int:
        """Bytes of a device's memory that one rank may use, including the context of its process."""
        return max(1, int(self.chip.memory_bytes * self.usable_fraction))

    def with_rank_counts(self, *, nodes: int, ranks_per_node: int) -> "Hardware":
        """Returns a copy with other numbers of nodes and ranks. Raises SpecError beyond MOST_RANKS ranks."""
        if nodes * ranks_per_node > MOST_RANKS:
            raise SpecError(
                "the machine has too many ranks.",
                got=f"{nodes:,} nodes of {ranks_per_node:,}",
                fix=f"at most {MOST_RANKS:,}",
            )
        return self.model_copy(update={"nodes": nodes, "ranks_per_node": ranks_per_node})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a complete hardware.toml, as `save` writes it. Raises SpecError for any other file.

        `hardware_on` also accepts a file without the figures that are in the catalog.
        """
        return cls.parse(read_toml(Path(path), fix=CALIBRATE), source=str(path))

    def save(self, path: str | Path) -> None:
        """Writes a hardware.toml with comments, which `load` reads back. Raises SpecError if it cannot."""
        sections = (Chip, Rates, Link, CollectiveRate, Hardware)
        notes = dict(note for section in sections for note in field_descriptions(section).items())
        notes.pop("source")
        data = self.model_dump(mode="json", exclude_none=True)
        text = toml_text(data, head=_FILE_HEAD, comment=lambda keys: notes.get(keys[-1]))
        with convert_write_errors(Path(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_file_atomically(Path(path), text)
