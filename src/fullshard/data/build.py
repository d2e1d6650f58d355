"""build_data(run): opens the data that [data] names, tokenizes it, and lays it out in rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from fullshard.data.batches import Batches, Data
from fullshard.data.cache import Heartbeat, get_or_build, key_of, manifest_of, no_heartbeat
from fullshard.data.packed import PackedData, ShufflePool
from fullshard.data.packing import count_tokens, open_rows, pack_rows, shuffled, split_spans
from fullshard.data.sampling import interleave_sources
from fullshard.data.sources import stores_of
from fullshard.data.token_store import Integers, Stream, TokenStore, mapped_npy
from fullshard.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSection
from fullshard.spec.dotted import import_object
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run


def build_data(run: Run, *, alive: Heartbeat = no_heartbeat) -> Data:
    """Builds the data of `run`.

    Makes tokens that are not in the cache yet, and calls `alive` regularly meanwhile. Raises SpecError for a
    factory that cannot be imported; MissingExtraError. Raises DataError for data that is absent, unreadable,
    corrupt, binary, or too short for one sequence in each part.
    """
    if run.data.source == "python":
        return UserBatches(_call_factory(run.data, run), run.data)
    return build_packed_data(run, alive=alive)


def tokenizer_vocabulary(section: DataSection) -> int | None:
    """Returns the vocabulary size of the tokenizer; None for memmaps and Python data without a tokenizer.

    This is known before tokens are made, which may take hours. Raises DataError, MissingExtraError.
    """
    if section.tokenizer is None and section.kinds & {"memmap", "python"}:
        return None
    return open_tokenizer(section.tokenizer, end_token=section.end_token).vocabulary


def build_packed_data(run: Run, *, alive: Heartbeat = no_heartbeat) -> PackedData:
    """Builds the data of a run that is not from Python. See `build_data`."""
    section, root = run.data, Path(run.data.cache)
    stores = [stores_of(source, section, root=root, alive=alive) for source in section.sources or (section,)]
    tokenizer = _open_tokenizer(section, [store for group in stores for store in group])
    weights = [source.weight for source in section.sources if source.weight is not None]
    if not weights:
        stores, weights = [[store for group in stores for store in group]], [1.0]
    seeds = [f"{run.run.seed} {i}" for i in range(len(stores))] if len(stores) > 1 else [run.run.seed]
    return PackedData(
        pools=tuple(
            _open_pool(Stream(tuple(group)), run, root=root, alive=alive, seed=seed)
            for group, seed in zip(stores, seeds, strict=True)
        ),
        pattern=interleave_sources(weights),
        sequence_length=section.sequence_length,
        document_mask=section.document_mask,
        packing=section.packing,
        tokenizer=tokenizer,
    )


def _open_tokenizer(section: DataSection, stores: Sequence[TokenStore]) -> Tokenizer | None:
    """Returns the tokenizer that decodes the tokens.

    Raises DataError if memmaps hold tokens that it does not know.
    """
    if section.tokenizer is None:
        kinds = section.kinds
        if "memmap" in kinds and len(kinds) > 1:
            raise DataError(
                "tokens and bytes do not mix.",
                got=f"sources {', '.join(sorted(kinds))}, and no data.tokenizer",
                fix="data.tokenizer = the one that the memmaps were made with",
            )
        return None if "memmap" in kinds else ByteTokenizer()
    tokenizer = open_tokenizer(section.tokenizer, end_token=section.end_token)
    for store in stores:
        if store.vocabulary > tokenizer.vocabulary:
            raise DataError(
                f"{store.name} was not made with the tokenizer {section.tokenizer!r}.",
                got=f"a token {store.vocabulary - 1}, where the tokenizer has {tokenizer.vocabulary}",
                fix="the tokenizer that it was made with, or the right data.dtype",
            )
    return tokenizer


def _open_pool(stream: Stream, run: Run, *, root: Path, alive: Heartbeat, seed: int | str) -> ShufflePool:
    """Lays the documents of `stream` out in rows, in the cache unless some of the tokens are in memory."""
    section = run.data
    keys = [store.key for store in stream.stores]
    if None in keys:
        parts, facts = _lay_out(stream, run)
    else:
        settings = {
            "stores": keys,
            "sequence_length": section.sequence_length,
            "packing": section.packing,
            "fraction": section.validation_fraction,
            "seed": run.run.seed if section.packing == "concat" else None,
        }
        entry = get_or_build(
            root,
            f"layout-{key_of(settings)}",
            build=lambda draft: _save_layout(stream, run, draft),
            alive=alive,
        )
        parts, facts = _map_layout(entry), manifest_of(entry)
    training, held_out = (
        open_rows(
            parts[part],
            tokens=facts["tokens"][part],
            sequence_length=section.sequence_length,
            masked=section.document_mask,
        )
        for part in ("training", "held-out")
    )
    pool = ShufflePool(stream, training, held_out, seed)
    _check(pool, section, tokens=facts["tokens"], longest=facts["longest"])
    return pool


Layout = Mapping[str, Mapping[str, Integers]]
"""The arrays of `pack_rows` for each part of the data, "training" and "held-out"."""


def _lay_out(stream: Stream, run: Run) -> tuple[Layout, Mapping[str, Any]]:
    """Returns the rows of each part, the tokens in each part, and the length of the longest document."""
    section = run.data
    training, held_out = split_spans(*stream.documents(), fraction=section.validation_fraction)
    if section.packing == "concat":
        training = shuffled(training, seed=run.run.seed)
    parts = {
        part: pack_rows(spans, packing=section.packing, sequence_length=section.sequence_length)
        for part, spans in (("training", training), ("held-out", held_out))
    }
    tokens = {part: count_tokens(arrays) for part, arrays in parts.items()}
    return parts, {"tokens": tokens, "longest": int(training.lengths.max(initial=0))}


def _save_layout(stream: Stream, run: Run, draft: Path) -> Mapping[str, Any]:
    parts, facts = _lay_out(stream, run)
    for part, arrays in parts.items():
        for name, array in arrays.items():
            np.save(draft / f"{part}.{name}.npy", array)
    return facts


def _map_layout(entry: Path) -> Layout:
    parts: dict[str, dict[str, Integers]] = {"training": {}, "held-out": {}}
    for path in entry.glob("*.npy"):
        part, name, _ = path.name.split(".")
        parts[part][name] = mapped_npy(path)
    return parts


def _check(pool: ShufflePool, section: DataSection, *, tokens: Mapping[str, int], longest: int) -> None:
    """Raises DataError for a part without a row, and if no document fills a row with `packing = "none"`."""
    length, name = section.sequence_length, pool.stream.name
    parts = {"training": pool.training.count}
    if section.validation_fraction > 0:
        parts["held-out"] = pool.held_out.count
    for part, rows in parts.items():
        if rows:
            continue
        larger = "; a larger data.validation_fraction, or 0 for no validation" if part == "held-out" else ""
        raise DataError(
            f"sequence too long: the {part} part of {name} does not fill one.",
            got=f"{tokens[part]} tokens, data.validation_fraction = {section.validation_fraction}",
            why=f"data.sequence_length = {length} needs {length + 1}: itself and one label",
            fix=f"more data, or a shorter data.sequence_length{larger}",
        )
    if section.packing == "none" and length > longest:
        raise DataError(
            f"data.sequence_length is longer than any document of {name}.",
            got=f"{length}, where the longest document has {longest} tokens",
            why='packing = "none" has one document a sequence: part of every sequence would be padding',
            fix=f'data.sequence_length = {longest}, or data.packing = "best_fit"',
        )


def _call_factory(section: DataSection, run: Run) -> Batches:
    """Returns the batches that the user's factory makes for `run`.

    Raises SpecError for a name that cannot be imported, DataError if the result has no `microbatches`.
    """
    assert section.factory is not None, "checked by the spec"
    batches = import_object(section.factory, key="data.factory")(run)
    if not hasattr(batches, "microbatches"):
        raise DataError(
            f"{section.factory} gave no batches.",
            got=type(batches).__name__,
            fix="an object with microbatches(step, rank=..., plan=...)",
        )
    return cast(Batches, batches)


@dataclass(frozen=True)
class UserBatches:
    """Wraps the user's own batches.

    Attributes that they have (see `Data`) are used; the others are unknown.
    """

    batches: Batches
    section: DataSection

    @property
    def vocabulary(self) -> int | None:
        return getattr(self.batches, "vocabulary", None)

    @property
    def validation_tokens(self) -> int:
        return getattr(self.batches, "validation_tokens", 0)

    @property
    def byte_entropy(self) -> float | None:
        return getattr(self.batches, "byte_entropy", None)

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of a step, see `Batches`."""
        return self.batches.microbatches(step, rank=rank, plan=plan)

    def validation(self, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields held-out batches, see `Data`; none if the user's batches have no `validation`."""
        own = getattr(self.batches, "validation", None)
        return iter(()) if own is None else own(rank=rank, plan=plan)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, see `Data`."""
        own = getattr(self.batches, "encode", None)
        return [] if own is None else own(text)

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """Returns readable text, see `Data`."""
        numbers: Iterable[int] = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        own = getattr(self.batches, "decode", None)
        return " ".join(map(str, numbers)) if own is None else own(tokens)

    def describe(self) -> str:
        """Returns a one-line description, see `Data`."""
        own = getattr(self.batches, "describe", None)
        return f"batches of {self.section.factory}" if own is None else own()
