"""Digests of a checkpoint's bytes: against chance; with a key, against malice too.

A digest of 32 hexadecimal digits is XXH3 of 128 bits (https://xxhash.com): quick, and anybody can make other
bytes that have it. One of 64 digits is BLAKE2b of 256 bits (RFC 7693), which is written where there is a key.

[Note: one signature] With a key the manifest carries an HMAC-SHA256 (RFC 2104) of itself. The manifest holds
the digests of all small files, and among these are the tables that hold the digests of all other bytes. So
bytes that are verified down from a signed manifest were written by somebody who had the key.
"""

import errno
import hashlib
import hmac
import logging
import os
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import xxhash

from fullshard.errors import CheckpointError

_XXH3_DIGITS = 32
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 16, 4096
_MAKE_KEY = "(umask 077; head -c 32 /dev/urandom | base64 > run.key)"
# The group may write where every user has a group of his own (umask 002), so that is no reason to refuse.
_BY_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH

logger = logging.getLogger("fullshard")


class Hash(Protocol):
    """A digest that is being made, as those of hashlib."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_hash(*, strong: bool = False) -> Hash:
    """Returns the digest of no bytes yet: BLAKE2b if `strong`, else XXH3."""
    return hashlib.blake2b(digest_size=32) if strong else xxhash.xxh3_128()


def hash_like(digest: str) -> Hash:
    """Returns the digest of no bytes yet, of the kind that `digest` is."""
    return new_hash(strong=len(digest) != _XXH3_DIGITS)


def digest(data: bytes | bytearray | memoryview, *, strong: bool = False) -> str:
    """Returns 32 hexadecimal digits; 64 if `strong`."""
    found = new_hash(strong=strong)
    found.update(data)
    return found.hexdigest()


def matches(data: bytes, digest: str | None) -> bool:
    """Returns whether `digest` is that of `data`."""
    if digest is None:
        return False
    found = hash_like(digest)
    found.update(data)
    return found.hexdigest() == digest


@dataclass(frozen=True)
class KeyFile:
    """A file with a secret key, by which checkpoints are signed. See [Note: one signature].

    Its bytes are the key, without white space at the end: 16 to 4096. It is read where it is needed, so that
    no key is kept in memory or sent to another rank; except that of a pipe, which can be read only once.
    """

    path: Path

    def signature(self, data: bytes) -> str:
        """Returns 64 hexadecimal digits. Raises CheckpointError where the file cannot serve as a key."""
        return hmac.new(self._key(), data, "sha256").hexdigest()

    def require(self) -> None:
        """Raises CheckpointError where the file cannot serve as a key, or others may write it."""
        self._key()

    def warn_of_readers(self) -> None:
        """Logs a warning, once in a process and on rank 0 alone, if other users may read the key."""
        if os.environ.get("RANK", "0") == "0" and (mode := _mode(self.path)) & _BY_OTHERS:
            _warn_once(f"{self.path}: other users may read the key (mode {mode:04o}); chmod 600 {self.path}")

    def _key(self) -> bytes:
        try:
            key = _read(self.path)
        except OSError as error:
            raise CheckpointError(
                f"the key file {self.path} cannot be read.",
                got=error.strerror,
                fix="a key file that is there on every machine of the run",
            ) from error
        if _mode(self.path) & stat.S_IWOTH:
            raise CheckpointError(
                f"{self.path} cannot serve as a key.",
                got=f"mode {_mode(self.path):04o}",
                why="every user may write it, and so replace the key by another",
                fix=f"a new key: {_MAKE_KEY}",
            )
        if not _LEAST_KEY_BYTES <= len(key) <= _MOST_KEY_BYTES:
            raise CheckpointError(
                f"{self.path} cannot serve as a key.",
                got=f"{len(key)} bytes"
                if len(key) <= _MOST_KEY_BYTES
                else f"more than {_MOST_KEY_BYTES} bytes",
                why=f"a key has {_LEAST_KEY_BYTES} to {_MOST_KEY_BYTES} bytes",
                fix=_MAKE_KEY,
            )
        return key


def _read(path: Path) -> bytes:
    return _read_once(path) if stat.S_ISFIFO(path.stat().st_mode) else _read_again(path)


def _read_again(path: Path) -> bytes:
    """Returns the bytes of a key file. A fifo without a writer is empty; one with a writer is waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a regular file")
        os.set_blocking(file.fileno(), True)
        return file.read(_MOST_KEY_BYTES + 1).rstrip()


_read_once = cache(_read_again)


def _mode(path: Path) -> int:
    """Returns the permissions of a regular file; 0 for a pipe, which only the processes at its ends reach."""
    mode = path.stat().st_mode
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else 0


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)
