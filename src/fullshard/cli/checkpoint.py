"""`fullshard ckpt list` and `fullshard ckpt export`."""

import json
from pathlib import Path
from typing import Annotated

import typer


def list_checkpoints(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, or its checkpoints.")],
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False,
) -> None:
    """List the checkpoints of a run, and which of them are whole."""
    from fullshard.checkpoint.manifest import step_directories
    from fullshard.errors import CheckpointError

    place = _checkpoints_in(directory)
    if not place.is_dir():
        raise CheckpointError(f"{place} is no directory.", fix="the run's directory, such as runs/default")
    rows = [_describe(path) for _, path in reversed(step_directories(place))]
    if as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        typer.echo(_table(rows))
    else:
        typer.echo(f"no checkpoint in {place}", err=True)


def export_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint; or a run's directory, for its newest."),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
) -> None:
    """Write the model of a checkpoint as one safetensors file."""
    from fullshard.checkpoint.export import export

    export(_checkpoints_in(source), target)
    typer.echo(f"{target}")


def _checkpoints_in(directory: Path) -> Path:
    """A run keeps its checkpoints in a directory of that name."""
    inner = directory / "checkpoints"
    return inner if inner.is_dir() else directory


def _describe(path: Path) -> dict[str, object]:
    """A row: `problem` is None where the checkpoint is whole."""
    from fullshard.checkpoint.manifest import verify
    from fullshard.errors import CheckpointError

    try:
        manifest = verify(path)
    except CheckpointError as error:
        return {"path": str(path), "problem": f"{error.got or error.what}"}
    return {
        "path": str(path),
        "problem": None,
        "step": manifest.step,
        "tokens": manifest.values.get("tokens"),
        "ranks": manifest.world_size,
        "bytes": sum(file.size_bytes for file in manifest.files.values()),
    }


def _table(rows: list[dict[str, object]]) -> str:
    from fullshard.quantities import format_bytes, format_count

    lines: list[str] = []
    for row in rows:
        name = Path(str(row["path"])).name
        if row["problem"] is not None:
            lines.append(f"{name}  not whole: {row['problem']}")
            continue
        tokens = row["tokens"]
        trained = format_count(tokens) if isinstance(tokens, int) else "?"
        size = format_bytes(int(str(row["bytes"])))
        lines.append(f"{name}  {trained:>6} tokens  {row['ranks']:>4} ranks  {size:>11}")
    return "\n".join(lines)
