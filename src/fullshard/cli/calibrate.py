"""`fullshard calibrate`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullshard.cli.numbers import positive

if TYPE_CHECKING:
    from fullshard.launch.request import Request
    from fullshard.spec.calibration import Calibration


def calibrate(
    *,
    ranks: Annotated[
        int, typer.Option("--ranks", min=0, help="Ranks on this machine; 0: one a GPU, or two on the CPU.")
    ] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="What to measure.")
    ] = "auto",
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0.1, callback=positive, help="About how long to measure, if not 36."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="HARDWARE.toml", help="Where to; by default where plan and train look."
        ),
    ] = None,
    drive: Annotated[
        Path,
        typer.Option("--drive", metavar="DIRECTORY", help="On the drive to measure, as offload.path is."),
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Let --out replace a file that is not a hardware.toml.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All that was found, as JSON.")] = False,
) -> None:
    """Measure this machine, or under torchrun or srun the cluster, and write a hardware.toml.

    It contains the rates of matmuls, attention, memory, the optimizer, collectives, copies and the drive,
    each measured while all ranks work. `fullshard plan` and `fullshard train` use them. The default file is
    ~/.config/fullshard/hardware.toml, or the one that $FULLSHARD_HARDWARE names.
    """
    from fullshard.launch.scratch import private_directory
    from fullshard.launch.start import start
    from fullshard.profiler.detect import user_hardware_path
    from fullshard.report.calibration import calibration_table
    from fullshard.spec.calibration import Calibration, CalibrationSettings
    from fullshard.system.targets import require_file

    path = out or user_hardware_path()
    require_file(path, is_kind=_is_hardware, force=force)
    _require_directory(path)
    _require_drive(drive)
    with private_directory() as directory:
        own = {"drive": str(drive.absolute())} | ({} if seconds is None else {"seconds": seconds})
        settings = CalibrationSettings.model_validate(own)
        settings.save(directory)
        exit_code = start(_request(directory, ranks=ranks, device=device))
        if exit_code == 0 and os.environ.get("RANK", "0") == "0":
            found = _fitted(Calibration.load(directory))
            found.hardware.save(path)
            typer.echo(found.model_dump_json() if as_json else calibration_table(found))
            typer.echo(f"written: {path}", err=True)
    raise typer.Exit(exit_code)


def _is_hardware(path: Path) -> bool:
    """Returns True if the file is a hardware.toml, written by hand or measured."""
    from fullshard.spec.hardware_file import read_tables
    from fullshard.system.targets import read_by

    return read_by(read_tables)(path) and "chip" in read_tables(path)


def _require_directory(path: Path) -> None:
    """Raises SpecError if the result could not be written, before measuring for minutes."""
    from fullshard.errors import SpecError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.lstat()
    except OSError as error:
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix="another --out") from error


def _require_drive(directory: Path) -> None:
    from fullshard.errors import SpecError

    if not os.path.isdir(directory):
        raise SpecError(
            f"{directory} is not a directory.", got=f"--drive {directory}", fix="one that is on the drive"
        )


def _fitted(found: "Calibration") -> "Calibration":
    """Returns the calibration with the hardware that best predicts the measured whole steps."""
    from fullshard.planner.calibration_fit import StepSample, fitted
    from fullshard.planning.describe_run import describe_run

    seen = [
        StepSample(describe_run(step.plan, step.plan.device), step.plan, step.seconds) for step in found.steps
    ]
    fit = fitted(found.hardware, seen)
    return found.model_copy(update={"hardware": fit.hardware, "step_errors": fit.errors})


def _request(directory: Path, *, ranks: int, device: str) -> "Request":
    from fullshard.launch.request import Request
    from fullshard.spec.run import Run

    run = Run.load(overrides=[f"run.dir={directory}", f"run.device={device}", f"run.ranks={ranks}"])
    return Request(run=run, job="fullshard.jobs.calibrate:run_calibration")
