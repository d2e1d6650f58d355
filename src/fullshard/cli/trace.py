"""`fullshard trace`."""

from pathlib import Path
from typing import Annotated

import typer

from fullshard.system.terminal import escape_control_characters


def trace(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, such as runs/default.")
    ],
    *,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=1, help="The step; by default, the last one.")
    ] = None,
    path: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The trace; smaller if its name ends in .gz.")
    ] = Path("trace.json.gz"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not such a trace.")] = False,
) -> None:
    """Write a profiled step of all ranks as a trace for Perfetto.

    Perfetto: https://ui.perfetto.dev
    """
    from fullshard.errors import SpecError
    from fullshard.quantities import count_text, format_bytes
    from fullshard.report.step_traces import (
        aligned_spans_by_trace_process,
        check_is_trace,
        check_step_or_choose_last,
        read_step,
        save_trace,
    )
    from fullshard.system.targets import check_output_file, convert_write_errors, make_load_predicate

    check_output_file(path, is_kind=make_load_predicate(check_is_trace), force=force, streams=True)
    step = check_step_or_choose_last(directory, step)
    measured = read_step(directory, step)
    if not measured:
        raise SpecError(f"{directory}: the profiles of step {step} cannot be read.", fix="another --step")
    about = {"run": str(directory), "step": str(step)}
    with convert_write_errors(path):
        save_trace(path, aligned_spans_by_trace_process(measured), about=about)
    size = f" ({format_bytes(path.stat().st_size)})" if path.is_file() else ""
    ranks = count_text(len(measured), "rank")
    text = f"wrote {path}{size}: step {step} of {ranks}; open it in https://ui.perfetto.dev"
    typer.echo(escape_control_characters(text))
