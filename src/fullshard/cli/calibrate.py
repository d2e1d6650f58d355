"""`fullshard calibrate`."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullshard.cli.options import AsJson, require_positive_number

if TYPE_CHECKING:
    from fullshard.launch.request import LaunchRequest
    from fullshard.spec.calibration import Calibration


def calibrate(
    *,
    ranks: Annotated[
        int, typer.Option("--ranks", min=0, help="Ranks on this machine; 0: one per GPU, or two on the CPU.")
    ] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="The device to measure.")
    ] = "auto",
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=0.1,
            callback=require_positive_number,
            help="Measuring time of an idle machine, besides the start; 30 by default.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="HARDWARE.toml", help="The file to write, if not the default one."),
    ] = None,
    drive: Annotated[
        Path, typer.Option("--drive", metavar="DIRECTORY", help="A directory on the drive to measure.")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Replace --out even if it is not a hardware.toml.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the rates of this machine, and write a hardware.toml.

    Under torchrun or srun, measures the cluster. `fullshard plan` and `fullshard train` use the rates. The
    default file is ~/.config/fullshard/hardware.toml, or the one that $FULLSHARD_HARDWARE names.
    """
    from fullshard.launch.scratch import temporary_private_directory
    from fullshard.launch.start import perform_request
    from fullshard.profiler.detect import user_hardware_path
    from fullshard.quantities import format_seconds
    from fullshard.spec.calibration import Calibration, CalibrationSettings
    from fullshard.system.targets import check_output_file

    started, path = time.monotonic(), out or user_hardware_path()
    check_output_file(path, is_kind=_is_hardware_file, force=force)
    _check_output_is_writable(path)
    _check_drive_is_directory(drive)
    _print_expected_duration(seconds or CalibrationSettings().seconds)
    with temporary_private_directory() as directory:
        own = {"drive": str(drive.absolute())} | ({} if seconds is None else {"seconds": seconds})
        CalibrationSettings.model_validate(own).save(directory)
        exit_code = perform_request(_build_calibration_request(directory, ranks=ranks, device=device))
        if exit_code == 0 and os.environ.get("RANK", "0") == "0":
            found = Calibration.load(directory)
            found.hardware.save(path)
            _print_result(found, as_json=as_json)
            typer.echo(
                f"written: {path}, {format_seconds(time.monotonic() - started)} after the start", err=True
            )
    raise typer.Exit(exit_code)


def _print_expected_duration(seconds: float) -> None:
    from fullshard.system.load import BUSY, busy_processor_fraction

    load = busy_processor_fraction()
    longer = (
        f", longer here: programs used {load:.0%} of the processors in the last minute"
        if load >= BUSY
        else ""
    )
    typer.echo(f"measuring for about {seconds:g} s{longer}", err=True)


def _print_result(found: "Calibration", *, as_json: bool) -> None:
    """Prints the calibration, and a note if the machine was busy."""
    from fullshard.report.calibration import calibration_rows
    from fullshard.report.table import show_labelled_lines

    if as_json:
        typer.echo(found.model_dump_json())
    else:
        show_labelled_lines(calibration_rows(found))
    if found.hardware.calibration == "busy":
        typer.echo(
            f"note: other programs used {found.hardware.calibration_load:.0%} of the processors while this "
            "measured, so the rates may be too low: plans with them are marked\n"
            "  try: fullshard calibrate again, when the machine is idle",
            err=True,
        )


def _is_hardware_file(path: Path) -> bool:
    """Returns True if the file is a hardware.toml, written by hand or measured."""
    from fullshard.spec.toml_file import read_toml
    from fullshard.system.targets import build_can_load_predicate

    return build_can_load_predicate(read_toml)(path) and "chip" in read_toml(path)


def _check_output_is_writable(path: Path) -> None:
    """Raises SpecError if `path` could not be written. This is checked before measuring for minutes."""
    from fullshard.errors import SpecError

    if path.parts[:1] == ("~",):
        raise SpecError(
            "there is no place for the hardware.toml.",
            got="no home: neither HOME nor an entry of this user in /etc/passwd",
            fix="--out FILE, and FULLSHARD_HARDWARE=FILE for the commands that read it",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.lstat()
    except OSError as error:
        fix = "another path for --out"
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix=fix) from error


def _check_drive_is_directory(directory: Path) -> None:
    from fullshard.errors import SpecError

    if not os.path.isdir(directory):
        raise SpecError(f"{directory} is not a directory.", got="--drive", fix="a directory on the drive")


def _build_calibration_request(directory: Path, *, ranks: int, device: str) -> "LaunchRequest":
    """Returns the job that measures on all ranks, as the request that `perform_request` takes."""
    from fullshard.launch.request import LaunchRequest
    from fullshard.spec.run import Run

    run = Run.load(overrides=[f"run.dir={directory}", f"run.device={device}", f"run.ranks={ranks}"])
    return LaunchRequest(run=run, job="fullshard.jobs.calibrate:run_calibration")
