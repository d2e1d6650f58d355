"""`fullshard version`."""

import json
import platform
from typing import Annotated

import typer

import fullshard
from fullshard.cli.options import AsJson


def version(
    *,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also GPUs, drivers, packages, memory, drive, variables: for issues."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the versions of fullshard, torch and Python.

    With --all, shows a report of the environment to paste into an issue. Values of variables that may be
    secret are left out.
    """
    import importlib.metadata  # slow to import, and only this verb needs it

    versions = {
        "fullshard": fullshard.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }
    if everything:
        from fullshard.checks.environment_report import environment_report
        from fullshard.checks.machine_access import MachineAccess

        versions |= environment_report(MachineAccess())
    if as_json:
        typer.echo(json.dumps(versions))
    elif everything:
        from fullshard.report.table import show_labelled_lines

        show_labelled_lines(versions.items())
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in versions.items()))
