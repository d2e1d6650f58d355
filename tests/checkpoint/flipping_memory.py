"""A store that fsspec knows, in memory, which changes bits."""

from typing import Any, ClassVar

import pytest

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'fullshard[dev]'")
memory = pytest.importorskip("fsspec.implementations.memory")

URL = "flipping://bucket/run"


class FlippingMemory(memory.MemoryFileSystem):
    """Changes a bit of every object whose path ends with `flips` before it is first looked up or read."""

    protocol = "flipping"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    flips: ClassVar[str] = "nothing"
    flipped: ClassVar[set[str]] = set()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._flip(self._strip_protocol(path))
        return super().info(path, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        self._flip(self._strip_protocol(path))
        return super().cat_file(path, *arguments, **options)

    def _flip(self, path: str) -> None:
        if path in self.store and path.endswith(self.flips) and path not in self.flipped:
            self.store[path].getbuffer()[100] ^= 1
            self.flipped.add(path)


def begin(*, flips: str = "nothing", empty: bool = True) -> None:
    """From here on `flipping://` is such a store, with nothing in it if `empty`."""
    fsspec.register_implementation("flipping", FlippingMemory, clobber=True)
    FlippingMemory.flips = flips
    if empty:
        FlippingMemory.store.clear()
    FlippingMemory.flipped = {*FlippingMemory.store}
