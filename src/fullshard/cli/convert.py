"""`fullshard convert`."""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.system.terminal import escape_control_characters, print_to_stderr

if TYPE_CHECKING:
    from fullshard.convert.conversion import Conversion


def convert(
    path: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="An Accelerate, axolotl or Trainer YAML, a DeepSpeed JSON or a torchtitan TOML.",
        ),
    ],
    *,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="accelerate, axolotl, deepspeed, torchtitan or trainer, if not detected.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks, if the file does not contain it.")
    ] = None,
) -> None:
    """Print another tool's config as a run.toml.

    What became of each of its keys is reported on standard error. The exit code is 2 if the
    run.toml lacks a strategy or a precision that the config requests, or trains in another way: another
    objective, optimizer, schedule, adapter, template or mask; or if a key is unknown.
    """
    from fullshard.convert.conversion import convert_config
    from fullshard.convert.rules import ConfigFormat
    from fullshard.errors import SpecError
    from fullshard.system.small_files import SETTINGS_BYTES, read_text

    try:
        text = read_text(path, most_bytes=SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text (UTF-8)"
        raise SpecError(f"{path} cannot be read.", got=reason) from error
    if format_name is not None and format_name.lower() not in set(ConfigFormat):
        raise SpecError("--from takes a format.", got=format_name, fix=", ".join(ConfigFormat))
    format = ConfigFormat(format_name.lower()) if format_name else None
    conversion = convert_config(text, name=Path(path).name, format=format, ranks=ranks)
    _report_key_verdicts(conversion)
    typer.echo(escape_control_characters(conversion.run_toml_text()), nl=False)
    if conversion.lost_keys:
        raise typer.Exit(SpecError.exit_code)


def _report_key_verdicts(conversion: "Conversion") -> None:
    """Prints to standard error what to decide, the verdict on each key, notes, and a count of verdicts."""
    from fullshard.convert.rules import KeyVerdict
    from fullshard.quantities import count_text
    from fullshard.report.table import show_labelled_lines

    for decision in conversion.decisions:
        print_to_stderr(f"decide: {decision}")
    lost_first = sorted(conversion.key_results, key=lambda one: not one.is_lost)
    show_labelled_lines(((one.key, one.verdict_text) for one in lost_first), file=sys.stderr)
    for note in conversion.notes:
        print_to_stderr(f"note: {note}")
    number = Counter(one.verdict for one in conversion.key_results)
    counts = ", ".join(f"{number[verdict]} {verdict}" for verdict in KeyVerdict if number[verdict])
    head = f"{conversion.name} ({conversion.format}): {count_text(len(conversion.key_results), 'key')}"
    print_to_stderr(f"{head}: {counts}")
    if conversion.lost_keys:
        lost = escape_control_characters(", ".join(conversion.lost_keys))
        print(f"run.toml does not train as these keys request: {lost}", file=sys.stderr)
