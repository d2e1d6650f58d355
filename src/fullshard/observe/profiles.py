"""Profiles of sampled steps by torch's profiler, one file for each step and rank."""

import gc
import gzip
import os
import tempfile
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fullshard.errors import SpecError
from fullshard.parallel.mesh import RankInfo
from fullshard.report.profiled_step import ATTEMPT, ON_GPU, STEP_RANGE, parse_profile_json, profiled_step
from fullshard.spec.records.run_files import PROFILES
from fullshard.spec.records.step_spans import ProfiledStep
from fullshard.spec.run import LogSection
from fullshard.system.files import write_file_atomically

_SAMPLED = (10, 100)
"""Steps of an attempt that are sampled besides each `log.trace_every`-th."""
_LEAST = 4  # steps before a last step that is sampled: the second is metered, and caches get warm again
_MOST_KEPT = 10  # sampled steps of an attempt whose files are kept


class StepProfiler:
    """Profiles the steps that `log` chooses, on all ranks, and writes each to a file of its own.

    first_step: number of the attempt's first step
    last_step: number of the run's last step
    say: prints a message
    """

    def __init__(
        self,
        section: LogSection,
        directory: Path,
        *,
        ranks: RankInfo,
        attempt: int,
        first_step: int,
        last_step: int,
        say: Callable[[str], object],
    ) -> None:
        self._section, self._directory, self._attempt = section, directory, attempt
        self._rank, self._device = ranks.rank, ranks.device
        self._say, self._kept = say, deque[Path]()
        self._last_step = last_step
        self._sampled = {first_step + number - 1 for number in _SAMPLED}
        if first_step + _LEAST - 1 < last_step < min(self._sampled):
            self._sampled.add(last_step)
        self.last: ProfiledStep | None = None

    def is_due(self, step: int) -> bool:
        every = self._section.trace_every
        is_sampled = every > 0 and (step % every == 0 or step in self._sampled)
        return step <= self._last_step and (is_sampled or step in self._section.profile)

    @contextmanager
    def profile_step_to_file(self, step: int) -> Generator[None]:
        """Context whose block runs `step`, which is profiled. Sets `last`; None if that failed.

        Writes `profiles/step-<step>-rank-<rank>.json.gz`, which https://ui.perfetto.dev opens. Removes the
        oldest file of a sampled step beyond _MOST_KEPT. If the file cannot be written, the run continues.
        """
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it prints otherwise
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)  # work left running by the previous step is not counted
        is_chosen = step in self._section.profile
        with (
            profile(
                activities=activities,
                record_shapes=is_chosen,
                with_stack=is_chosen and self._rank == 0,
                acc_events=True,  # else torch 2.11 warns that events of other cycles are cleared
            ) as profiler,
            record_function(STEP_RANGE),
        ):
            profiler.add_metadata_json(ATTEMPT, str(self._attempt))
            profiler.add_metadata_json(ON_GPU, str(int(self._device.type == "cuda")))
            yield
        self.last = None
        path = self._directory / PROFILES / f"step-{step:08}-rank-{self._rank:05}.json.gz"
        try:
            self.last = self._write(profiler, path, step=step)
            if not is_chosen and path not in self._kept:
                self._kept.append(path)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popleft().unlink(missing_ok=True)
        except (OSError, SpecError) as error:
            act = "written" if isinstance(error, OSError) else "used"
            self._say(f"{path} cannot be {act}: {error}; the run continues without it")
        # The events refer to each other, so they would stay for up to 50 steps, and hide a leak.
        del profiler
        gc.collect()

    def _write(self, profiler: profile, path: Path, *, step: int) -> ProfiledStep:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            data = Path(file.name).read_bytes()
        path.parent.mkdir(exist_ok=True)
        write_file_atomically(path, gzip.compress(data, compresslevel=3))
        return profiled_step(parse_profile_json(data, name=str(path)), step=step, rank=self._rank)
