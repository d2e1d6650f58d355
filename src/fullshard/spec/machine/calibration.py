"""Calibration: the settings of `fullshard calibrate`, and its result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.value import FrozenModel, NonNegativeFloat, PositiveFloat

SETTINGS_NAME, RESULT_NAME = "calibrate.json", "calibration.json"


class CalibrationSettings(FrozenModel):
    """Settings of a calibration.

    seconds: approximate measuring time, excluding the start of the ranks
    drive: a directory on the drive to measure, as a path that is valid on every rank
    """

    seconds: PositiveFloat = 30.0
    drive: str = "."

    def save(self, directory: Path) -> None:
        Path(directory, SETTINGS_NAME).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads settings that `save` wrote. Raises SpecError if the file does not exist."""
        return cls.read_json(Path(directory, SETTINGS_NAME), what="the settings of a calibration")


class Calibration(FrozenModel):
    """Result of a calibration: the measured hardware, and the errors of its lines.

    fit_errors: for each collective (`within.all_gather`), the largest relative error of its fitted line over
        the measured sizes
    took_seconds: duration of the measurement
    """

    hardware: Hardware
    fit_errors: Mapping[str, NonNegativeFloat] = {}
    took_seconds: NonNegativeFloat = 0.0

    def save(self, directory: Path) -> None:
        Path(directory, RESULT_NAME).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads a result that `save` wrote. Raises SpecError if the file does not exist."""
        return cls.read_json(Path(directory, RESULT_NAME), what="the result of a calibration")
