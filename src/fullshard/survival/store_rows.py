"""Rows that all ranks append to one value of a store, so that a rank reads those of all in one request."""

from typing import Any

import torch.distributed as dist


def append_row(store: dist.Store, row: str, *, key: str) -> None:
    """Appends a row to the value of `key`, which one request reads whole, however many ranks append."""
    any_store: Any = store  # torch's stubs do not know `append`
    any_store.append(key, row)
    store.add(f"{key} count", 1)


def count_rows(store: dist.Store, key: str) -> int:
    return store.add(f"{key} count", 0)
