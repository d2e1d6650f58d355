"""The report of a rank that ran out of memory: the bytes that it held, beside the planned ones."""

from pathlib import Path
from typing import Self

from pydantic import AwareDatetime

from fullshard.quantities import format_bytes
from fullshard.spec.prediction import MemoryTerms
from fullshard.spec.value import FrozenModel, NonNegativeInt

# Parts that a rank can distinguish -> the terms of a plan that belong to each.
_TERMS_OF_PART = {
    "parameter_shards": ("parameter_shards",),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "buffers": ("buffers",),
}


class OutOfMemoryReport(FrozenModel):
    """A report of the memory that a rank held when an allocation failed.

    step: number of the step in which it failed, or of the next step
    phase: a RunPhase, such as `forward`
    place: innermost line of code outside libraries
    error: first line of the allocator's message
    requested_bytes: size of the allocation that failed; None if the message does not say
    held: bytes of live tensors by part: `parameter_shards`, `gradients`, `optimizer_state`, `buffers`, and
        `rest`, which is activations, gathered parameters and everything else; only `rest` before the model is
        built
    reserved_bytes: device memory that the allocator had reserved; None on the CPU
    free_bytes: memory that was left, by the driver or the system; None if unknown
    planned: the plan's terms at its peak; None without a prediction
    planned_limit_bytes: memory of the device by the plan
    snapshot: name of torch's snapshot of the allocator, for https://docs.pytorch.org/memory_viz
    """

    at: AwareDatetime
    rank: NonNegativeInt
    host: str
    device: str
    step: NonNegativeInt
    phase: str
    place: str
    error: str
    requested_bytes: NonNegativeInt | None = None
    held: dict[str, int]
    reserved_bytes: NonNegativeInt | None = None
    free_bytes: NonNegativeInt | None = None
    planned: MemoryTerms | None = None
    planned_limit_bytes: NonNegativeInt | None = None
    snapshot: str | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the report's JSON file. Raises SpecError."""
        return cls.read_json(path, what="a report about memory")

    @property
    def held_bytes(self) -> int:
        """Bytes of live tensors."""
        return sum(self.held.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes of live tensors and of the allocation that failed: the least that the rank needs."""
        return self.held_bytes + (self.requested_bytes or 0)

    @property
    def summary(self) -> str:
        """One line about the failed allocation."""
        asked = "" if self.requested_bytes is None else f"{format_bytes(self.requested_bytes)} more, "
        return f"{asked}while it held {format_bytes(self.held_bytes)} of tensors"

    def format_text(self) -> str:
        """Returns the report as lines of text, with a table of the bytes that were held and planned."""
        lines = [
            f"rank {self.rank} ({self.host}, {self.device}) ran out of memory in {self.phase} of step "
            f"{self.step}, {self.at:%Y-%m-%d %H:%M:%S} UTC",
            f"  asked for   {self.summary}",
            f"  where       {self.place}",
            f"  error       {self.error}",
        ]
        if self.reserved_bytes is not None:
            unused = max(0, self.reserved_bytes - self.held_bytes)
            text = f"{format_bytes(self.reserved_bytes)}, {format_bytes(unused)} of it not in tensors"
            lines.append(f"  reserved    {text}")
        if self.free_bytes is not None:
            lines.append(f"  left        {format_bytes(self.free_bytes)}")
        if self.snapshot is not None:
            lines.append(f"  snapshot    {self.snapshot}, for https://docs.pytorch.org/memory_viz")
        return "\n".join([*lines, "", *self._table_lines()]) + "\n"

    def _table_lines(self) -> list[str]:
        terms = {} if self.planned is None else self.planned.terms()
        rows = [("", "held", "planned at the peak")]
        counted = set[str]()
        for part, names in _TERMS_OF_PART.items():
            counted.update(names)
            if part in self.held:
                planned = sum(terms[name] for name in names) if terms else None
                rows.append(_row(part.replace("_", " "), held=self.held[part], planned=planned))
        rest = sum(value for name, value in terms.items() if name not in counted) if terms else None
        rows.append(_row("activations, rest", held=self.held.get("rest", 0), planned=rest))
        rows += [
            _row(f"  {name.replace('_', ' ')}", held=None, planned=value)
            for name, value in terms.items()
            if name not in counted and value
        ]
        rows.append(_row("in all", held=self.held_bytes, planned=sum(terms.values()) if terms else None))
        lines = [f"  {name:20} {held:>12} {planned:>22}".rstrip() for name, held, planned in rows]
        if self.planned is None:
            return [*lines, "", "The run has no prediction to compare with."]
        limit = "" if not self.planned_limit_bytes else f", of {format_bytes(self.planned_limit_bytes)}"
        return [*lines, "", f"The plan's peak is {format_bytes(sum(terms.values()))}{limit}. {self._cause()}"]

    def _cause(self) -> str:
        assert self.planned is not None, "the caller has checked it"
        if self.needed_bytes > 1.05 * self.planned.total:
            return "More was needed than planned: the model, the loss or the data holds tensors of its own."
        return "Less was available than planned: another process, or a limit on this one, holds the rest."


def _row(name: str, *, held: int | None, planned: int | None) -> tuple[str, str, str]:
    return (
        name,
        "" if held is None else format_bytes(held),
        "" if planned is None else format_bytes(planned),
    )
