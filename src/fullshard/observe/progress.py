"""Progress of rank 0 on standard error: a line every `log.every` steps."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from fullshard.observe.step_metrics import StepMetrics
from fullshard.quantities import format_bytes, format_count, format_seconds, format_trained_token_share
from fullshard.system.terminal import escape_control_characters

# Number of steps for speed and time left: enough for a steady figure, few enough to follow a change.
RECENT_STEPS = 20


class RunProgress:
    """The progress of a run: its last step, its recent speed, and the time left."""

    def __init__(self, *, steps: int, world_size: int, now: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.world_size, self._now = steps, world_size, now
        self._recent: deque[tuple[float, StepMetrics]] = deque(maxlen=RECENT_STEPS)

    def add_step(self, metrics: StepMetrics) -> None:
        self._recent.append((self._now(), metrics))

    @property
    def recent_tokens_per_second(self) -> float:
        """Tokens per second of all ranks together, over the recent steps, without compiling."""
        seconds = sum(metrics.seconds_without_compiling for _, metrics in self._recent)
        return sum(metrics.tokens for _, metrics in self._recent) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """Estimated seconds to the last step, from recent wall-clock time, with validations and saves.

        Compiling is left out.
        """
        (first, earliest), (last, metrics) = self._recent[0], self._recent[-1]
        between = len(self._recent) - 1
        if not between:
            return (self.steps - metrics.step) * metrics.seconds_without_compiling
        compiling = sum(one.compile_seconds or 0.0 for _, one in self._recent)
        seconds = last - first - (compiling - (earliest.compile_seconds or 0.0))
        return (self.steps - metrics.step) * max(0.0, seconds) / between

    def status_line_parts(self) -> list[str]:
        last, rate = self._recent[-1][1], self.recent_tokens_per_second
        total = f"{format_count(rate)} tokens/s"
        if self.world_size > 1:
            total += f" = {self.world_size} x {format_count(rate / self.world_size)}"
        texts = [f"step {last.step}/{self.steps}", f"loss {last.loss:.4f}"]
        texts += ["SKIPPED"] if last.skipped else []
        texts += [f"norm {last.grad_norm:.3g}", f"lr {last.learning_rate:.2e}", total]
        tokens = sum(metrics.tokens for _, metrics in self._recent)
        trained = [m.trained_tokens for _, m in self._recent if m.trained_tokens is not None]
        share = sum(trained) / tokens if tokens and len(trained) == len(self._recent) else None
        texts += [text] if (text := format_trained_token_share(share)) else []
        if last.mfu is not None and last.tokens_per_second:
            texts.append(f"MFU {100 * last.mfu * rate / last.tokens_per_second:.1f} %")
        texts += [f"peak {format_bytes(last.peak_bytes)}"] if last.peak_bytes is not None else []
        if last.step < self.steps:
            texts.append(f"{format_seconds(max(self.seconds_left, 1.0))} left")
        return texts


class ProgressPrinter:
    """Prints the progress of a run: the first and last step, every `every`-th step, and skipped steps.

    If the terminal or the reader is gone, the run continues.
    """

    def __init__(self, course: RunProgress, *, every: int, file: TextIO) -> None:
        self._course, self._every, self._file = course, every, file
        self._has_shown = False

    def add_step_and_show_if_due(self, metrics: StepMetrics) -> None:
        self._course.add_step(metrics)
        is_due = not self._has_shown or metrics.step % self._every == 0 or metrics.skipped
        if is_due or metrics.step == self._course.steps:
            self._has_shown = True
            self.print_line("  ".join(self._course.status_line_parts()))

    def print_line(self, text: str) -> None:
        with suppress(OSError):
            print(escape_control_characters(text), file=self._file, flush=True)
