"""[communication], and the bytes that its formats send."""

from typing import Any, Literal, Self

from pydantic import model_validator

from fullshard.errors import SpecError
from fullshard.spec import value
from fullshard.system.dotted import import_callable

Format = Literal["bf16", "int8"]
BLOCK = 256
"""Elements of an int8 tensor with one scale."""


class CommunicationSection(value.FrozenModel):
    """Settings of what is sent between ranks that shard parameters. See docs/communication.md.

    `gather`: format of gathered parameters; `auto` sends them in the dtype of computing
    `reduce`: format of gradients on their way to the ranks that sum them, in fp32; `auto` sends and sums them
        in the dtype of `precision.mode`. int8 is rounded stochastically.
    `reduce_within`: sums gradients over the ranks of each node first, and sends only these sums to other
        nodes, in the format of `reduce`. Within nodes, `fp32` sends gradients in the dtype of the
        reduction, which is bf16 only in the mode `bf16_reduce`; `bf16` sends them in bf16.
    `ranks_per_node`: size of a node for `reduce_within`; `auto`: that of the plan's hardware, otherwise
        LOCAL_WORLD_SIZE
    `hook`: `package.module:Class` of your own, which gathers and reduces instead
    """

    gather: Literal["auto"] | Format = "auto"
    reduce: Literal["auto"] | Format = "auto"
    reduce_within: Literal["none", "fp32", "bf16"] = "none"
    ranks_per_node: Literal["auto"] | value.PositiveInt = "auto"
    hook: str | None = None

    @property
    def is_set(self) -> bool:
        """True if anything is sent in another way than FSDP2's."""
        return self.hook is not None or self.gather != "auto" or self.changes_sums

    @property
    def changes_sums(self) -> bool:
        """True if `reduce` or `reduce_within` replaces FSDP2's reduction."""
        return (self.reduce, self.reduce_within) != ("auto", "none")

    @model_validator(mode="after")
    def _check_hook_is_alone(self) -> Self:
        if self.hook is not None and (self.gather != "auto" or self.changes_sums):
            raise ValueError(
                f'hook = "{self.hook}" gathers and reduces: leave out gather, reduce, reduce_within'
            )
        return self


def import_hook(dotted: str) -> Any:
    """Returns an instance of the class `package.module:Class`. Raises SpecError unless it is a hook."""
    made = import_callable(dotted, key="communication.hook")()
    methods = {name for name in ("gather", "reduce", "wire_bytes") if callable(getattr(made, name, None))}
    if not methods & {"gather", "reduce"} or "wire_bytes" not in methods:
        raise SpecError(
            f"communication.hook = {dotted!r} is not a hook.",
            got=f"an object with {', '.join(sorted(methods)) or 'none of its methods'}",
            fix="gather(shard, group) or reduce(parts, group), and wire_bytes(n, dtype)",
        )
    return made


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
