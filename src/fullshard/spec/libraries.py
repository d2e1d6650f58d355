"""Errors of other libraries about a user's file, converted to fullshard's own errors."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from fullshard.errors import FullshardError

_SHOWN = 300


class ForeignErrors:
    """A context for calls of another library that parse a user's file.

    Such a library can raise anything for an unexpected file. The context raises `error(message)` instead. A
    FullshardError passes unchanged, and so do exceptions that end the process.
    """

    def __init__(self, error: Callable[[str], Exception]) -> None:
        self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A Rust panic is not an Exception.
        panicked = type(error).__module__ == "pyo3_runtime"
        if panicked or (isinstance(error, Exception) and not isinstance(error, FullshardError)):
            words = " ".join(str(error).split()) or type(error).__name__
            raise self._error(words[:_SHOWN]) from error
