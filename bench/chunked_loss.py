"""Time and memory of a step with logits in chunks, beside whole logits. On one CPU process.

    python bench/chunked_loss.py [--rounds 15] [--rows 256] [--dtypes float32 bfloat16]

Both ways run in turn in each round; a ratio is of the two runs of a round: of their forward and backward, and
of the whole step with the update of fused AdamW.
"""

import argparse
import statistics
import time

import torch

from fullshard.models.chunked_loss import chunked_cross_entropy
from fullshard.models.decoder import DecoderModel
from fullshard.observe.memory import measure_peak_memory
from fullshard.parallel.materialize import materialize
from fullshard.quantities import format_bytes
from fullshard.spec.settings.model_section import DecoderConfig

LENGTH = 1024


def run(
    model: DecoderModel, batch: torch.Tensor, *, rows: int, optimizer: torch.optim.Optimizer | None = None
) -> tuple[float, float]:
    """Returns seconds of (one forward and backward, the same with the optimizer's update if there is one)."""
    model.zero_grad()
    started = time.perf_counter()
    total, _ = chunked_cross_entropy(model, lambda: model(batch), labels=batch, chunk_rows=rows)
    (total / batch.numel()).backward()
    computed = time.perf_counter()
    if optimizer is not None:
        optimizer.step()
    return computed - started, time.perf_counter() - started


def peak_bytes(model: DecoderModel, batch: torch.Tensor, *, rows: int) -> int:
    """Returns peak bytes of one forward and backward, gradients included."""
    model.zero_grad()
    with measure_peak_memory(torch.device("cpu")) as peak:
        run(model, batch, rows=rows)
    return peak.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="bfloat16 is slow on many CPUs")
    asked = parser.parse_args()
    for dtype in (getattr(torch, name) for name in asked.dtypes):
        for tied in (False, True):
            sizes = DecoderConfig(
                d_model=256, layers=4, heads=4, kv_heads=4, d_ff=768, vocabulary=32_000, max_sequence=LENGTH
            )
            model = materialize(DecoderModel(sizes.model_copy(update={"tied": tied})), seed=0).to(dtype)
            batch = torch.randint(0, sizes.vocabulary, (1, LENGTH))
            peaks = [peak_bytes(model, batch, rows=rows) for rows in (0, asked.rows)]  # also warms up
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            ratios = list[tuple[float, float]]()
            for index in range(asked.rounds):
                order = (0, asked.rows) if index % 2 else (asked.rows, 0)
                found = {rows: run(model, batch, rows=rows, optimizer=optimizer) for rows in order}
                chunked, whole = found[asked.rows], found[0]
                ratios.append((chunked[0] / whole[0], chunked[1] / whole[1]))
            whole, chunked = (format_bytes(one) for one in peaks)
            print(f"{dtype}, {'tied' if tied else 'untied'}: peak {chunked} instead of {whole}")
            for part, own in zip(("forward and backward", "step"), zip(*ratios, strict=True), strict=True):
                low, *_, high = statistics.quantiles(own, n=10)
                median = statistics.median(own)
                print(f"  {part}: {median:.3f} of whole logits' time (10 to 90 %: {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
