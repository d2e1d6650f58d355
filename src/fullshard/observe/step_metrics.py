"""Figures of one step, which are the columns of `metrics.jsonl`."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one finished step, over all ranks. None means not measured in this step.

    seconds: duration of the step (on rank 0)
    data_seconds: the part of `seconds` spent waiting for data (on rank 0)
    compile_seconds: the part of `seconds` spent in torch.compile (on rank 0)
    tokens, trained_tokens: see `fullshard.training.figures.StepResult`
    mfu: model FLOPs utilisation, from 0 to 1
    peak_bytes: peak memory of the rank that uses most
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    trained_tokens: int | None = None
    data_seconds: float | None = None
    compile_seconds: float | None = None
    skipped: bool = False
    mfu: float | None = None
    peak_bytes: int | None = None

    @property
    def seconds_without_compiling(self) -> float:
        """Duration of the step without torch.compile's work, which later steps do not repeat."""
        return max(0.0, self.seconds - (self.compile_seconds or 0.0))

    @property
    def tokens_per_second(self) -> float:
        """Computed tokens per second of all ranks together."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def measured_values(self) -> dict[str, float]:
        """Returns the fields that are not None and `tokens_per_second`, by name, without `step`."""
        fields = asdict(self) | {"tokens_per_second": self.tokens_per_second}
        return {name: value for name, value in fields.items() if value is not None and name != "step"}
