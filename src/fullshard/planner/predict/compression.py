"""Bytes and memory traffic of [communication]: what a unit sends, and what is allocated beside it.

[Note: wires] w(n): bytes in which n elements are sent (`wire_bytes`; of a user's hook, its own). A rank's
shard of a unit has n elements, and W ranks shard it. r: rows that are decoded at once, at most 4 Mi elements.

gather    w(n) sent, W w(n) received, W n decoded; and 12 r n bytes of fp32 temporaries of decoding.
reduce    W w(n) sent in an all-to-all, as many received; 12 r n bytes of temporaries, and 4 n of the sum.
levels    the P ranks of a node sum first, for k nodes at once (4 Mi elements, or one node): P k n elements
          are sent within the node, as many received, and k n sums encoded. Then as above, for W / P ranks.

Each element is read and written by eager kernels: int8 is encoded with 45 bytes of traffic per element (69
rounded stochastically) and decoded with 21; bf16 takes 6 and 6. Counted from the operations, not measured.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from fullshard.spec.plan import ITEMSIZE, Dtype
from fullshard.spec.settings.communication_section import (
    CommunicationSection,
    Format,
    import_hook,
    rows_at_once,
    wire_bytes,
)

_TEMPORARY = 12
_made_hook = lru_cache(import_hook)  # a search asks it for bytes very often


class Wires(NamedTuple):
    """Costs of one collective of a unit that sends in a format of its own.

    sent: bytes of all ranks' parts: an all-gather's result, or what a rank sends in an all-to-all
    beside: bytes allocated beside FSDP2's buffers at the highest moment
    traffic: bytes that encoding and decoding read and write
    near: number of ranks of a node that sum gradients first; if it is over 1, `sent` counts what leaves nodes
    exchanges: number of all-to-alls within a node
    each: bytes that a rank sends in one of `exchanges`
    """

    sent: int
    beside: int
    traffic: int
    near: int = 1
    exchanges: int = 0
    each: float = 0.0


def gather_wires(section: CommunicationSection, n: int, *, ranks: int, dtype: Dtype) -> Wires | None:
    """Returns the costs of gathers of shards of `n` elements; None if they are sent as FSDP2 does."""
    size = _sent_bytes(section, n, kind=section.gather, dtype=dtype, method="gather")
    if size is None:
        return None
    received, decoded = ranks * size, ranks * n * ITEMSIZE[dtype]
    traffic = 2 * decoded + (45 * n + 21 * ranks * n if section.gather == "int8" else 6 * n * (1 + ranks))
    temporary = 0 if section.hook else _TEMPORARY * _elements_at_once(n, ranks)
    return Wires(received, received + decoded + temporary, traffic)


def reduce_wires(
    section: CommunicationSection, n: int, *, ranks: int, near: int, dtype: Dtype
) -> Wires | None:
    """Returns the costs of reductions to shards of `n` elements; None if they are sent as FSDP2 does.

    near: number of ranks of a node that sum gradients first; 1 if all ranks sum at once
    """
    kind, nodes = "auto" if near == ranks else section.reduce, ranks // near
    size = _sent_bytes(section, n, kind=kind, dtype=dtype, method="reduce")
    if size is None and section.reduce_within != "none":
        size = n * (ITEMSIZE[dtype] if near == 1 else 4)
    if size is None:
        return None
    sent = nodes * size
    temporary = 0 if section.hook else _TEMPORARY * _elements_at_once(n, nodes)
    traffic = (69 + 21 if kind == "int8" else 12) * nodes * n
    beside = sent + max(sent, temporary) + 4 * n
    if near == 1:
        return Wires(sent, beside, traffic)
    itemsize = 2 if section.reduce_within == "bf16" else ITEMSIZE[dtype]
    at_once = _elements_at_once(near * n, nodes)
    exchanges = -(-nodes // rows_at_once(near * n))
    inside = max(2 * itemsize * at_once, (4 + _TEMPORARY) * at_once // near)
    traffic += (12 * near + 4) * nodes * n
    each = itemsize * ranks * n / exchanges
    return Wires(sent, max(beside, inside + sent - sent // exchanges), traffic, near, exchanges, each)


def _sent_bytes(
    section: CommunicationSection, n: int, *, kind: Literal["auto"] | Format, dtype: Dtype, method: str
) -> int | None:
    if section.hook is not None:
        hook = _made_hook(section.hook)
        return hook.wire_bytes(n, dtype) if hasattr(hook, method) else None
    return None if kind == "auto" else wire_bytes(kind, n)


def _elements_at_once(n: int, ranks: int) -> int:
    return n * min(ranks, rows_at_once(n))
