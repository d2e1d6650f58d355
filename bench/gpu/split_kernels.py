"""Rates of the kernels of divided models: tensor parallelism, experts, attention over long sequences.

What one rank of 2, 4 or 8 computes is measured on one GPU. What the ranks exchange is not.
"""

import torch

from bench.gpu.kernels import ATTENTION, HEAD_DIM, MATMULS, KernelBench, start_kernel_bench
from bench.gpu.record import Record
from fullshard.distributed.sequence_parts import SequencePart, flatten_document_ends_to_bounds
from fullshard.models.document_attention import QueryKeyValue, attend_within_documents
from fullshard.spec.machine.hardware import Hardware

RANKS = (2, 4, 8)
# Matmuls that tensor parallelism divides along their output channels; it divides the others along the input.
COLUMNS = ("q, o", "k, v", "gate, up")
# (experts, of these for each token, width of the model, width of an expert)
MIXTURES = {"Mixtral-8x7B": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768)}


def measure_tensor_parallel(record: Record, hardware: Hardware, *, device: torch.device) -> None:
    """Records FLOP/s of the matmuls and the attention that one rank of 2, 4 and 8 computes."""
    bench = start_kernel_bench(record, hardware, device=device)
    tokens, shrink = (8192, 1) if bench.on_cuda else (64, 128)
    for ranks in RANKS:
        for name, (out, into) in MATMULS.items():
            kind = name.partition(" ")[2]
            shapes = {"": (out // ranks, into)} if kind in (*COLUMNS, "head") else {"": (out, into // ranks)}
            if kind == "q, o":  # q is divided along its output channels, o along its input channels
                shapes = {" as q": (out // ranks, into), " as o": (out, into // ranks)}
            for which, sizes in shapes.items():
                own, inner = (max(16, size // shrink) for size in sizes)
                bench.time_matmuls(f"{name}{which}, rank of {ranks}", tokens=tokens, out=own, into=inner)
        for name, (queries, keys) in ATTENTION.items():
            heads = (queries // ranks, max(1, keys // ranks))
            title = f"{name} attention × {tokens:,}, rank of {ranks}"
            bench.time_attention(title, heads=heads, length=tokens, masked=False)


def measure_grouped_matmuls(record: Record, hardware: Hardware, *, device: torch.device) -> None:
    """Records FLOP/s of the three grouped matmuls of experts that all have equally many tokens."""
    bench = start_kernel_bench(record, hardware, device=device)
    shrink = 1 if bench.on_cuda else 64
    for name, (experts, chosen, *widths) in MIXTURES.items():
        into, out = (max(16, width // shrink) for width in widths)
        for tokens in (8192, 16384) if bench.on_cuda else (1024,):
            rows = tokens * chosen
            x, g = (bench.meter.random_tensor(rows, n, dtype=torch.bfloat16) for n in (into, out))
            w = bench.meter.random_tensor(experts, into, out, dtype=torch.bfloat16)
            ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)

            def three_matmuls(
                x: torch.Tensor = x, g: torch.Tensor = g, w: torch.Tensor = w, ends: torch.Tensor = ends
            ) -> None:
                torch._grouped_mm(x, w, offs=ends)  # pyright: ignore[reportPrivateUsage]
                torch._grouped_mm(g, w.transpose(1, 2), offs=ends)  # pyright: ignore[reportPrivateUsage]
                torch._grouped_mm(x.t(), g, offs=ends)  # pyright: ignore[reportPrivateUsage]

            title = f"{name}, {experts} experts × {rows // experts:,} rows"
            flops = 2 * rows * into * out
            bench.add_rate(title, three_matmuls, flops, hardware.rates.matmul, calls=3)


def measure_context_parallel(record: Record, hardware: Hardware, *, device: torch.device) -> None:
    """Records FLOP/s of attention over 131,072 tokens that one rank of 2, 4 and 8 computes, by method."""
    bench = start_kernel_bench(record, hardware, device=device)
    length = 131_072 if bench.on_cuda else 128
    queries, keys = ATTENTION["8b"]
    for ranks in RANKS:
        heads = (queries // ranks, max(1, keys // ranks))
        bench.time_attention(f"ulysses, rank of {ranks}", heads=heads, length=length, masked=False)
    for ranks in RANKS:
        _time_gather(bench, ranks, length=length)


def _time_gather(bench: KernelBench, ranks: int, *, length: int) -> None:
    """Times the attention of one rank's two pieces to the gathered keys; all ranks have as many pairs."""
    queries, keys = ATTENTION["8b"]
    shapes = ((queries, length // ranks), (keys, length), (keys, length))
    needed = [
        bench.meter.random_tensor(1, heads, n, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
        for heads, n in shapes
    ]
    ends = torch.tensor([[length]], device=bench.meter.device, dtype=torch.int32)
    bounds = flatten_document_ends_to_bounds(ends, sequence_length=length)
    begins = SequencePart(ranks, 0).begins(length)

    def forward() -> torch.Tensor:
        return attend_within_documents(QueryKeyValue(*needed), bounds, begins=begins)

    out = forward()
    gradient = torch.ones_like(out)
    flops = 4 * HEAD_DIM * queries * length * (length + 1) / 2 / ranks
    name, rates = f"gather, rank of {ranks}", bench.hardware.rates
    with torch.no_grad():
        bench.add_rate(f"{name}, forward", forward, flops, rates.attention)
    backward = lambda: torch.autograd.grad(out, needed, gradient, retain_graph=True)  # noqa: E731
    bench.add_rate(f"{name}, backward", backward, 2.5 * flops, rates.attention_backward)
