"""Profiles of chosen steps and ranks by torch's profiler, with shapes, stacks and kernels."""

import gc
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fullshard.spec.run import LogSection
from fullshard.spec.run_files import PROFILES


@contextmanager
def profile_if_chosen(
    section: LogSection, step: int, *, rank: int, directory: Path, say: Callable[[str], object]
) -> Generator[None]:
    """Context whose block runs `step`, which is profiled if the section chooses it and this rank.

    Writes `profiles/step-<step>-rank-<rank>.json.gz` in `directory`, a trace for https://ui.perfetto.dev. If
    it cannot be written, `say` gets a message.
    """
    if step not in section.profile or rank not in section.profile_ranks:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as in `profiler.trace`: it prints otherwise
    devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(
        activities=[ProfilerActivity.CPU, *devices], record_shapes=True, with_stack=True, acc_events=True
    ) as profiler:
        yield
    path = directory / PROFILES / f"step-{step:08}-rank-{rank:05}.json.gz"
    try:
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}; the run continues without it")
    # The events refer to each other, so they would stay for up to 50 steps, and hide a leak.
    del profiler
    gc.collect()
