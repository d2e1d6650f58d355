"""Calibration: what `fullshard calibrate` is asked for, and what it found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from fullshard.spec.hardware import Hardware
from fullshard.spec.plan import Plan
from fullshard.spec.value import FrozenModel, NonNegativeFloat, PositiveFloat

SETTINGS_NAME, RESULT_NAME = "calibrate.json", "calibration.json"


class CalibrationSettings(FrozenModel):
    """`seconds`: about how long to measure, starting the ranks not counted. `drive`: a directory on the drive
    to be measured, as every rank finds it."""

    seconds: PositiveFloat = 36.0
    drive: str = "."

    def save(self, directory: Path) -> None:
        """Leaves it where every rank's job looks for it."""
        Path(directory, SETTINGS_NAME).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads what `save` left. Raises SpecError."""
        return cls.read_json(Path(directory, SETTINGS_NAME), what="what a calibration is asked for")


class MeasuredStep(FrozenModel):
    """The seconds of one step of a decoder, as `plan` runs it on these ranks."""

    plan: Plan
    seconds: PositiveFloat


class Calibration(FrozenModel):
    """`fit_errors`: for each collective (`within.all_gather`) the largest relative error of its line over the
    sizes that were measured. `steps`: whole steps that were measured too, `step_errors` what is predicted of
    them over what was measured, less 1. `took_seconds`: how long measuring took."""

    hardware: Hardware
    steps: tuple[MeasuredStep, ...] = ()
    step_errors: tuple[float, ...] = ()
    fit_errors: Mapping[str, NonNegativeFloat] = {}
    took_seconds: NonNegativeFloat = 0.0

    def save(self, directory: Path) -> None:
        Path(directory, RESULT_NAME).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """What `save` left. Raises SpecError where there is nothing."""
        return cls.read_json(Path(directory, RESULT_NAME), what="the result of a calibration")
