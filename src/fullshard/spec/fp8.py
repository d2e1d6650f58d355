"""Summary of which matrices of a model are multiplied in fp8, and why the others are not."""

from collections.abc import Sequence

from fullshard.quantities import format_count
from fullshard.spec.value import FrozenModel


class Fp8Share(FrozenModel):
    """Matrices of a model that are multiplied in fp8, or in bf16 for one reason.

    reason: why they stay in bf16; empty if they are in fp8
    matrices: number of parameters of two or more dimensions
    numel: number of their elements
    """

    reason: str = ""
    matrices: int
    numel: int


def fp8_summary_text(shares: Sequence[Fp8Share]) -> str:
    """Returns `14 of 16 matrices (87 % of their 1.2 M elements); in bf16: 2 embedding or head`."""
    inside = [share for share in shares if not share.reason]
    matrices, numel = sum(share.matrices for share in shares), sum(share.numel for share in shares)
    part = sum(share.numel for share in inside) / max(numel, 1)
    text = (
        f"{sum(share.matrices for share in inside)} of {matrices} matrices "
        f"({100 * part:.0f} % of their {format_count(numel)} elements)"
    )
    others = ", ".join(f"{share.matrices} {share.reason}" for share in shares if share.reason)
    return f"{text}; in bf16: {others}" if others else text
