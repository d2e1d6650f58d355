"""`fullshard calibrate`."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullshard.cli.options import require_positive_number
from fullshard.quantities import count_text, format_decimal
from fullshard.system.terminal import escape_to_single_line

if TYPE_CHECKING:
    from fullshard.spec.machine.hardware import Curve, Hardware


Drive = Annotated[
    Path,
    typer.Option(metavar="DIRECTORY", exists=True, file_okay=False, help="On the drive to measure."),
]


def calibrate(
    *,
    ranks: Annotated[
        int, typer.Option("--ranks", min=0, help="Ranks on this machine; 0: one per GPU, or two on the CPU.")
    ] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="The device to measure.")
    ] = "auto",
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=0.1,
            max=3600,
            callback=require_positive_number,
            help="Measuring time of an idle machine, besides the start.",
        ),
    ] = 30.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="HARDWARE.toml", help="The file to write, if not the default one."),
    ] = None,
    drive: Drive = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Replace --out even if it is not a hardware.toml.")
    ] = False,
) -> None:
    """Measure the rates of this machine, and write a hardware.toml.

    The machine should be idle. Under torchrun or srun, measures the cluster. `fullshard plan` and
    `fullshard train` use the rates. The default file is ~/.config/fullshard/hardware.toml, or the one that
    $FULLSHARD_HARDWARE names.
    """
    from fullshard.launch.calibration import measure_with_ranks
    from fullshard.launch.detect import user_hardware_path
    from fullshard.report.table import show_labelled_lines
    from fullshard.system.targets import check_output_file

    path = out or user_hardware_path()
    check_output_file(path, is_kind=_is_hardware_file, force=force)
    _create_output_directory(path)
    typer.echo(f"measuring for about {seconds:g} s", err=True)
    exit_code, found = measure_with_ranks(ranks, device=device, seconds=seconds, drive=drive)
    if found is not None:
        found.save(path)
        show_labelled_lines(calibration_rows(found))
        typer.echo(escape_to_single_line(f"written: {path}"), err=True)
    raise typer.Exit(exit_code)


def _is_hardware_file(path: Path) -> bool:
    from fullshard.system.small_files import read_toml
    from fullshard.system.targets import make_load_predicate

    return make_load_predicate(read_toml)(path) and "chip" in read_toml(path)


def _create_output_directory(path: Path) -> None:
    """Creates the directory of `path`. Raises SpecError if this fails, rather than after the measurement."""
    from fullshard.errors import SpecError
    from fullshard.system.targets import convert_write_errors

    if path.parts[:1] == ("~",):
        raise SpecError(
            "there is no place for the hardware.toml.",
            got="no home: neither HOME nor an entry of this user in /etc/passwd",
            fix="--out FILE, and FULLSHARD_HARDWARE=FILE for the commands that read it",
        )
    with convert_write_errors(path, fix="another path for --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.lstat()


def calibration_rows(hardware: "Hardware") -> Iterator[tuple[str, str]]:
    """Yields (label, text) lines: the best rates of matmuls, memory, links and drive. The file has all."""
    ranks = count_text(hardware.ranks_per_node, "rank")
    nodes = f" on each of {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    yield "hardware", f"{hardware.name}, {ranks}{nodes}; all ranks at once, rates per rank:"
    for dtype, curve in hardware.rates.matmul.items():
        yield f"matmul {dtype}", _best_rate_text(curve, unit="FLOP")
    yield "memory", _best_rate_text(hardware.rates.memory, unit="B")
    for axis, link in (("within", hardware.within), ("across", hardware.across)):
        for kind, rate in link.known_rates.items() if link is not None else ():
            if rate.curve is not None:
                yield f"{kind.replace('_', '-')} {axis}", _best_rate_text(rate.curve, unit="B")
    if hardware.disk_bytes_per_second is not None:
        yield "drive, reading and writing", f"{format_decimal(hardware.disk_bytes_per_second)}B/s"


def _best_rate_text(curve: "Curve", *, unit: str) -> str:
    best = max(curve, key=lambda point: point.rate)
    return f"{format_decimal(best.rate)}{unit}/s at {format_decimal(best.size)}{unit} a launch"
