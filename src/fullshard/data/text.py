"""TextData: bytes as tokens, packed into full sequences and divided among ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from fullshard.data.batches import IGNORED_LABEL, rank_samples
from fullshard.data.documents import stdlib_documents, text_documents
from fullshard.data.order import sample_windows
from fullshard.data.split import hold_out, pack, shuffle
from fullshard.data.tokenizer import BYTES, ByteTokenizer
from fullshard.errors import DataError, SpecError
from fullshard.quantities import format_count
from fullshard.spec.model_section import DecoderConfig
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

_HISTOGRAM_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class TextData:
    """Text in memory, one byte per token, with one copy per rank.

    It is cut into windows of S + 1 bytes that start S bytes apart. The first S bytes are the tokens and the
    last S the labels. An epoch therefore has every byte except the first as a label once, and drops a tail
    shorter than a window. It is immutable: the samples of a step are a function of the seed and the step (see
    `order.py`).
    """

    source: str
    documents: int
    sequence_length: int
    seed: int
    training: NDArray[np.uint8] = field(repr=False)
    held_out: NDArray[np.uint8] = field(repr=False)

    @property
    def vocabulary(self) -> int:
        """Vocabulary size: the number of byte values."""
        return BYTES

    @property
    def train_tokens(self) -> int:
        """Number of tokens that an epoch trains on."""
        return len(self._windows(self.training)) * self.sequence_length

    @property
    def validation_tokens(self) -> int:
        """Number of held-out tokens, in full sequences."""
        return len(self._windows(self.held_out)) * self.sequence_length

    @property
    def byte_entropy(self) -> float:
        """-sum(p log p) over the byte frequencies p of the training part, in nats per byte.

        This is the loss of a model that knows only the frequency of each byte.
        """
        return self._byte_entropy

    @cached_property
    def _byte_entropy(self) -> float:
        counts = np.zeros(BYTES, dtype=np.int64)
        # Counts block by block, since bincount makes an eightfold copy of its input.
        for start in range(0, len(self.training), _HISTOGRAM_BLOCK):
            counts += np.bincount(self.training[start : start + _HISTOGRAM_BLOCK], minlength=BYTES)
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        """Yields this rank's `plan.accumulation` microbatches of step `step` (from 0).

        A microbatch holds `tokens` and `labels`, int64 (plan.microbatch, sequence_length) on the CPU, pinned
        if the plan is for CUDA. Over all ranks the rows are samples [step * G, (step + 1) * G) of the stream,
        where G is the global batch, for any number of ranks and any microbatch.
        """
        windows = self._windows(self.training)
        for accumulated in range(plan.accumulation):
            samples = rank_samples(step * plan.accumulation + accumulated, rank=rank, plan=plan)
            chosen = sample_windows(samples, windows=len(windows), seed=self.seed)
            yield _batch(windows[chosen], real_rows=plan.microbatch, plan=plan)

    def validation(self, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        """Yields this rank's share of at most `train.validate_sequences` held-out sequences.

        The sequences are spread evenly over the held-out text, and are the same for any number of ranks.
        Batches are shaped as in `microbatches`, and every rank yields the same number. Rows beyond the end
        have IGNORED_LABEL for all labels. Yields nothing if no text is held out.
        """
        windows = self._windows(self.held_out)
        count = min(plan.run.train.validate_sequences, len(windows))
        for turn in range(-(-count // (plan.world_size * plan.microbatch))):
            sequences = rank_samples(turn, rank=rank, plan=plan)
            chosen = np.minimum(sequences, count - 1) * len(windows) // count
            yield _batch(windows[chosen], real_rows=int((sequences < count).sum()), plan=plan)

    def summary(self) -> dict[str, object]:
        """Returns the figures that `fullshard data prepare` prints."""
        length = self.sequence_length
        return {
            "source": self.source,
            "documents": self.documents,
            "records left out": 0,
            "skip_messages": list[str](),
            "training tokens": self.train_tokens,
            "training sequences": self.train_tokens // length,
            "packing": "concat",
            "efficiency": 1.0,
            "validation tokens": self.validation_tokens,
            "validation sequences": self.validation_tokens // length,
            "sequence length": length,
            "vocabulary": self.vocabulary,
            "shares": [1.0],
        }

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of `text`."""
        return list(text.encode())

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """See `ByteTokenizer.decode`."""
        return ByteTokenizer().decode(tokens.tolist() if isinstance(tokens, Tensor) else tokens)

    def describe(self) -> str:
        """Returns a one-line description: source, documents, tokens, entropy."""
        trained = format_count(self.train_tokens)
        held_out = format_count(self.validation_tokens) if len(self.held_out) else "none"
        return (
            f"{self.source}: {self.documents} documents, {trained} tokens to train on, {held_out} held out; "
            f"sequences of {self.sequence_length}, {self.byte_entropy:.3f} nats/byte by frequency"
        )

    def _windows(self, text: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns a view (windows, sequence_length + 1) in which neighbours share one byte."""
        if len(text) <= self.sequence_length:
            return np.empty((0, self.sequence_length + 1), dtype=np.uint8)
        return sliding_window_view(text, self.sequence_length + 1)[:: self.sequence_length]


def text_data(run: Run) -> TextData:
    """Finds, splits and reads the text that `run.data` names.

    Raises SpecError if the model's vocabulary is too small for bytes. Raises DataError for data that is
    absent, unreadable, binary, or too short for one sequence in each part.
    """
    if isinstance(run.model, DecoderConfig) and run.model.vocabulary < BYTES:
        raise SpecError(
            "the model's vocabulary is too small for bytes.",
            got=f"model.vocabulary = {run.model.vocabulary}",
            why="every byte of the text is a token",
            fix=f"model.vocabulary = {BYTES}",
        )
    documents = stdlib_documents() if run.data.source == "stdlib" else text_documents(run.data.paths)
    training, held_out = hold_out(documents, fraction=run.data.validation_fraction)
    # The lengths are known before any file is read, and include the separators.
    _check_lengths(
        run,
        training=sum(document.size + 1 for document in training) - 1,
        held_out=sum(document.size + 1 for document in held_out) - 1,
    )
    return TextData(
        source=run.data.source,
        documents=len(documents),
        sequence_length=run.data.sequence_length,
        seed=run.run.seed,
        training=pack(shuffle(training, seed=run.run.seed)),
        held_out=pack(held_out),
    )


def _check_lengths(run: Run, *, training: int, held_out: int) -> None:
    needed = run.data.sequence_length + 1
    parts = {"training": training}
    if run.data.validation_fraction > 0:
        parts["held-out"] = held_out
    for part, length in parts.items():
        if length >= needed:
            continue
        shorter = f"data.sequence_length of {length - 1} or less" if length > 1 else ""
        larger = "a larger data.validation_fraction, or 0 for no validation" if part == "held-out" else ""
        raise DataError(
            f"sequence too long: the {part} part of the data does not fill one.",
            got=f"{max(length, 0)} bytes, data.validation_fraction = {run.data.validation_fraction}",
            why=f"data.sequence_length = {run.data.sequence_length} needs {needed}: itself and one label",
            fix="; ".join(["more text", *filter(None, (shorter, larger))]),
        )


def _batch(windows: NDArray[np.uint8], *, real_rows: int, plan: Plan) -> dict[str, Tensor]:
    """Splits windows (rows, S + 1) into tokens and labels (rows, S).

    The loss ignores rows from `real_rows` on.
    """
    numbers = torch.from_numpy(windows).long()
    tokens, labels = numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()
    labels[real_rows:] = IGNORED_LABEL
    if plan.device == "cuda":
        tokens, labels = tokens.pin_memory(), labels.pin_memory()
    return {"tokens": tokens, "labels": labels}
