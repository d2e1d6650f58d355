"""Time and memory of forward and backward of packed documents, beside a square mask. On one CPU process.

    python bench/documents.py [--rounds 9] [--dtypes float32 bfloat16]

Both ways run in turn in each round; a ratio is of the two runs of a round.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

from fullshard.models.decoder import DecoderModel
from fullshard.profiler.memory import measure_peak_memory
from fullshard.quantities import format_bytes
from fullshard.sharding.materialize import materialize
from fullshard.spec.model_section import DecoderConfig
from fullshard.training.loss import next_token_loss

CASES = ((8, 64, 20), (4, 256, 60), (1, 1024, 150), (1, 1024, 1024), (1, 4096, 400))
"""(microbatch, sequence length, mean tokens of a document)."""


def packed_batch(rows: int, length: int, *, mean: int) -> dict[str, Tensor]:
    """Returns a microbatch of documents of mean / 2 to 3 * mean / 2 tokens, in the form of the loader's."""
    random = torch.Generator().manual_seed(0)
    ends: list[list[int]] = []
    for _ in range(rows):
        row = [0]
        while row[-1] < length:
            own = int(torch.randint(mean // 2, 3 * mean // 2 + 1, (1,), generator=random))
            row.append(min(row[-1] + (length if mean >= length else own), length))
        ends.append(row[1:])
    entries = 1 << (max(map(len, ends)) - 1).bit_length()
    found = torch.tensor([row + [length] * (entries - len(row)) for row in ends], dtype=torch.int32)
    index = torch.arange(length)
    documents = (index[None, :, None] >= found[:, None, :]).sum(-1)
    begins = torch.nn.functional.pad(found, (1, 0))[:, :-1].gather(1, documents)
    tokens = torch.randint(0, 256, (rows, length), generator=random)
    positions = index - begins
    return dict(tokens=tokens, labels=tokens, positions=positions, documents=documents, document_ends=found)


def run(model: DecoderModel, batch: dict[str, Tensor]) -> float:
    """Returns seconds of one forward and backward."""
    model.zero_grad()
    started = time.perf_counter()
    next_token_loss(model, batch)[0].backward()
    return time.perf_counter() - started


def peak_bytes(model: DecoderModel, batch: dict[str, Tensor]) -> int:
    """Returns peak bytes of one forward and backward, gradients included."""
    model.zero_grad()
    with measure_peak_memory(torch.device("cpu")) as peak:
        run(model, batch)
    return peak.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="bfloat16 is slow on many CPUs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (getattr(torch, name) for name in asked.dtypes):
        for rows, length, mean in CASES:
            sizes = DecoderConfig(
                d_model=256, layers=2, heads=4, kv_heads=2, d_ff=768, vocabulary=256, max_sequence=length
            )
            model = materialize(DecoderModel(sizes), seed=0).to(dtype)
            batch = packed_batch(rows, length, mean=mean)
            masked = {name: one for name, one in batch.items() if name != "document_ends"}
            peaks = [peak_bytes(model, one) for one in (batch, masked)]  # also warms up
            ratios = list[float]()
            for index in range(asked.rounds):
                order = (batch, masked) if index % 2 else (masked, batch)
                found = {len(one): run(model, one) for one in order}
                ratios.append(found[len(batch)] / found[len(masked)])
            low, *_, high = statistics.quantiles(ratios, n=10)
            own, square = (format_bytes(one) for one in peaks)
            ratio, case = statistics.median(ratios), f"{rows} × {length:,} tokens, documents of {mean:,}"
            print(
                f"{dtype}, {case}: {ratio:.3f} of the mask's time (10 to 90 %: {low:.3f} to {high:.3f}); "
                f"peak {own} instead of {square}",
                flush=True,
            )


if __name__ == "__main__":
    main()
