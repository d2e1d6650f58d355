"""`fullshard version`."""

import json
import platform

import typer

import fullshard
from fullshard.cli.options import AsJson


def version(*, as_json: AsJson = False) -> None:
    """Show the versions of fullshard, torch and Python.

    `python -m torch.utils.collect_env` prints GPUs, drivers and packages, to paste into an issue.
    """
    import importlib.metadata  # slow to import, and only this verb needs it

    versions = {
        "fullshard": fullshard.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in versions.items()))
