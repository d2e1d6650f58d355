"""[data]: what a run trains on."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from fullshard.spec.value import Fraction, Value


class DataSection(Value):
    """`source`: `stdlib` is the standard library of the interpreter that runs; `text` reads `paths`."""

    source: Literal["stdlib", "text"] = "stdlib"
    paths: tuple[str, ...] = ()
    sequence_length: PositiveInt = 64
    validation_fraction: Fraction = 0.05

    @model_validator(mode="after")
    def _paths_fit(self) -> Self:
        if self.source == "text" and not self.paths:
            raise ValueError('source = "text" needs paths = ["data/*.txt"]')
        if self.source == "stdlib" and self.paths:
            raise ValueError('paths are given, but source is "stdlib"; set source = "text"')
        return self
