"""Time and memory of forward and backward with logits in chunks, beside whole logits. On one CPU process.

    python bench/chunked_loss.py [--rounds 15] [--rows 256] [--dtypes float32 bfloat16]

Both ways run in turn in each round; a ratio is of the two runs of a round.
"""

import argparse
import statistics
import time

import torch

from fullshard.models.chunked_loss import chunked_cross_entropy
from fullshard.models.decoder import DecoderModel
from fullshard.profiler.memory import measure_peak_memory
from fullshard.quantities import format_bytes
from fullshard.sharding.materialize import materialize
from fullshard.spec.model_section import DecoderConfig

LENGTH = 1024


def run(model: DecoderModel, batch: torch.Tensor, *, rows: int) -> float:
    """Returns seconds of one forward and backward."""
    model.zero_grad()
    started = time.perf_counter()
    total, _ = chunked_cross_entropy(model, lambda: model(batch), labels=batch, chunk_rows=rows)
    (total / batch.numel()).backward()
    return time.perf_counter() - started


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
            ratios = list[float]()
            for index in range(asked.rounds):
                order = (0, asked.rows) if index % 2 else (asked.rows, 0)
                found = {rows: run(model, batch, rows=rows) for rows in order}
                ratios.append(found[asked.rows] / found[0])
            low, *_, high = statistics.quantiles(ratios, n=10)
            whole, chunked = (format_bytes(one) for one in peaks)
            print(
                f"{dtype}, {'tied' if tied else 'untied'}: {statistics.median(ratios):.3f} of whole logits' "
                f"time (10 to 90 %: {low:.3f} to {high:.3f}); peak {chunked} instead of {whole}"
            )


if __name__ == "__main__":
    main()
