"""Compares the ranks' own times once per window of steps, and names those that hold the others up."""

import time
from collections import deque
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import has_backend, world_size
from fullshard.distributed.ranges import OwnClock, OwnSeconds
from fullshard.observe.run_log import RunLog
from fullshard.observe.stragglers import (
    RankWindow,
    Straggler,
    StragglerCause,
    find_stragglers,
    spread_figures,
)
from fullshard.quantities import format_seconds
from fullshard.spec.records.step_spans import ProfiledStep
from fullshard.survival.phase import RunPhase

LEAST_WINDOW, MOST_WINDOW = 4, 50
MOST_LISTED_RANKS = 512
"""Ranks up to which metrics.jsonl lists the own seconds of each."""
_COMPUTING = {
    StragglerCause.FORWARD: (RunPhase.FORWARD,),
    StragglerCause.BACKWARD: (RunPhase.BACKWARD,),
    StragglerCause.OPTIMIZER: (RunPhase.REDUCE, RunPhase.OPTIMIZER),
}
_DEVICE_WORK = {
    StragglerCause.FORWARD: ("forward",),
    StragglerCause.BACKWARD: ("backward",),
    StragglerCause.OPTIMIZER: ("norm", "update"),
}
# Saves are rare: the last few are compared, as soon as there are enough.
_SAVES, _LEAST_SAVES = 5, 3

_Gathering: TypeAlias = tuple[int, list[torch.Tensor], dist.Work | None]  # last step, figures of each rank


class StragglerWatch:
    """Gathers each rank's figures at the end of a window, and judges them a step later. Collective.

    clock: of this rank's own seconds
    device: of the ranks

    On a GPU, the host's time in forward and backward says nothing, so the kernels of the last profiled step
    count. The gathering runs beside the next step: no rank waits for it. All ranks judge alike.
    """

    def __init__(self, clock: OwnClock, *, log: RunLog, device: torch.device) -> None:
        self.every = min(max(log.every, LEAST_WINDOW), MOST_WINDOW)
        self._clock, self._log, self._is_on_host = clock, log, device.type == "cpu"
        self._recent: deque[tuple[float, OwnSeconds]] = deque(maxlen=self.every)
        self._saves: deque[float] = deque(maxlen=_SAVES)
        self._has_new_save, self._profiled = False, dict[str, float]()
        self._gathering: _Gathering | None = None
        self._is_active = world_size() > 1 and has_backend("cpu")
        self._held_up: set[tuple[int, StragglerCause]] = set()
        self._since = time.perf_counter()

    def observe_step(self, step: int) -> tuple[Straggler, ...] | None:
        """Observes a step that was run. Returns the stragglers of the window before, once, or None."""
        now, own = time.perf_counter(), self._clock.take_seconds()
        self._recent.append((now - self._since, own))
        self._since = now
        if RunPhase.SAVING in own.by_phase:
            self._saves.append(own.by_phase[RunPhase.SAVING])
            self._has_new_save = True
        if not self._is_active:
            return None
        named = None if self._gathering is None else self._judge_gathered(self._gathering)
        self._gathering = None
        if step % self.every == 0:
            figures = torch.tensor(self._own_window().to_figures(), dtype=torch.float64)
            every = [torch.empty_like(figures) for _ in range(world_size())]
            self._gathering = (step, every, dist.all_gather(every, figures, async_op=True))
            self._has_new_save, self._profiled = False, {}
        return named

    def note_profiled(self, step: ProfiledStep) -> None:
        """Notes the work of a device in a profiled step."""
        self._profiled = {} if self._is_on_host else step.seconds_by_name()

    def forget(self) -> None:
        """Forgets the steps so far, because the run goes back."""
        self._recent.clear()

    def _own_window(self) -> RankWindow:
        owns = [own for _, own in self._recent]
        causes = {StragglerCause.DATA: (RunPhase.DATA,)} | (_COMPUTING if self._is_on_host else {})
        figures = {
            cause: spread_figures([sum(one.by_phase.get(phase, 0.0) for phase in phases) for one in owns])
            for cause, phases in causes.items()
        }
        if self._profiled:
            figures |= {
                cause: spread_figures([sum(self._profiled.get(name, 0.0) for name in names)])
                for cause, names in _DEVICE_WORK.items()
            }
        figures[StragglerCause.GARBAGE] = spread_figures([one.garbage for one in owns])
        if self._has_new_save and len(self._saves) >= _LEAST_SAVES:
            figures[StragglerCause.SAVING] = spread_figures(self._saves)
        return RankWindow(
            steps=len(owns),
            step_seconds=median([seconds for seconds, _ in self._recent]),
            waiting_seconds=median([one.waiting for one in owns]),
            own=figures,
        )

    def _judge_gathered(self, gathering: _Gathering) -> tuple[Straggler, ...]:
        """Records the figures of a window, and the ranks that begin or cease to hold the others up in it."""
        last_step, figures, work = gathering
        if work is not None:
            work.wait()
        windows = [RankWindow.from_figures(one.tolist()) for one in figures]
        waiting, own = median(one.waiting_seconds for one in windows), [one.own_seconds for one in windows]
        stragglers = find_stragglers(windows)
        recorded: dict[str, object] = {"waiting_seconds": round(waiting, 6)}
        if len(own) <= MOST_LISTED_RANKS:
            recorded["own_seconds"] = [round(one, 6) for one in own]
        tracked = {"waiting_seconds": waiting, "own_seconds_most": max(own)}
        for one in stragglers:
            tracked |= {"straggler_rank": one.rank, f"straggler_seconds/{one.cause}": one.seconds}
        self._log.record_window(recorded, tracked=tracked)
        before, first = self._held_up, last_step - self.every + 1
        self._held_up = {(one.rank, one.cause) for one in stragglers}
        for rank, cause in sorted(before - self._held_up):
            self._log.record_event("straggler_over", step=first, details={"rank": rank, "cause": cause})
        for one in stragglers:
            if (one.rank, one.cause) not in before:
                self._log.print_message(straggler_text(one, step=last_step))
                details = {"rank": one.rank, "cause": one.cause, "from_step": first}
                details |= {"seconds": one.seconds, "share": one.share}
                self._log.record_event("straggler", step=last_step, details=details)
        return tuple(stragglers)


def straggler_text(one: Straggler, *, step: int) -> str:
    """Returns the message about a rank that holds the others up."""
    per_step = f"{format_seconds(one.seconds)} per step ({100 * one.share:.0f} %)"
    return f"step {step}: rank {one.rank} holds the others up: {one.cause}, {per_step}"
