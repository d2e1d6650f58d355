"""Which kernels run on this machine, and how fast: attention with and without a mask, and matmuls."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu.record import Figures, Record
from fullshard.distributed.sequence_parts import flatten_document_ends_to_bounds
from fullshard.jobs.calibrate.device import RateMeter
from fullshard.models.document_attention import QueryKeyValue, attend_within_documents
from fullshard.spec.machine.hardware import ComputeDtype, Curve, Hardware, interpolate_rate

# (output channels, input channels) of linear layers.
MATMULS = {
    "3b q, o": (2048, 2048),
    "3b k, v": (512, 2048),
    "3b gate, up": (11008, 2048),
    "3b down": (2048, 11008),
    "3b head": (128256, 2048),
    "8b q, o": (4096, 4096),
    "8b gate, up": (14336, 4096),
    "8b down": (4096, 14336),
}
ATTENTION = {"3b": (16, 4), "8b": (32, 8)}  # heads of queries, and of keys and values
HEAD_DIM = 128


@dataclass(frozen=True)
class KernelBench:
    """Times kernels on one device, and records them beside the planner's rates of `hardware`.

    seconds: approximate duration of one measurement
    """

    record: Record
    meter: RateMeter
    hardware: Hardware
    seconds: float

    @property
    def on_cuda(self) -> bool:
        return self.meter.kind == "cuda"

    def time_attention(self, name: str, *, heads: tuple[int, int], length: int, masked: bool) -> None:
        """Records what `_time_attention` measures, or why this chip or release of torch cannot compute it."""
        try:
            self._time_attention(name, heads=heads, length=length, masked=masked)
        except RuntimeError as error:  # also if memory is too small for whole scores
            self.record.details[name] = str(error).splitlines()[0]
            self.record.save()

    def _time_attention(self, name: str, *, heads: tuple[int, int], length: int, masked: bool) -> None:
        """Records the FLOP/s of a forward and of a backward over the computed pairs of positions.

        4 · head size FLOP per pair and head in forward, and 10 in backward. With a mask, documents of a
        quarter of the length; the pairs of the causal triangle count.
        """
        queries, keys = heads
        shapes = [(1, count, length, HEAD_DIM) for count in (queries, keys, keys, queries)]
        q, k, v, gradient = (self.meter.random_tensor(*shape, dtype=torch.bfloat16) for shape in shapes)
        needed = [one.requires_grad_() for one in (q, k, v)]
        document = torch.arange(length, device=self.meter.device) // max(1, length // 4)
        mask = (document[:, None] == document).tril() if masked else None

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True
            )

        out = forward()
        backward = lambda: torch.autograd.grad(out, needed, gradient, retain_graph=True)  # noqa: E731
        flops = 4 * HEAD_DIM * queries * length * (length + 1) / 2
        rates = self.hardware.rates
        with torch.no_grad():
            self.add_rate(f"{name}, forward", forward, flops, rates.attention)
        self.add_rate(f"{name}, backward", backward, 2.5 * flops, rates.attention_backward)
        self._add_names(name, lambda: torch.autograd.grad(forward(), needed, gradient))

    def time_documents(self, name: str, *, heads: tuple[int, int], length: int, documents: int) -> None:
        """Records the FLOP/s of attention within documents of equal lengths, whose own pairs count."""
        queries, keys = heads
        needed = [
            self.meter.random_tensor(1, count, length, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
            for count in (queries, keys, keys)
        ]
        each = length // documents
        ends = torch.arange(each, length + 1, each, device=self.meter.device, dtype=torch.int32)[None]
        bounds = flatten_document_ends_to_bounds(ends, sequence_length=length)

        def forward() -> torch.Tensor:
            return attend_within_documents(QueryKeyValue(*needed), bounds)

        out = forward()
        gradient = torch.ones_like(out)
        flops = 4 * HEAD_DIM * queries * documents * each * (each + 1) / 2
        with torch.no_grad():
            self.add_rate(f"{name}, forward", forward, flops, self.hardware.rates.attention)
        backward = lambda: torch.autograd.grad(out, needed, gradient, retain_graph=True)  # noqa: E731
        self.add_rate(f"{name}, backward", backward, 2.5 * flops, self.hardware.rates.attention_backward)
        self._add_names(name, lambda: torch.autograd.grad(forward(), needed, gradient))

    def time_matmuls(self, name: str, *, tokens: int, out: int, into: int) -> None:
        """Records the mean FLOP/s of a linear layer's three matmuls in bf16, and of its forward in fp8."""
        shapes = ((tokens, into), (out, into), (tokens, out))
        x, w, g = (self.meter.random_tensor(*shape, dtype=torch.bfloat16) for shape in shapes)

        def three_matmuls() -> None:
            torch.mm(x, w.t())
            torch.mm(g, w)
            torch.mm(g.t(), x)

        flops = 2 * tokens * out * into
        self.add_rate(name, three_matmuls, flops, self.hardware.rates.matmul, calls=3)
        if not self.on_cuda or not hasattr(torch, "float8_e4m3fn"):
            return
        x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        scales = {"tensorwise": (torch.ones((), device=x.device),) * 2}
        scales["rowwise"] = (torch.ones(tokens, 1, device=x.device), torch.ones(1, out, device=x.device))
        for kind, (a, b) in scales.items():

            def scaled(a: torch.Tensor = a, b: torch.Tensor = b) -> object:
                return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage]
                    x8, w8.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16
                )

            try:
                self.add_rate(f"{name}, fp8 {kind}", scaled, flops)
            except RuntimeError as error:  # this chip or release of torch has no such matmul
                self.record.details[f"fp8 {kind}"] = str(error).splitlines()[0]

    def add_rate(
        self,
        name: str,
        work: Callable[[], object],
        flops: float,
        rates: Mapping[ComputeDtype, Curve] | None = None,
        *,
        calls: int = 1,
    ) -> None:
        """Records a rate. flops: of one launch; calls: launches of one call of `work`."""
        predicted: Figures = {}
        if rates is not None and "bf16" in rates:
            predicted["flops_per_second"] = interpolate_rate(rates["bf16"], flops)
        rate = calls * flops * self.meter.measure_calls_per_second(work, seconds=self.seconds)
        self.record.add_row(name, predicted=predicted, measured={"flops_per_second": rate})

    def _add_names(self, name: str, work: Callable[[], object]) -> None:
        if not self.on_cuda:
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        kernels = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
        self.record.details[f"kernels: {name}"] = [one.key[:90] for one in kernels[:4]]
        self.record.save()


def start_kernel_bench(record: Record, hardware: Hardware, *, device: torch.device) -> KernelBench:
    """Records the versions, and returns the bench of the device."""
    record.details |= describe_environment(device)
    record.save()
    return KernelBench(record, RateMeter(device), hardware, seconds=0.3 if device.type == "cuda" else 0.01)


def measure_kernels(record: Record, hardware: Hardware, *, device: torch.device) -> None:
    """Records FLOP/s of attention and matmuls beside the planner's, the kernels' names, and the versions."""
    bench = start_kernel_bench(record, hardware, device=device)
    on_cuda = bench.on_cuda
    length = 8192 if on_cuda else 64
    for name, heads in ATTENTION.items():
        for masked in (False, True):
            title = f"{name} attention × {length:,}{', mask' if masked else ''}"
            bench.time_attention(title, heads=heads, length=length, masked=masked)
        for count in (1, 4):
            title = f"{name} attention × {length:,}, {count} document{'s' if count > 1 else ''}"
            bench.time_documents(title, heads=heads, length=length, documents=count)
    shrink = 1 if on_cuda else 128
    for tokens in (length, 2 * length):
        for name, sizes in MATMULS.items():
            out, into = (max(16, size // shrink) for size in sizes)
            bench.time_matmuls(f"{name} × {tokens:,}", tokens=tokens, out=out, into=into)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Returns versions and variables that decide which kernels run."""
    found = {"torch": torch.__version__, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    if device.type != "cuda":
        return found
    name, cudnn = torch.cuda.get_device_name(device), torch.backends.cudnn.version()
    return found | {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn}
