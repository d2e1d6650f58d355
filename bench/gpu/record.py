"""The result of an item: a JSON file that its process rewrites after every figure, so that none is lost."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.spec.plan import Plan
from fullshard.system.files import write_file_atomically

Figures = dict[str, float]


@dataclass
class Record:
    """Results that an item's process has found so far.

    rows: each has a `name`, and `predicted` and `measured` figures by name (bytes, seconds, 1/s)
    details: anything else, as JSON values
    unavailable: why the item cannot be measured here; empty if it can
    """

    path: Path
    writes: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    unavailable: str = ""

    def add_row(
        self, name: str, *, predicted: Figures | None = None, measured: Figures | None = None
    ) -> None:
        """Adds figures to the row `name`, and saves. A row may get its measured figures later."""
        row = next((one for one in self.rows if one["name"] == name), None)
        if row is None:
            row = dict[str, Any](name=name, predicted={}, measured={})
            self.rows.append(row)
        row["predicted"].update(predicted or {})
        row["measured"].update(measured or {})
        self.save()

    def save(self) -> None:
        if self.writes:
            data = {"rows": self.rows, "details": self.details, "unavailable": self.unavailable}
            write_file_atomically(self.path, json.dumps(data))


def predicted_figures(plan: Plan) -> Figures:
    """Returns the plan's prediction as figures of a row; without seconds if the drive's rate is unknown."""
    prediction = plan.prediction
    assert prediction is not None, "the planner has predicted it"
    found = {"allocated_bytes": float(prediction.memory.total)}
    if plan.device == "cuda":
        found["reserved_bytes"] = prediction.total_reserved_bytes
    if prediction.has_complete_step_time:
        found["step_seconds"] = prediction.time.total
        found["tokens_per_second"] = prediction.tokens_per_second
        found |= {"mfu": prediction.mfu} if prediction.mfu is not None else {}
    return found
