"""Prefetch distance of all-gathers."""

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from fullshard.spec.run import PrefetchSection


def apply_prefetch(units: Sequence[FSDPModule], section: PrefetchSection) -> None:
    """Sets the prefetch of `units`, given in order of use.

    Number of units unsharded at once, besides the root and units kept unsharded:

        none                     1
        implicit                 2: FSDP2 overlaps the next one
        explicit with depth k    k + 1
    """
    if section.mode == "implicit":
        return
    forward, backward = (0, 0) if section.mode == "none" else (section.forward, section.backward)
    for i, unit in enumerate(units):
        # An empty list would restore FSDP2's default. The unit itself is gathered already when FSDP2 reads
        # the list, so that listing it prefetches nothing.
        unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + forward]) or [unit])
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(i - backward, 0) : i])) or [unit])
        if section.mode == "none" and hasattr(unit, "_set_unshard_async_op"):
            # Issues the all-gather on the compute stream, so that the next one cannot run ahead of it.
            unit._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]
