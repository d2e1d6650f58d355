"""Builds the data of a run: opens the sources of [data], tokenizes them, and packs the tokens into rows."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data import packing, token_store
from fullshard.data.batches import TrainingData
from fullshard.data.packed import PackedData, ShufflePool
from fullshard.data.sources import check_validation_files_are_apart, open_token_stores
from fullshard.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer_safely
from fullshard.errors import DataError
from fullshard.spec.run import Run
from fullshard.spec.settings.data_section import DataSection
from fullshard.spec.settings.run_checks import check_own_model_has_data
from fullshard.system.dotted import import_callable

_PARTS = ("training", "held-out")


def build_data(run: Run, *, alive: token_store.Heartbeat = token_store.no_heartbeat) -> TrainingData:
    """Builds the data of `run`.

    Tokenizes the sources that are not in the cache yet, and calls `alive` regularly while it works. Raises
    SpecError for a model of the user's without data settings, and for a factory that cannot be imported;
    MissingExtraError for a package that a source needs. Raises DataError for data that is absent, unreadable,
    corrupt, binary, or too short for one sequence in each part.

    >>> run = fs.Run.load("run.toml")  # [data] source = "text", paths = ["texts/text.txt"]
    >>> data = fs.build_data(run)
    >>> data.training_sequences
    39
    """
    if run.data.source == "python":
        return _build_user_data(run)
    return build_packed_data(run, alive=alive)


def resolve_epochs(run: Run, data: TrainingData, *, step: int = 0, rows: int = 0) -> Run:
    """Returns `run` with the number of steps that its `train.epochs` take on `data`:

        steps = step + max(ceil((epochs * data.training_sequences - rows) / global_batch), 0)

    step, rows: number of steps that a resumed run has taken, and of the sequences in them, perhaps with
        another global batch

    Returns `run` itself if it has no `train.epochs`. Raises DataError if `data` has no `training_sequences`.

    >>> epochs = fs.Run.load("run.toml", overrides=["train.epochs=2", "train.global_batch=8"])
    >>> fs.resolve_epochs(epochs, data).train.steps  # ceil(2 * 39 / 8)
    10
    """
    section = run.train
    if section.epochs is None:
        return run
    sequences = data.training_sequences
    if not isinstance(sequences, int) or sequences < 1:
        raise DataError(
            "the data does not say how many sequences an epoch has.",
            got=f"train.epochs = {section.epochs:g}, data.source = {run.data.source!r}, "
            f"training_sequences = {sequences!r}",
            fix=f"train.steps, or a property training_sequences of what {run.data.factory} returns",
        )
    # As the decimal number that was written: 0.1 epochs of 1,000 sequences are 100, not a bit more.
    left = Fraction(str(section.epochs)) * sequences - rows
    steps = step + max(math.ceil(left / section.global_batch), 0)
    return run.with_overrides([f"train.steps={steps}"])


def tokenizer_vocabulary_size(section: DataSection) -> int | None:
    """Returns the tokenizer's vocabulary size; without one, that of bytes, or None if the data are tokens.

    Reads only the tokenizer, since tokenizing the data may take hours. Raises DataError, MissingExtraError.
    """
    if section.tokenizer is None and "other program" in section.token_makers:
        return None
    return open_tokenizer_safely(section.tokenizer, eos_token=section.eos_token).vocabulary_size


def build_packed_data(run: Run, *, alive: token_store.Heartbeat = token_store.no_heartbeat) -> PackedData:
    """Builds the data of a run whose source is not `python`. See `build_data`."""
    check_own_model_has_data(run)
    section, root = run.data, Path(run.data.cache)
    sources = section.sources or (section,)
    check_validation_files_are_apart(sources)
    open_stores = partial(open_token_stores, section=section, root=root, alive=alive)
    stores = [open_stores(source) for source in sources]
    held_out = [open_stores(one.for_validation()) if one.validation_paths else [] for one in sources]
    tokenizer = _open_and_check_tokenizer(section, list(chain(*stores, *held_out)))
    weights = [source.weight for source in section.sources if source.weight is not None]
    if not weights:
        stores, held_out, weights = [list(chain(*stores))], [list(chain(*held_out))], [1.0]
    seeds = [f"{run.run.seed} {i}" for i in range(len(stores))] if len(stores) > 1 else [run.run.seed]
    return PackedData(
        pools=tuple(
            _build_shuffle_pool(
                token_store.TokenStream((*group, *last)),
                run,
                validation_store_count=len(last),
                alive=alive,
                seed=seed,
            )
            for group, last, seed in zip(stores, held_out, seeds, strict=True)
        ),
        pattern=packing.build_source_interleaving(weights),
        sequence_length=section.sequence_length,
        document_mask=section.document_mask,
        packing=section.packing,
        tokenizer=tokenizer,
        has_pairs=section.has_pairs,
    )


def build_evaluation_data(
    run: Run, paths: tuple[str, ...], *, alive: token_store.Heartbeat = token_store.no_heartbeat
) -> PackedData:
    """Builds data whose held-out rows are all of `paths`, prepared as the first source of [data].

    Raises as `build_data` does.
    """
    section, seed = run.data.model_copy(update={"validation_fraction": 0.0}), run.run.seed
    stores = open_token_stores(section.source_of(paths), section, root=Path(section.cache), alive=alive)
    tokenizer = _open_and_check_tokenizer(section, stores)
    run, stream = run.model_copy(update={"data": section}), token_store.TokenStream(tuple(stores))
    pool = _build_shuffle_pool(stream, run, validation_store_count=len(stores), alive=alive, seed=seed)
    return PackedData(
        pools=(pool,),
        pattern=packing.build_source_interleaving([1.0]),
        sequence_length=section.sequence_length,
        document_mask=section.document_mask,
        packing=section.packing,
        tokenizer=tokenizer,
        has_pairs=section.has_pairs,
    )


def _open_and_check_tokenizer(
    section: DataSection, stores: Sequence[token_store.TokenStore]
) -> Tokenizer | None:
    """Opens the tokenizer that `section` names; without one, that of bytes, or None if the data are tokens.

    Raises DataError if a store holds tokens that the tokenizer does not have, and without a name if some
    sources have text and others tokens.
    """
    if section.tokenizer is None:
        if len(section.token_makers) > 1:
            raise DataError(
                "tokens and bytes do not mix.",
                got="sources of tokens and sources of text, and no data.tokenizer",
                fix="data.tokenizer = the one that the tokens were made with",
            )
        return None if "other program" in section.token_makers else ByteTokenizer()
    tokenizer = open_tokenizer_safely(section.tokenizer, eos_token=section.eos_token)
    for store in stores:
        if store.vocabulary_size > tokenizer.vocabulary_size:
            raise DataError(
                f"{store.name} was not made with the tokenizer {section.tokenizer!r}.",
                got=f"token {store.vocabulary_size - 1}; the tokenizer has {tokenizer.vocabulary_size}",
                fix="the tokenizer that it was made with, or the right data.dtype",
            )
    return tokenizer


def _build_shuffle_pool(
    stream: token_store.TokenStream,
    run: Run,
    *,
    validation_store_count: int,
    alive: token_store.Heartbeat,
    seed: int | str,
) -> ShufflePool:
    """Packs the documents of `stream` into rows, which are kept in the cache unless tokens are in memory.

    validation_store_count: number of stores at the end of `stream` that are the validation data; if 0, a
        fraction of the tokens is held out
    """
    section, root = run.data, Path(run.data.cache)
    pack = partial(_pack_training_and_held_out, stream, run, validation_store_count=validation_store_count)
    keys = [store.key for store in stream.stores]
    if None in keys:
        arrays, facts = pack()
    else:
        settings = {
            "stores": keys,
            "sequence_length": section.sequence_length,
            "packing": section.packing,
            "fraction": section.validation_fraction,
            "seed": run.run.seed if section.packing == "concat" else None,
            **({"validation_stores": validation_store_count} if validation_store_count else {}),
        }

        def write_layout(draft: Path) -> Mapping[str, Any]:
            arrays, facts = pack()
            for name, array in arrays.items():
                token_store.save_array(draft / f"{name}.npy", array)
            return facts

        entry = token_store.get_or_build_entry(
            root, f"layout-{token_store.cache_key(settings)}", build=write_layout, alive=alive
        )
        arrays = {path.stem: np.load(path, mmap_mode="r") for path in entry.glob("*.npy")}
        facts = token_store.read_manifest(entry)
    training, validation = (
        packing.build_rows_from_arrays(
            {name.rpartition("-")[2]: array for name, array in arrays.items() if name.startswith(part)},
            tokens=facts["tokens"][part],
            sequence_length=section.sequence_length,
            masked=section.document_mask,
        )
        for part in _PARTS
    )
    pool = ShufflePool(stream, training, validation, seed, validation_store_count=validation_store_count)
    _check_sequence_length(pool, section, tokens=facts["tokens"])
    return pool


def _pack_training_and_held_out(
    stream: token_store.TokenStream, run: Run, *, validation_store_count: int
) -> tuple[Mapping[str, token_store.Integers], Mapping[str, Any]]:
    """Returns (row arrays of both parts, number of tokens per part). See `_build_shuffle_pool`."""
    section = run.data
    begins, lengths = stream.document_begins_and_lengths()
    chosen_lengths = lengths
    if section.has_pairs:  # chosen and rejected documents alternate
        kept = _find_labelled_pairs(stream, half=section.row_length)
        chosen_lengths = lengths[::2][kept]
        begins, lengths = begins[::2][kept], (lengths[::2] + lengths[1::2])[kept]
    training, held_out = packing.split_off_held_out(
        begins, lengths, fraction=section.validation_fraction, may_cut=not section.has_pairs
    )
    if validation_store_count:
        place = stream.store_bounds[len(stream.stores) - validation_store_count]
        training, held_out = (training.select_spans(part) for part in (begins < place, begins >= place))
    if section.packing == "concat":
        order, key = np.arange(len(training.begins)), f"shuffle {run.run.seed}"
        order = packing.permute_pseudorandomly(order, length=len(order), key=key)
        training = training.select_spans(order)
    arrays, tokens = dict[str, token_store.Integers](), dict[str, int]()
    for part, spans in zip(_PARTS, (training, held_out), strict=True):
        if section.has_pairs:
            chosen = chosen_lengths[np.searchsorted(begins, spans.begins)]
            rows = packing.pack_pairs(spans, chosen, half=section.row_length)
        else:
            rows = packing.pack_spans(spans, packing=section.packing, sequence_length=section.sequence_length)
        arrays |= {f"{part}-{name}": array for name, array in rows.items()}
        tokens[part] = packing.count_tokens_in_row_arrays(rows)
    return arrays, {"tokens": tokens}


def _find_labelled_pairs(stream: token_store.TokenStream, *, half: int) -> NDArray[np.bool_]:
    """Returns True for each pair with a label in both halves: without one, an answer would not be compared.

    half: tokens of half a row. Raises DataError if none has.
    """
    begins, lengths = (array.tolist() for array in stream.document_begins_and_lengths())
    mask = stream.slice_loss_mask_in_one_store
    places = zip(begins, lengths, strict=True)
    labelled = np.array([n > 1 and bool(np.any(mask(at + 1, at + min(n, half + 1)))) for at, n in places])
    kept = labelled[::2] & labelled[1::2]
    if not kept.any():
        raise DataError("no pair has a label in both halves.", fix="a longer data.sequence_length")
    return kept


def _check_sequence_length(pool: ShufflePool, section: DataSection, *, tokens: Mapping[str, int]) -> None:
    """Raises DataError for sequences longer than the training or the validation part."""
    length = section.sequence_length
    training_names = " + ".join(store.name for store in pool.training_stores)
    validation_names = " + ".join(store.name for store in pool.validation_stores)
    for part, rows in zip(_PARTS, (pool.training, pool.held_out), strict=True):
        is_named = part == "held-out" and bool(validation_names)
        if part == "training" and not pool.training_stores:
            continue
        if rows.row_count or (part == "held-out" and section.validation_fraction == 0 and not is_named):
            continue
        larger = "; a larger data.validation_fraction, or 0 for no validation" if part == "held-out" else ""
        raise DataError(
            f"sequence too long: the {part} part of {validation_names if is_named else training_names} "
            "does not fill one.",
            got=f"{tokens[part]} tokens, data.validation_fraction = {section.validation_fraction}",
            why=f"data.sequence_length = {length} needs {length + 1}: itself and one label",
            fix=f"more data, or a shorter data.sequence_length{'' if is_named else larger}",
        )


def _build_user_data(run: Run) -> TrainingData:
    """Returns the members of the object that the user's factory makes, and defaults for missing ones.

    Raises SpecError for a name that cannot be imported, DataError if the result has no `microbatches`.
    """
    factory = run.data.factory
    assert factory is not None, "checked by the spec"
    batches = import_callable(factory, key="data.factory")(run)
    if not hasattr(batches, "microbatches"):
        raise DataError(
            f"{factory} gave no batches.",
            got=type(batches).__name__,
            fix="an object with microbatches(step, rank=..., plan=...)",
        )
    members: dict[str, Any] = {
        "microbatches": None,
        "microbatches_at_row": None,
        "takes_any_row": hasattr(batches, "microbatches_at_row"),
        "row_order": None,
        "validation_digest": None,
        "training_sequences": None,
        "vocabulary": None,
        "validation_tokens": 0,
        "validation": lambda *, rank, plan: iter(()),  # pyright: ignore[reportUnknownLambdaType]
        "describe": lambda: f"batches of {factory}",
    }
    members = {name: getattr(batches, name, default) for name, default in members.items()}
    return cast(TrainingData, SimpleNamespace(**members))
