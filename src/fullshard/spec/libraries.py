"""What other libraries raise about somebody's file, as an error of ours."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from fullshard.errors import FullshardError

_SHOWN = 300


class ForeignErrors:
    """A context around calls of another library with what stands in somebody's file.

    What such a library raises about a file that it did not expect can be anything. Here it becomes the error
    that `error` makes of its words. A FullshardError passes, and so does what ends the process.
    """

    def __init__(self, error: Callable[[str], Exception]) -> None:
        self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A panic of Rust is no Exception.
        panicked = type(error).__module__ == "pyo3_runtime"
        if panicked or (isinstance(error, Exception) and not isinstance(error, FullshardError)):
            words = " ".join(str(error).split()) or type(error).__name__
            raise self._error(words[:_SHOWN]) from error
