"""[communication], and the bytes that its formats send."""

from typing import Literal, Self

from pydantic import model_validator

from fullshard.spec import value

Format = Literal["bf16", "int8"]
BLOCK = 256
"""Elements of an int8 tensor with one scale."""


class CommunicationSection(value.FrozenModel):
    """Settings of what is sent between ranks that shard parameters. See docs/communication.md.

    `gather`: format of gathered parameters; `auto` sends them in the dtype of computing
    `reduce`: format of gradients on their way to the ranks that sum them, in fp32; `auto` sends and sums them
        in the dtype of `precision.mode`. int8 is rounded stochastically.
    `hook`: `package.module:Class` of your own, which gathers and reduces instead
    """

    gather: Literal["auto"] | Format = "auto"
    reduce: Literal["auto"] | Format = "auto"
    hook: str | None = None

    @property
    def is_set(self) -> bool:
        """True if anything is sent in another way than FSDP2's."""
        return self.hook is not None or (self.gather, self.reduce) != ("auto", "auto")

    @model_validator(mode="after")
    def _check_hook_is_alone(self) -> Self:
        if self.hook is not None and (self.gather, self.reduce) != ("auto", "auto"):
            raise ValueError(f'hook = "{self.hook}" gathers and reduces: leave gather and reduce out')
        return self


def rows_at_once(n: int) -> int:
    """Returns how many rows of `n` elements are encoded or decoded at once: of at most 4 Mi elements, or one.

    It bounds their temporaries in fp32.
    """
    return max(1, (1 << 22) // max(n, 1))


def wire_bytes(kind: Format, n: int) -> int:
    """Returns the bytes in which `n` elements are sent: 2 n in bf16; in int8, codes and a scale per BLOCK.

    int8: 4 * ceil(n / 256) + n, rounded up to a multiple of 4.
    """
    return 2 * n if kind == "bf16" else 4 * -(-n // BLOCK) + 4 * -(-n // 4)
