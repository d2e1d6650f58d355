"""Digests of a checkpoint's bytes, against accidental damage and, with a key, against tampering.

A digest of 32 hexadecimal digits is XXH3 of 128 bits (https://xxhash.com): fast, but other bytes with the
same digest can be constructed. A digest of 64 digits, used if there is a key, is BLAKE2b of 256 bits (RFC
7693).

[Note: one signature] With a key the manifest carries an HMAC-SHA256 (RFC 2104) of itself. The manifest holds
the digests of all small files, among them the tables that hold the digests of all other bytes. So bytes that
are verified, starting from a signed manifest, were written by somebody who had the key.
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

import xxhash

from fullshard.errors import CheckpointError

_XXH3_DIGITS = 32
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 16, 4096
_MAKE_KEY = "(umask 077; head -c 32 /dev/urandom | base64 > run.key)"
# Group write access is accepted: with umask 002 every user has a group of their own.
_BY_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH

logger = logging.getLogger("fullshard")


Hash = hashlib.blake2b | xxhash.xxh3_128


def new_hash(*, strong: bool = False) -> Hash:
    """Returns an empty digest: BLAKE2b if `strong`, else XXH3."""
    return hashlib.blake2b(digest_size=32) if strong else xxhash.xxh3_128()


def is_strong(digest: str) -> bool:
    """Returns whether `digest` is a BLAKE2b digest, by its length."""
    return len(digest) != _XXH3_DIGITS


def digest(data: bytes | bytearray | memoryview, *, strong: bool = False) -> str:
    """Returns the digest of `data` as 32 hexadecimal digits, or 64 if `strong`."""
    found = new_hash(strong=strong)
    found.update(data)
    return found.hexdigest()


@dataclass(frozen=True)
class KeyFile:
    """A file with a secret key that signs checkpoints. See [Note: one signature].

    The key is the file's bytes without trailing white space: 16 to 4096 bytes. The file is read whenever the
    key is needed, so that no key stays in memory, except that of a pipe, which can be read only once.
    """

    path: Path

    def signature(self, data: bytes) -> str:
        """Returns the signature of `data` as 64 hexadecimal digits. Raises CheckpointError."""
        return hmac.new(self._key(), data, "sha256").hexdigest()

    def require(self) -> None:
        """Raises CheckpointError if the file cannot serve as a key, or if every user may write it."""
        self._key()

    def warn_of_readers(self) -> None:
        """Logs a warning if other users may read the key: once per process, and on rank 0 alone."""
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
            is_cut = len(key) > _MOST_KEY_BYTES
            raise CheckpointError(
                f"{self.path} cannot serve as a key.",
                got=f"more than {_MOST_KEY_BYTES} bytes" if is_cut else f"{len(key)} bytes",
                why=f"a key has {_LEAST_KEY_BYTES} to {_MOST_KEY_BYTES} bytes",
                fix=_MAKE_KEY,
            )
        return key


def _read(path: Path) -> bytes:
    return _read_once(path) if stat.S_ISFIFO(path.stat().st_mode) else _read_again(path)


def _read_again(path: Path) -> bytes:
    """Returns the bytes of a key file. Waits for the writer of a fifo; a fifo without a writer is empty."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a regular file")
        os.set_blocking(file.fileno(), True)
        return file.read(_MOST_KEY_BYTES + 1).rstrip()


_read_once = cache(_read_again)


def _mode(path: Path) -> int:
    """Returns the permissions of a regular file, or 0 for a pipe."""
    mode = path.stat().st_mode
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else 0


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)
