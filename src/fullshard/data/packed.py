"""PackedData: rows of tokens from memory maps, in an order that depends only on the seed and the step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fullshard.data.batches import microbatch_sample_numbers
from fullshard.data.packing import GAP, NO_LABEL, Int64, Piece, Rows, SourceInterleaving, shuffled_rows_at
from fullshard.data.token_store import TokenStore, TokenStream, cache_key
from fullshard.data.tokenizer import Tokenizer
from fullshard.quantities import format_count
from fullshard.spec.plan import Plan
from fullshard.spec.settings.data_section import IGNORED_LABEL
from fullshard.system.terminal import escape_to_single_line

_MOSTLY_PADDING = "more than half of the token positions are padding; try a shorter data.sequence_length"
_UNLABELLED = "pairs left out: an answer has no label in its half; try a longer data.sequence_length"
_RowPieces = tuple[TokenStream, Iterator[Piece]]


@dataclass(frozen=True, eq=False)
class ShufflePool:
    """Rows of one stream that are shuffled together.

    Each epoch takes every training row once, in an order that depends on `seed` and the epoch.

    stream: the stores of the training data, then those of the validation data that the user names
    validation_store_count: number of stores at the end of `stream` that the user names as validation data
    """

    stream: TokenStream
    training: Rows
    held_out: Rows
    seed: int | str
    validation_store_count: int = 0

    @property
    def training_stores(self) -> Sequence[TokenStore]:
        """Stores of the training data, a fraction of which may be held out."""
        return self.stream.stores[: len(self.stream.stores) - self.validation_store_count]

    @property
    def validation_stores(self) -> Sequence[TokenStore]:
        """Stores of the validation data that the user names."""
        return self.stream.stores[len(self.stream.stores) - self.validation_store_count :]


@dataclass(frozen=True, eq=False)
class PackedData:
    """The data of a run whose source is not `python`: rows of tokens from `pools`, mixed by `pattern`.

    pools: sources that are shuffled separately
    pattern: order in which samples are taken from the pools
    sequence_length: tokens per row
    document_mask: whether batches contain document numbers and positions
    packing: name of the packing method
    tokenizer: the tokenizer whose vocabulary the tokens have; None if another program made them
    has_pairs: whether each row is a pair: two documents, one in each half
    """

    pools: tuple[ShufflePool, ...]
    pattern: SourceInterleaving
    sequence_length: int
    document_mask: bool
    packing: str
    tokenizer: Tokenizer | None
    has_pairs: bool = False

    takes_any_row: ClassVar[bool] = True

    @cached_property
    def row_order(self) -> str:
        """Digest of everything that determines which tokens sample i has."""
        pools = [
            [pool.seed, pool.training.row_count, pool.training.token_count]
            + [store.content_key for store in pool.training_stores]
            for pool in self.pools
        ]
        facts = {"sequence_length": self.sequence_length, "packing": self.packing, "pools": pools}
        return cache_key({**facts, "shares": self.pattern.counts.tolist()})

    @cached_property
    def validation_digest(self) -> str | None:
        """Digest of the validation data that the user names; None if a fraction or nothing is held out."""
        keys = [store.content_key for pool in self.pools for store in pool.validation_stores]
        return cache_key({"stores": keys}) if keys else None

    @property
    def token_stores(self) -> list[TokenStore]:
        return [store for pool in self.pools for store in pool.stream.stores]

    @property
    def vocabulary(self) -> int:
        """Vocabulary size: the largest of the tokenizer's and the stores'."""
        known = self.tokenizer.vocabulary_size if self.tokenizer is not None else 0
        return max(known, *(store.vocabulary_size for store in self.token_stores))

    @property
    def document_count(self) -> int:
        """Number of documents, or of pairs if rows are pairs, training and held out."""
        return sum(store.document_count for store in self.token_stores) // (1 + self.has_pairs)

    @property
    def overlong_masked_document_count(self) -> int:
        """Number of documents, or pairs, that are cut, in stores with untrained tokens, such as prompts."""
        each = 1 + self.has_pairs
        longest = self.sequence_length // each + 1  # the last token is a label alone
        masked = [store for store in self.token_stores if store.loss_mask is not None]
        cut = [(store.ends - store.begins > longest).reshape(-1, each).any(1) for store in masked]
        return sum(map(np.count_nonzero, cut))

    @property
    def training_sequences(self) -> int:
        return sum(pool.training.row_count for pool in self.pools)

    @property
    def training_token_count(self) -> int:
        """Number of training tokens in all pools, each counted once, excluding padding."""
        return sum(pool.training.token_count for pool in self.pools)

    @property
    def validation_tokens(self) -> int:
        """Number of held-out tokens, excluding padding."""
        return sum(pool.held_out.token_count for pool in self.pools)

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        """Returns the `plan.accumulation` microbatches of data rank `rank` for step `step` (from 0).

        A microbatch holds int64 tensors (plan.microbatch, sequence_length) on the CPU, pinned if the plan is
        for CUDA:

        tokens: the input tokens
        labels: the next tokens; IGNORED_LABEL for labels that are left out of the loss
        documents: number of the document within the row; padding has the next number after the last document
        positions: position within the document or the padding, from 0
        document_ends: int32 (plan.microbatch, documents): where each document and the padding end in the row;
            further entries are sequence_length. The number of entries is a power of two.

        The last three are present only with `document_mask`. The rows of all ranks together are samples [step
        * G, (step + 1) * G), where G is the global batch, for any number of ranks and any microbatch size.
        """
        rows_per_step = plan.accumulation * plan.data_parallel_degree * plan.microbatch
        return self.microbatches_at_row(step * rows_per_step, rank=rank, plan=plan)

    def microbatches_at_row(self, row: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        """Yields the microbatches of the step whose first sample is `row`, see `microbatches`."""
        for turn in range(plan.accumulation):
            samples = row + microbatch_sample_numbers(turn, data_rank=rank, plan=plan)
            sources, rows = self.pattern.locate_samples(samples)
            for source in np.unique(sources).tolist():
                pool, own = self.pools[source], sources == source
                rows[own] = shuffled_rows_at(rows[own], rows=pool.training.row_count, seed=pool.seed)
            pools = [self.pools[source] for source in sources.tolist()]
            chosen = zip(pools, rows.tolist(), strict=True)
            pieces = [(pool.stream, pool.training.iterate_row_pieces(row)) for pool, row in chosen]
            yield _build_batch(self, pieces, plan=plan)

    def validation(self, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        """Yields a data rank's share of at most `train.validate_sequences` held-out rows (0: of all).

        The rows are spread evenly over each pool, and each pool contributes in proportion to its weight.
        Batches are shaped as in `microbatches`, and every rank yields the same number. Rows that only fill up
        a batch have IGNORED_LABEL for all labels. The rows are the same for any number of ranks. Yields
        nothing if no rows are held out.
        """
        found = _evenly_spaced_held_out_rows(self, plan.run.train.validate_sequences)
        for turn in range(-(-len(found) // (plan.data_parallel_degree * plan.microbatch))):
            numbers = microbatch_sample_numbers(turn, data_rank=rank, plan=plan).tolist()
            chosen = [found[min(number, len(found) - 1)] for number in numbers]
            pieces = [(pool.stream, pool.held_out.iterate_row_pieces(row)) for pool, row in chosen]
            batch = _build_batch(self, pieces, plan=plan)
            batch["labels"][sum(number < len(found) for number in numbers) :] = IGNORED_LABEL
            yield batch

    def summary_values(self) -> dict[str, Any]:
        """Returns the figures that `fullshard data prepare` prints.

        efficiency: fraction of the places in training rows that hold a token; the others are padding
        """
        held_out = sum(pool.held_out.row_count for pool in self.pools)
        unlabelled = self.document_count - self.training_sequences - held_out if self.has_pairs else 0
        efficiency = self.training_token_count / (self.sequence_length * self.training_sequences)
        return {
            "source": " + ".join(store.name for pool in self.pools for store in pool.training_stores),
            "validation source": " + ".join(
                store.name for pool in self.pools for store in pool.validation_stores
            ),
            "unit": "pairs" if self.has_pairs else "documents",
            "documents": self.document_count,
            "documents cut": self.overlong_masked_document_count,
            "records left out": sum(store.notes.skipped for store in self.token_stores),
            "skip_messages": [text for store in self.token_stores for text in store.notes.skip_messages],
            "warnings": [
                *(warning for store in self.token_stores for warning in store.warnings),
                *self.pattern.rounded_share_messages(),
                *([_MOSTLY_PADDING] if efficiency < 0.5 else []),
                *([f"{unlabelled:,} {_UNLABELLED}"] if unlabelled else []),
            ],
            "training tokens": self.training_token_count,
            "training sequences": self.training_sequences,
            "packing": self.packing,
            "efficiency": efficiency,
            "validation tokens": self.validation_tokens,
            "validation sequences": held_out,
            "sequence length": self.sequence_length,
            "vocabulary": self.vocabulary,
            "shares": self.pattern.source_shares,
        }

    def describe(self) -> str:
        """Returns a line about the data, one with an example of records left out if any are, and warnings."""
        facts = self.summary_values()
        held_out = format_count(self.validation_tokens) if self.validation_tokens else "none"
        held_out += f" of {facts['validation source']}" if facts["validation source"] else ""
        return (
            f"{facts['source']}: {document_counts_text(facts, unit=' ' + facts['unit'] + ' in all')}, "
            f"{format_count(self.training_token_count)} tokens to train on, {held_out} held out; "
            f"sequences of {self.sequence_length}, {self.packing}, "
            f"{100 * facts['efficiency']:.2f} % full"
            + "".join(
                f"\nleft out, for example: {escape_to_single_line(text)}"
                for text in facts["skip_messages"][:1]
            )
            + "".join(f"\nwarning: {text}" for text in facts["warnings"])
        )


def document_counts_text(summary: Mapping[str, Any], *, unit: str = "") -> str:
    """Returns the counts of documents of `PackedData.summary_values`: all, cut, and left out."""
    cut, left_out = summary["documents cut"], summary["records left out"]
    text = f"{summary['documents']:,}{unit}"
    text += f", {cut:,} of them cut: longer than data.sequence_length" if cut else ""
    return text + (f", {left_out:,} records left out" if left_out else "")


def _evenly_spaced_held_out_rows(data: PackedData, asked: int) -> list[tuple[ShufflePool, int]]:
    """Returns (pool, row number) of at most `asked` held-out rows, spread over all pools; of all for 0."""
    found: list[tuple[ShufflePool, int]] = []
    for pool, part in zip(data.pools, data.pattern.source_shares, strict=True):
        rows = pool.held_out.row_count
        count = min(rows, max(round(asked * part), 1)) if asked else rows
        found += [(pool, i * rows // count) for i in range(count)]
    return found[: asked or None]


def _build_batch(data: PackedData, rows: Sequence[_RowPieces], *, plan: Plan) -> dict[str, Tensor]:
    shape = (len(rows), data.sequence_length)
    batch = {"tokens": np.zeros(shape, np.int64), "labels": np.full(shape, IGNORED_LABEL, np.int64)}
    if data.document_mask:
        batch |= {"documents": np.zeros(shape, np.int64), "positions": np.zeros(shape, np.int64)}

    ends: list[list[int]] = []
    for i, (stream, pieces) in enumerate(rows):
        row = {name: array[i] for name, array in batch.items()}
        ends.append(_fill_batch_row_and_return_ends(row, stream, pieces=pieces))
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if data.document_mask:
        entries = 1 << (max(map(len, ends)) - 1).bit_length()  # a power of two
        padded = [[*own, *[data.sequence_length] * (entries - len(own))] for own in ends]
        tensors["document_ends"] = torch.tensor(padded, dtype=torch.int32)
    if plan.device == "cuda":
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return tensors


def _fill_batch_row_and_return_ends(
    row: dict[str, Int64], stream: TokenStream, *, pieces: Iterator[Piece]
) -> list[int]:
    """Fills one row of a batch with `pieces` of `stream`. Places behind the last piece are padding.

    Returns where each piece ends in the row, and where the padding ends if there is any.
    """
    tokens, labels, at, document, ends = row["tokens"], row["labels"], 0, 0, list[int]()
    for document, (begin, length, label) in enumerate(pieces, start=1):
        if begin == GAP:
            at += length
            continue
        own = slice(at, at + length)
        tokens[own] = stream.slice_tokens_in_one_store(begin, begin + length)
        labels[at : at + length - 1] = tokens[at + 1 : at + length]
        if label != NO_LABEL:
            labels[at + length - 1] = stream.slice_tokens_in_one_store(label, label + 1)[0]
        if any(store.loss_mask is not None for store in stream.stores):
            _ignore_untrained_labels(labels[own], stream, begin=begin, label=label)
        if "documents" in row:
            row["documents"][own] = document - 1
            row["positions"][own] = np.arange(length)
        at += length
        ends.append(at)
    if "documents" in row:
        row["documents"][at:] = document
        row["positions"][at:] = np.arange(len(tokens) - at)
    return ends if at == len(tokens) else [*ends, len(tokens)]


def _ignore_untrained_labels(labels: Int64, stream: TokenStream, *, begin: int, label: int) -> None:
    """Sets the labels of a piece that the loss mask leaves out to IGNORED_LABEL, in place.

    begin: place of the piece's first token
    label: place of the last token's label, or NO_LABEL
    """
    trained = stream.slice_loss_mask_in_one_store(begin, begin + len(labels))
    if trained is not None:
        labels[:-1][trained[1:] == 0] = IGNORED_LABEL
    if label != NO_LABEL:
        behind = stream.slice_loss_mask_in_one_store(label, label + 1)
        if behind is not None and not behind[0]:
            labels[-1] = IGNORED_LABEL
