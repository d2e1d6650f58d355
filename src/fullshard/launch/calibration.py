"""Starts the ranks that measure this machine: for `fullshard calibrate`, and before a first run."""

import os
from pathlib import Path
from typing import Literal

from fullshard.errors import FullshardError
from fullshard.launch.detect import kept_measurement_path
from fullshard.launch.environment import is_started_by_torchrun
from fullshard.launch.request import LaunchRequest
from fullshard.launch.start import perform_request, temporary_private_directory
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.run import Run
from fullshard.system.terminal import print_to_stderr

SECONDS = 3.0


def measure_unless_known(known: Hardware) -> Hardware:
    """Returns `known`, which `detect_hardware` found, or what CPU ranks without known rates measure now.

    The measurement takes SECONDS besides the start of the ranks, and is kept if the machine was idle.
    Nothing is measured under torchrun, or if FULLSHARD_CALIBRATION=off. If it fails, the rates stay
    unknown, which a line reports.
    """
    if known.device != "cpu" or known.calibration != "none" or is_started_by_torchrun():
        return known
    kept = kept_measurement_path(known.ranks_per_node)
    if kept is None:
        return known
    print_to_stderr(f"measuring this machine for {SECONDS:g} s, before its first run …")
    exit_code, measured = measure_with_ranks(known.ranks_per_node, device="cpu", seconds=SECONDS)
    if exit_code > 128:  # a signal, which ends the command
        raise SystemExit(exit_code)
    if measured is None:
        print_to_stderr(
            f"note: the measurement failed (exit code {exit_code}), so plans have another machine's rates"
        )
        return known
    if measured.is_busy:
        print_to_stderr("note: other programs were running, so these rates are used once and not kept")
        return measured
    try:
        measured.save(kept)
    except FullshardError as error:
        print_to_stderr(f"note: these rates are used once and not kept: {error.what}")
    else:
        print_to_stderr(f"rates kept in {kept}")
    return measured


def measure_with_ranks(
    ranks: int, *, device: Literal["auto", "cpu", "cuda"], seconds: float, drive: Path | None = None
) -> tuple[int, Hardware | None]:
    """Runs the calibration on all ranks. Returns the launch's exit code and the measured hardware.

    ranks: number of ranks; 0 for the usual one
    drive: a directory on the drive to measure; None to measure no drive

    The hardware is None if the launch failed, and on other ranks than the first.
    """
    with temporary_private_directory() as name:
        run = Run.load(overrides=[f"run.dir={name}", f"run.device={device}", f"run.ranks={ranks}"])
        out = Path(name, "hardware.toml")
        arguments: dict[str, str | float] = {"seconds": seconds, "out": str(out)}
        arguments |= {} if drive is None else {"drive": str(drive.absolute())}
        job = "fullshard.jobs.calibrate.job:run_calibration"
        exit_code = perform_request(LaunchRequest(run=run, job=job, arguments=arguments))
        is_first = os.environ.get("RANK", "0") == "0"
        return exit_code, Hardware.load(out) if exit_code == 0 and is_first else None
