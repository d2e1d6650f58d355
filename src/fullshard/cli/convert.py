"""`fullshard convert`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.options import AsJson
from fullshard.system.terminal import printable

if TYPE_CHECKING:
    from fullshard.convert.conversion import Conversion
    from fullshard.convert.reader import Format


def convert(
    path: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="An Accelerate YAML, a DeepSpeed JSON, a torchtitan TOML, Python that calls FSDP(...), "
            "fully_shard(...), Fabric(...) or FSDPStrategy(...) (read, never run); - for standard input.",
        ),
    ],
    *,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="accelerate, deepspeed, fsdp, lightning or torchtitan, if it is not detected.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks, if the file does not contain it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print another tool's config as a run.toml; report on standard error what became of each of its keys."""
    from fullshard.convert.conversion import convert as converted

    name = "standard input" if path == "-" else Path(path).name
    conversion = converted(_text(path), name=name, format=_format(format_name), ranks=ranks)
    if as_json:
        record: dict[str, object] = {
            "format": conversion.format,
            "keys": [one.model_dump(mode="json") for one in conversion.said],
            "notes": list(conversion.notes),
            "settings": conversion.settings,
            "run_toml": conversion.run_toml(),
        }
        typer.echo(printable(json.dumps(record, ensure_ascii=False)))
        return
    _show(conversion)
    typer.echo(printable(conversion.run_toml()), nl=False)


def _text(path: str) -> str:
    from fullshard.errors import SpecError
    from fullshard.spec.small_files import SETTINGS_BYTES, read_text

    try:
        if path != "-":
            return read_text(path, most_bytes=SETTINGS_BYTES)
        data = sys.stdin.buffer.read(SETTINGS_BYTES + 1)
        if len(data) > SETTINGS_BYTES:
            raise SpecError(
                "standard input is too long for a config.", got=f"more than {SETTINGS_BYTES} bytes"
            )
        return data.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text (UTF-8)"
        raise SpecError(f"{path} cannot be read.", got=reason) from error


def _format(name: str | None) -> "Format | None":
    from fullshard.convert.reader import Format
    from fullshard.errors import SpecError

    if name is None:
        return None
    if name.lower() not in set(Format):
        raise SpecError("--from takes a format.", got=name, fix=", ".join(Format))
    return Format(name.lower())


def _show(conversion: "Conversion") -> None:
    """Prints to standard error the verdict on each key, the notes, and the number of keys per verdict."""
    from fullshard.convert.reader import KeyVerdict
    from fullshard.report.table import show_rows

    show_rows(((one.key, one.text) for one in conversion.said), file=sys.stderr)
    for note in conversion.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    counts = ", ".join(f"{conversion.count(one)} {one}" for one in KeyVerdict if conversion.count(one))
    print(f"{conversion.name} ({conversion.format}): {len(conversion.said)} keys: {counts}", file=sys.stderr)
