"""Converts text to tokens and back: as bytes, or with a Hugging Face tokenizer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data.worker import call_in_worker
from fullshard.errors import DataError, MissingExtraError
from fullshard.spec.pretrained import find_cached_config
from fullshard.system.small_files import ForeignErrorTranslator, parse_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SEPARATOR = 0
"""The byte between two documents: NUL, which does not occur in text."""

BYTES = 256
"""Vocabulary size of byte tokens."""

TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
MORE_TEMPLATES = "additional_chat_templates"
_MOST_BYTES = 64 << 20  # the largest tokenizer.json files have about forty million bytes
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>", "[SEP]")


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a text, and the characters that each stands for.

    begins, ends: token i stands for the characters from begins[i] to before ends[i]
    """

    tokens: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def from_offsets(cls, tokens: Sequence[int], offsets: Sequence[tuple[int, int]]) -> "EncodedText":
        """Returns the tokens with `offsets` of a Hugging Face tokenizer.

        Some tokenizers report the offsets of a token without the blanks at its beginning. So a token begins
        at the end of the one before, or earlier: all bytes of a character have the character's offsets.
        """
        pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        begins, ends = pairs[:, 0], pairs[:, 1]
        begins = np.minimum(begins, np.concatenate([begins[:1] * 0, ends[:-1]]))
        return cls(np.array(tokens, dtype=np.int64), begins, ends)

    def mask_of_tokens_for_characters(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Returns the mask of the tokens that stand for a character from `begin` to before `end`.

        A token across `begin` counts: it says how the text continues.
        """
        return (self.begins < end) & ((self.ends > begin) | (self.begins >= begin))


@dataclass(frozen=True)
class ByteTokenizer:
    """Encodes text as UTF-8 bytes, with SEPARATOR after each document.

    vocabulary_size: largest token that the tokenizer can produce, plus one
    tokens_before_document, tokens_after_document: tokens placed around each document
    """

    vocabulary_size: int = BYTES
    tokens_before_document: tuple[int, ...] = ()
    tokens_after_document: tuple[int, ...] = (SEPARATOR,)

    def encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Returns the tokens of each text, without those around a document.

        Raises DataError for a SEPARATOR or half a surrogate pair.
        """
        return [self._encode_text(text) for text in texts]

    def encode_texts_with_offsets(self, texts: Sequence[str]) -> list[EncodedText]:
        """Returns the tokens of each text, as `encode_texts`, with the characters that each stands for."""
        found: list[EncodedText] = []
        for tokens in self.encode_texts(texts):
            begins = np.cumsum((tokens & 0xC0) != 0x80) - 1  # other bytes continue a character
            found.append(EncodedText(tokens, begins, begins + 1))
        return found

    def _encode_text(self, text: str) -> NDArray[np.int64]:
        try:
            found = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        except UnicodeEncodeError as error:
            raise DataError("a text is not UTF-8.", got=str(error)) from error
        if (found == SEPARATOR).any():
            raise DataError(
                "a text holds a NUL byte.",
                why="NUL is the token that separates documents",
                fix="take it out, or give a tokenizer: data.tokenizer = <directory or tokenizer.json>",
            )
        return found


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer read from a tokenizer.json, with the members of ByteTokenizer."""

    backend: "Backend"
    tokens_before_document: tuple[int, ...]
    tokens_after_document: tuple[int, ...]

    @property
    def vocabulary_size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        with _convert_backend_errors():
            found = self.backend.encode_batch_fast([*texts], add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def encode_texts_with_offsets(self, texts: Sequence[str]) -> list[EncodedText]:
        with _convert_backend_errors():
            found = self.backend.encode_batch([*texts], add_special_tokens=False)
        return [EncodedText.from_offsets(one.ids, one.offsets) for one in found]


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer_safely(path: str | None, *, eos_token: str | None = None) -> Tokenizer:
    """Calls `open_tokenizer` after a worker could do so. Raises DataError if that goes beyond its limits.

    While the files stay as they are, further calls in this process return the same tokenizer.
    """
    seen = [(str(file), file.stat()) for file in list_tokenizer_files(path)] if path is not None else []
    states = tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in seen)
    return _open_after_trial(path, states, eos_token=eos_token)


@lru_cache(maxsize=1)
def _open_after_trial(path: str | None, _states: tuple[Any, ...], *, eos_token: str | None) -> Tokenizer:
    attempt = partial(open_tokenizer, path, eos_token=eos_token)
    if path is not None:
        call_in_worker(attempt, what=f"the tokenizer {path} cannot be opened.")
    return attempt()


def open_tokenizer(path: str | None, *, eos_token: str | None = None) -> Tokenizer:
    """Opens the tokenizer of a directory or a tokenizer.json; the byte tokenizer if `path` is None.

    A document gets the tokens that the tokenizer's post-processor puts around a text, and the end token,
    unless the post-processor adds it already. The end token is `eos_token`, else the eos_token of
    tokenizer_config.json or special_tokens_map.json, else one with a usual name.

    Raises DataError for an absent or broken file, and if no end token is known; MissingExtraError without the
    package tokenizers.
    """
    if path is None:
        return ByteTokenizer()
    file = locate_tokenizer_file(path)
    backend = _read_backend_tokenizer(file)
    with _convert_backend_errors(str(file)):
        around: list[int] = backend.encode("", add_special_tokens=True).ids
        known: set[int] = set(backend.encode("x", add_special_tokens=False).ids)
        full: list[int] = backend.encode("x", add_special_tokens=True).ids
    before = next((i for i, token in enumerate(full) if token in known), 0)
    after = around[before:]
    end = _choose_end_token(backend, file, named=eos_token)
    after += [] if end in after else [end]
    return FileTokenizer(backend, tuple(around[:before]), tuple(after))


def find_tokenizer(path: str) -> Path:
    """Returns `path`, or if nothing is there, the directory of a repository in the Hugging Face cache."""
    place = Path(os.path.expanduser(path))
    cached = None if os.path.exists(place) else find_cached_config(path)
    return place if cached is None else cached.parent


def locate_tokenizer_file(path: str) -> Path:
    """Returns the tokenizer.json that `path` is or contains. Raises DataError if it is missing."""
    place = find_tokenizer(path)
    file = place / TOKENIZER_FILE if os.path.isdir(place) else place
    if not os.path.isfile(file):
        why, fix = None, f"a directory with {TOKENIZER_FILE}, or the path of one"
        if any(os.path.exists(place / name) for name in ("tokenizer.model", "vocab.json")):
            why = "a tokenizer of the older kind needs converting"
            fix = "AutoTokenizer.from_pretrained(directory).save_pretrained(directory), which writes one"
        got = f"data.tokenizer = {path!r}: no file {file}"
        raise DataError("there is no tokenizer.", got=got, why=why, fix=fix)
    return file


def list_tokenizer_files(path: str) -> list[Path]:
    """Returns the files of the tokenizer at `path` that determine the tokens, chat template included."""
    file = locate_tokenizer_file(path)
    beside = [file.with_name(name) for name in (CONFIG_FILE, _SPECIAL_FILE, _ADDED_FILE, TEMPLATE_FILE)]
    beside += sorted(file.with_name(MORE_TEMPLATES).glob("*.jinja"))
    return [file, *(one for one in beside if one.is_file())]


def _read_backend_tokenizer(file: Path) -> "Backend":
    if find_spec("tokenizers") is None:
        raise MissingExtraError("hf", package="tokenizers", needed_for="data.tokenizer")
    from tokenizers import Tokenizer as Backend

    _read_json(file)
    fix = "a tokenizer.json of the package tokenizers"
    with ForeignErrorTranslator(lambda got: DataError(f"{file} is not a tokenizer.", got=got, fix=fix)):
        backend = Backend.from_buffer(read_tokenizer_text(file).encode())
        backend.no_padding()
        backend.no_truncation()
    return backend


def read_tokenizer_text(file: Path, *, what: str = "tokenizer", most_bytes: int = _MOST_BYTES) -> str:
    """Returns the text of a file of a tokenizer. Raises DataError, with `what`, if it cannot be read."""
    try:
        return read_text(file, most_bytes=most_bytes)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"the {what} {file} cannot be read.", got=got) from error


def _convert_backend_errors(name: str = "the tokenizer") -> ForeignErrorTranslator:
    return ForeignErrorTranslator(lambda got: DataError(f"{name} does not take a text.", got=got))


def _choose_end_token(backend: "Backend", file: Path, *, named: str | None) -> int:
    """Returns the end token, see `open_tokenizer`. Raises DataError if the tokenizer has none."""
    name = named if named is not None else _read_configured_eos_token(file.with_name(CONFIG_FILE))
    candidates = _END_TOKENS if name is None else (name,)
    found = [token for one in candidates if (token := backend.token_to_id(one)) is not None]
    if found:
        return found[0]
    raise DataError(
        "no token is known that ends a document.",
        got=f"{file} has no {' or '.join(candidates)}",
        why="documents are joined, and the model must see where one ends",
        fix='data.eos_token = "<the name of one>"',
    )


def _read_configured_eos_token(config: Path) -> str | None:
    """Returns the eos_token of the files beside a tokenizer, read as transformers does; None without one."""
    settings, special = (
        cast(dict[str, Any], _read_json(file)) if file.exists() else {}
        for file in (config, config.with_name(_SPECIAL_FILE))
    )
    named = settings if "added_tokens_decoder" in settings else {**settings, **special}
    token = named.get("eos_token")
    if isinstance(token, dict):
        token = cast(dict[str, Any], token).get("content")
    return token if isinstance(token, str) else None


def _read_json(file: Path) -> Any:
    """Returns the value in a JSON file of a tokenizer. Raises DataError if the file is not JSON."""
    try:
        return parse_json(read_tokenizer_text(file))
    except ValueError as error:
        raise DataError(f"the tokenizer {file} cannot be read.", got=str(error)) from error
