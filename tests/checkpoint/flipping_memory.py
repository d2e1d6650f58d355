"""A store that fsspec knows, in memory. It reports MD5s as Google's does, and changes bits."""

import base64
import hashlib
from typing import Any, ClassVar

import pytest

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'fullshard[dev]'")
memory = pytest.importorskip("fsspec.implementations.memory")

URL = "flipping://bucket/run"


class FlippingMemory(memory.MemoryFileSystem):
    """Changes a bit of every object whose path ends with `flips`, on its way here or once it lies here."""

    protocol = "flipping"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    flips: ClassVar[str] = "nothing"
    on_its_way: ClassVar[bool] = False
    received: ClassVar[dict[str, bytes]] = {}  # the MD5 of it
    read: ClassVar[list[str]] = []

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        if found["type"] != "file":
            return found
        if path not in self.received:
            data = self.store[self._strip_protocol(path)].getbuffer()
            md5 = hashlib.md5(data).digest()
            if path.endswith(self.flips):
                data[100] ^= 1
            self.received[path] = hashlib.md5(data).digest() if self.on_its_way else md5
        return {**found, "md5Hash": base64.b64encode(self.received[path]).decode()}

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        self.read.append(path)
        return super().cat_file(path, *arguments, **options)


def begin(*, flips: str = "nothing", on_its_way: bool = False, empty: bool = True) -> None:
    """From here on `flipping://` is such a store, with nothing in it if `empty`."""
    fsspec.register_implementation("flipping", FlippingMemory, clobber=True)
    FlippingMemory.flips, FlippingMemory.on_its_way = flips, on_its_way
    FlippingMemory.read.clear()
    if empty:
        FlippingMemory.store.clear()
        FlippingMemory.received.clear()
