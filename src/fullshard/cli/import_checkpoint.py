"""`fullshard ckpt import`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.quantities import count_text
from fullshard.system.terminal import escape_control_characters, print_to_stderr

if TYPE_CHECKING:
    from fullshard.takeover.names import MatchedCheckpoint
    from fullshard.takeover.source import ForeignCheckpoint
    from fullshard.takeover.write import ImportTarget

_DIFFERS = """the run continues with other settings than the source: see DIFFERS
try: the [schedule] of the source, this [optimizer], and a new DIR"""


def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="A checkpoint of another trainer: a directory or a file.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of the run that continues.")],
    *,
    run_path: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml", help="The run; unset, one is printed."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help="Of moments without names: decay-first, parameters, or a file of names."),
    ] = None,
    names_path: Annotated[
        Path | None, typer.Option("--names", metavar="MAP.toml", help='"name there" = "name here"; * is any.')
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check all; write nothing.")] = False,
) -> None:
    """Take over the checkpoint of another trainer as one of fullshard.

    Weights, moments and counts are taken over; random states and the position in the data are not.
    The report goes to standard error. Without --run, a run.toml with what the source gives is
    printed, and nothing is imported.
    The exit code is 2 if a rate or another setting of the optimizer differs from the source's.
    """
    from fullshard.checkpoint.location import location_of
    from fullshard.errors import SpecError
    from fullshard.report.table import show_labelled_lines
    from fullshard.spec.records.run_files import CHECKPOINTS
    from fullshard.spec.run import Run
    from fullshard.system.small_files import SETTINGS_BYTES, read_text, read_toml
    from fullshard.takeover import write
    from fullshard.takeover.formats import open_foreign_checkpoint
    from fullshard.takeover.names import ORDERS, match_names

    place = directory if "://" in directory else str(Path(directory, CHECKPOINTS))
    if location_of(place).list_checkpoints():
        why = "a run resumes from the newest, which may be another than the imported one"
        raise SpecError("DIR holds checkpoints already.", got=place, why=why, fix="a new directory")
    found = open_foreign_checkpoint(source)
    if run_path is None:
        _print_offered_run(found, source, directory=directory)
        return
    target = write.ImportTarget.of_run(Run.load(run_path))
    listed = order if order in (None, *ORDERS) else read_text(order, most_bytes=SETTINGS_BYTES).split()
    names = {key: str(value) for key, value in read_toml(names_path).items()} if names_path else {}
    matched = match_names(found, target.model, names=names, order=listed)
    settings = list(target.compare_settings(matched, step=found.step))
    beside = [(f"{one.key} of {one.group}", str(one)) for one in settings]
    show_labelled_lines([*_report_rows(found, matched, target=target), *beside], file=sys.stderr)
    snapshot = write.make_snapshot(found, matched, target=target)
    if dry_run:
        write.read_all(snapshot)
    else:
        typer.echo(str(write.write_checkpoint(snapshot, place, plan=target.plan)))
    if target.run.run.dir != directory:
        print(f"it continues with --set run.dir={directory}", file=sys.stderr)
    if any(one.differs for one in settings):
        print_to_stderr(f"{_DIFFERS}\n{write.optimizer_toml(found, matched, target=target)}")
        raise typer.Exit(SpecError.exit_code)


def _print_offered_run(found: "ForeignCheckpoint", source: Path, *, directory: str) -> None:
    from fullshard.convert.conversion import convert_config, nested_tables
    from fullshard.system.small_files import toml_text
    from fullshard.takeover.write import offered_settings

    offered = offered_settings(found)
    if found.config is not None:
        converted = convert_config(found.config, name=str(source))
        # A scheduler of torch, which DeepSpeed's settings do not mention, or one that is not converted.
        is_other = any(one.settings.get("initial_lr") for one in found.optimizer.groups)
        is_other |= "scheduler.type" in converted.lost_keys
        every = offered | converted.settings | dict(found.settings)
        offered = {key: one for key, one in every.items() if not (is_other and key.startswith("schedule."))}
        for key in converted.lost_keys:
            print_to_stderr(f"not in this run.toml: {key} of the source's settings")
    head = f"From {source} ({found.format}), by fullshard ckpt import. What is not here has its default."
    text = toml_text(nested_tables({"run.dir": directory} | offered), head=head)
    typer.echo(escape_control_characters(text), nl=False)
    print("nothing is imported: complete this run.toml, and give it as --run", file=sys.stderr)


def _report_rows(
    found: "ForeignCheckpoint", matched: "MatchedCheckpoint", *, target: "ImportTarget"
) -> Iterator[tuple[str, str]]:
    for name, sources in matched.sources.items():
        state = ", ".join(matched.moments.get(name, {})) or "no state of the optimizer"
        count = matched.updates.get(name, found.update_steps)
        state += "" if count == found.update_steps else f", updated in {count_text(round(count), 'step')}"
        yield name, f"{'taken' if sources == (name,) else 'renamed, from ' + ', '.join(sources)}; {state}"
    yield from ((name, "missing in the source") for name in matched.missing)
    yield from ((name, "state not taken: frozen in the run") for name in matched.frozen)
    yield from ((name, "left over") for name in (*matched.left_over, *matched.left_over_state))
    tokens = "tokens unknown, counted from 0" if found.tokens is None else f"{found.tokens} tokens"
    yield found.format, f"step {found.step}, {found.skipped_steps} skipped, {tokens}"
    for group in (one for one in found.optimizer.groups if one.others):
        others = ", ".join(f"{key} = {value}" for key, value in group.others.items())
        yield f"group of {next(iter(group.names), '?')}", f"not read: {others}"
    yield "not taken over", "random states; the position in the data, which begins at row step * global_batch"
    if fewer := [one for one in matched.updates.values() if one < found.update_steps]:
        of_all = f"{len(fewer)} of {len(matched.updates)} parameters were updated in fewer than"
        yield "note", f"{of_all} {found.update_steps} steps, the fewest in {min(fewer):.0f}"
    if new := [one for one in target.groups if target.state_keys(one) and one not in matched.moments]:
        yield "note", f"{len(new)} of {len(target.groups)} trained parameters begin with new optimizer state"
    wanted = {name: one.dtype for name, one in target.model.named_parameters() if name in matched.weights}
    if narrow := [n for n, one in wanted.items() if matched.weights[n].dtype.itemsize < one.itemsize]:
        kinds = f"{matched.weights[narrow[0]].dtype}, and trained in {wanted[narrow[0]]}"
        yield (
            "note",
            f"{len(narrow)} of {len(wanted)} parameters are in {kinds}: masters, if any, are not taken",
        )
    yield from (("note", note) for note in found.notes)
