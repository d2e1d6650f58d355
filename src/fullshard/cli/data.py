"""`fullshard data prepare`."""

import json
import os
from collections.abc import Mapping
from typing import Any

import typer

from fullshard.cli.options import AsJson, Overrides, RunPath
from fullshard.system.terminal import escape_to_single_line


def prepare_data(run_path: RunPath = None, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenize and pack the data of a run in advance.

    Shows a summary. The run then starts at once, from the cache.
    """
    from fullshard.data.build import build_packed_data, resolve_epochs, tokenizer_vocabulary_size
    from fullshard.errors import SpecError
    from fullshard.launch.environment import is_started_by_torchrun
    from fullshard.models.build import check_vocabulary
    from fullshard.spec.run import Run
    from fullshard.spec.settings.run_checks import check_own_model_has_data

    run = Run.load(run_path, overrides=overrides or [])
    if run.data.source == "python":
        raise SpecError(
            "there is nothing to prepare.",
            got=f'data.source = "python", data.factory = {run.data.factory!r}',
            why="a function of your own makes the batches when the run asks for them",
        )
    check_own_model_has_data(run)
    check_vocabulary(run, token_count=tokenizer_vocabulary_size(run.data))
    data = build_packed_data(run)
    check_vocabulary(run, token_count=data.vocabulary)
    if is_started_by_torchrun() and os.environ["RANK"] != "0":  # the ranks have made the data together
        return
    steps = resolve_epochs(run, data).train.step_count
    epochs = steps * run.train.global_batch / data.training_sequences
    summary: dict[str, Any] = data.summary_values() | {"steps": steps, "epochs": epochs}
    if as_json:
        typer.echo(json.dumps(summary))
        return
    from fullshard.report.table import show_labelled_lines

    show_labelled_lines(_summary_rows(summary))
    for skip_message in summary["skip_messages"]:
        typer.echo(escape_to_single_line(f"left out: {skip_message}"), err=True)
    for warning in summary["warnings"]:
        typer.echo(escape_to_single_line(f"warning: {warning}"), err=True)


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    from fullshard.data.packed import document_counts_text

    part = "{:,} tokens, {:,} sequences of {:,}"
    rows = [("source", summary["source"]), (summary["unit"], document_counts_text(summary))]
    for name in ("training", "validation"):
        counts = (summary[f"{name} tokens"], summary[f"{name} sequences"], summary["sequence length"])
        rows.append((name, part.format(*counts) if counts[1] else "none held out"))
    if summary["validation source"]:
        rows.append(("validated on", summary["validation source"]))
    rows.append(("packing", f"{summary['packing']}, {100 * summary['efficiency']:.2f} % full"))
    rows.append(("vocabulary", f"{summary['vocabulary']:,}"))
    if len(summary["shares"]) > 1:
        shares = " + ".join(f"{100 * share:.4g} %" for share in summary["shares"])
        rows.append(("shares", f"{shares}, exactly"))
    rows.append(("steps", f"{summary['steps']:,}, which pass {summary['epochs']:.3g} times over the data"))
    return rows
