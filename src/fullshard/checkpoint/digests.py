"""Digests of a checkpoint's bytes, against accidental damage and, with a key, against tampering.

Without a key, digests are XXH3 of 128 bits (https://xxhash.com), 32 hexadecimal digits: fast, but an attacker
can construct other bytes with the same digest. With a key, they are BLAKE2b of 256 bits (RFC 7693).

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


def new_xxh3_or_blake2b(
    data: bytes | bytearray | memoryview = b"", *, strong: bool
) -> hashlib.blake2b | xxhash.xxh3_128:
    """Returns a hash object of `data`: BLAKE2b if `strong`, else XXH3."""
    return hashlib.blake2b(data, digest_size=32) if strong else xxhash.xxh3_128(data)


def is_blake2b_digest(digest: str) -> bool:
    """Returns whether the length of `digest` is that of BLAKE2b, not of XXH3."""
    return len(digest) != _XXH3_DIGITS


def xxh3_or_blake2b(data: bytes | bytearray | memoryview, *, strong: bool = False) -> str:
    """Returns the digest of `data` as 32 hexadecimal digits, or 64 if `strong`."""
    return new_xxh3_or_blake2b(data, strong=strong).hexdigest()


@dataclass(frozen=True)
class KeyFile:
    """A file with a secret key that signs checkpoints. See [Note: one signature].

    The key is the file's bytes without trailing white space: 16 to 4096 bytes. The file is read whenever the
    key is needed, so that the key does not stay in memory. A pipe can be read only once, so its key does.
    """

    path: Path

    def sign(self, data: bytes) -> str:
        """Returns the HMAC-SHA256 of `data` as 64 hexadecimal digits. Raises as `check_usable` does."""
        return hmac.new(self._read_key(), data, "sha256").hexdigest()

    def check_usable(self) -> None:
        """Raises CheckpointError if the file is unreadable, too short or long, or writable by every user."""
        self._read_key()

    def warn_if_others_can_read(self) -> None:
        """Logs a warning if other users may read the key; on rank 0 only, and once per process."""
        if os.environ.get("RANK", "0") == "0" and (mode := _file_permissions(self.path)) & _BY_OTHERS:
            _warn_once(f"{self.path}: other users may read the key (mode {mode:04o}); chmod 600 {self.path}")

    def _read_key(self) -> bytes:
        try:
            is_pipe = stat.S_ISFIFO(self.path.stat().st_mode)
            key = (_read_key_bytes_once if is_pipe else _read_key_bytes)(self.path)
        except OSError as error:
            raise CheckpointError(
                f"the key file {self.path} cannot be read.",
                got=error.strerror,
                fix="a key file that is there on every machine of the run",
            ) from error
        if _file_permissions(self.path) & stat.S_IWOTH:
            raise CheckpointError(
                f"{self.path} cannot serve as a key.",
                got=f"mode {_file_permissions(self.path):04o}",
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


def _read_key_bytes(path: Path) -> bytes:
    """Returns the bytes of a key file or pipe. Waits for a pipe's writer; without a writer, it is empty."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a regular file")
        os.set_blocking(file.fileno(), True)
        return file.read(_MOST_KEY_BYTES + 1).rstrip()


_read_key_bytes_once = cache(_read_key_bytes)


def _file_permissions(path: Path) -> int:
    """Returns the permissions of a regular file, or 0 for a pipe."""
    mode = path.stat().st_mode
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else 0


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)
