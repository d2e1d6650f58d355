"""Compares the ranks' own times once per window of steps, and names those that hold the others up."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import has_backend, world_size
from fullshard.profiler.clock_offset import boot_id
from fullshard.profiler.recorded_step import OwnSeconds, RecordedStep, own_seconds
from fullshard.spec.straggler import StragglerCause
from fullshard.survival.link_probe import probe_links
from fullshard.survival.phase import RunPhase
from fullshard.survival.stragglers import RankWindow, Straggler, find_stragglers, spread_figures

LEAST_WINDOW, MOST_WINDOW = 4, 50
_PHASES = {
    StragglerCause.DATA: (RunPhase.DATA,),
    StragglerCause.FORWARD: (RunPhase.FORWARD,),
    StragglerCause.BACKWARD: (RunPhase.BACKWARD,),
    StragglerCause.OPTIMIZER: (RunPhase.REDUCE, RunPhase.OPTIMIZER),
}
# Saves are rare: the last few are compared, as soon as there are enough.
_SAVES, _LEAST_SAVES = 5, 3
# A window is slow if its steps take longer than the median of the last quiet ones by both.
_SLOWER, _SLOWER_SECONDS, _QUIET_WINDOWS = 1.15, 0.030, 5


_Gathering: TypeAlias = tuple[int, list[torch.Tensor], dist.Work | None]  # step, figures of each rank


@dataclass(frozen=True)
class WindowResult:
    """Figures of all ranks over the window of steps that ended with step `last_step`.

    waiting_seconds: waiting for other ranks, per step, of the median rank
    own_seconds: each rank's own time per step, in the order of ranks
    stragglers: the ranks that held the others up
    """

    last_step: int
    waiting_seconds: float
    own_seconds: tuple[float, ...]
    stragglers: tuple[Straggler, ...]


class StragglerWatch:
    """Gathers each rank's figures at the end of a window, and judges them a step later. Collective.

    every: steps of a window, which is at least LEAST_WINDOW
    device: of the ranks; links are probed there
    probes_links: whether links are probed where no rank has a reason for slow steps

    The gathering runs beside the next step: no rank waits for it. All ranks judge alike.
    """

    def __init__(self, *, every: int, device: torch.device, probes_links: bool = True) -> None:
        self.every = min(max(every, LEAST_WINDOW), MOST_WINDOW)
        self._device, self._host, self._probes_links = device, boot_id(), probes_links
        self._recent: deque[tuple[float, OwnSeconds]] = deque(maxlen=self.every)
        self._saves: deque[float] = deque(maxlen=_SAVES)
        self._has_new_save = False
        self._quiet: deque[float] = deque(maxlen=_QUIET_WINDOWS)
        self._gathering: _Gathering | None = None
        self._is_active = world_size() > 1 and has_backend("cpu")

    def add_steps(self, steps: Iterable[RecordedStep]) -> None:
        """Adds steps that were closed."""
        for step in steps:
            own = own_seconds(step)
            self._recent.append((step.seconds, own))
            if RunPhase.SAVING in own.by_phase:
                self._saves.append(own.by_phase[RunPhase.SAVING])
                self._has_new_save = True

    def exchange(self, step: int) -> WindowResult | None:
        """Returns the result of the window before, once, and gathers a window if it ends at `step`."""
        if not self._is_active:
            return None
        result = None
        if self._gathering is not None:
            result = self._judge_gathered(self._gathering)
            self._gathering = None
        if step % self.every == 0:
            own = torch.tensor(self._own_window().to_figures(), dtype=torch.float64)
            every = [torch.empty_like(own) for _ in range(world_size())]
            work = dist.all_gather(every, own, async_op=True)
            self._gathering = (step, every, work)
            self._has_new_save = False
        return result

    def forget(self) -> None:
        """Forgets the steps so far, because the run goes back."""
        self._recent.clear()

    def _own_window(self) -> RankWindow:
        owns = [own for _, own in self._recent]
        figures = {
            cause: spread_figures([sum(one.by_phase.get(phase, 0.0) for phase in phases) for one in owns])
            for cause, phases in _PHASES.items()
        }
        figures[StragglerCause.GARBAGE] = spread_figures([one.garbage for one in owns])
        figures[StragglerCause.PAUSE] = spread_figures([one.paused for one in owns])
        if self._has_new_save and len(self._saves) >= _LEAST_SAVES:
            figures[StragglerCause.SAVING] = spread_figures(self._saves)
        return RankWindow(
            steps=len(owns),
            step_seconds=median([seconds for seconds, _ in self._recent] or [0.0]),
            waiting_seconds=median([one.waiting for one in owns] or [0.0]),
            own=figures,
        )

    def _judge_gathered(self, gathering: _Gathering) -> WindowResult:
        step, figures, work = gathering
        if work is not None:
            work.wait()
        windows = [RankWindow.from_figures(one.tolist()) for one in figures]
        found = find_stragglers(windows)
        if not found and self._probes_links:
            found = self._find_slow_links(windows)
        return WindowResult(
            last_step=step,
            waiting_seconds=median(one.waiting_seconds for one in windows),
            own_seconds=tuple(one.own_seconds for one in windows),
            stragglers=tuple(found),
        )

    def _find_slow_links(self, windows: Sequence[RankWindow]) -> list[Straggler]:
        """Probes the links if the steps became slower and no rank has a reason for it. Collective."""
        seconds = median(one.step_seconds for one in windows)
        usual = median(self._quiet) if self._quiet else None
        is_slow = usual is not None and seconds > max(_SLOWER * usual, usual + _SLOWER_SECONDS)
        if usual is None or is_slow:
            links = probe_links(self._host, device=self._device)
            if links:
                excess = max(0.0, seconds - (usual or seconds))
                share = excess / seconds if seconds else 0.0
                return [Straggler(one.rank, StragglerCause.LINK, excess, share) for one in links]
            self._quiet.clear()  # this is the usual speed from now on, until it falls again
        self._quiet.append(seconds)
        return []
