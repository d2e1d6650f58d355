"""A short calibration of CPU ranks, before the first run on a machine is planned."""

import sys
from contextlib import suppress
from pathlib import Path

from fullshard.errors import FullshardError
from fullshard.launch.detect import detect_hardware, kept_measurement_path
from fullshard.launch.environment import is_started_by_torchrun
from fullshard.launch.request import LaunchRequest
from fullshard.launch.start import perform_request, temporary_private_directory
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import DeviceType
from fullshard.spec.run import Run
from fullshard.system.terminal import escape_control_characters

SECONDS = 3.0


def detect_or_measure_hardware(device: DeviceType, *, ranks: int | None) -> Hardware:
    """Returns this machine's hardware, as `detect_hardware`. Measures CPU ranks without known rates first.

    The measurement takes SECONDS besides the start of `ranks` processes, and is kept if the machine was idle.
    Nothing is measured under torchrun, or if FULLSHARD_CALIBRATION=off. If it fails, the rates stay unknown.
    """
    known = detect_hardware(device, ranks=ranks)
    if known.device != "cpu" or known.calibration != "none" or is_started_by_torchrun():
        return known
    kept = kept_measurement_path(known.ranks_per_node)
    if kept is None:
        return known
    print(f"measuring this machine for {SECONDS:g} s, before its first run …", file=sys.stderr, flush=True)
    measured = _measure(known.ranks_per_node)
    if measured is None:
        return known
    if measured.is_busy:
        print(
            "note: other programs were running, so these rates are used once and not kept",
            file=sys.stderr,
            flush=True,
        )
    else:
        with suppress(FullshardError):
            measured.save(kept)
            print(f"rates kept in {escape_control_characters(str(kept))}", file=sys.stderr, flush=True)
    return measured


def _measure(ranks: int) -> Hardware | None:
    """Returns the measured hardware of `ranks` CPU ranks; None if it failed. A signal ends the command."""
    with temporary_private_directory() as name:
        run = Run.load(overrides=[f"run.dir={name}", "run.device=cpu", f"run.ranks={ranks}"])
        out = Path(name, "hardware.toml")
        arguments = {"seconds": SECONDS, "out": str(out)}
        job = "fullshard.jobs.calibrate.job:run_calibration"
        exit_code = perform_request(LaunchRequest(run=run, job=job, arguments=arguments))
        if exit_code > 128:
            raise SystemExit(exit_code)
        return Hardware.load(out) if exit_code == 0 else None
