"""`fullshard ckpt list | verify | export`."""

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fullshard.cli.options import AsJson
from fullshard.quantities import parse_bytes
from fullshard.system.terminal import escape_to_single_line

if TYPE_CHECKING:
    from fullshard.checkpoint.files import CheckpointFiles
    from fullshard.checkpoint.load import Damage
    from fullshard.checkpoint.location import CheckpointLocation


_REMOVED = "removed"


def list_checkpoints(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or its checkpoints.")],
    *,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run, and which are complete."""
    place = _find_checkpoints_root(directory)
    rows = _checkpoint_rows(place)
    rejected = place.list_quarantined()
    if rejected:
        typer.echo(escape_to_single_line(f"set aside as damaged: {', '.join(rejected)}"), err=True)
    for draft in place.describe_drafts():
        typer.echo(escape_to_single_line(draft), err=True)
    if as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        typer.echo(_format_checkpoint_table(rows))
    else:
        typer.echo(escape_to_single_line(f"no checkpoint in {place}"), err=True)


def verify_checkpoints(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A checkpoint, or a run's directory for all of its checkpoints."),
    ],
    *,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Read the I-th of N parts only. The ranks of torchrun divide them."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of checkpoints, and list the damage.

    Damaged files are listed with the tensors that they affect. A checkpoint that is removed meanwhile is not
    damaged, and not in the JSON.
    """
    from fullshard.checkpoint.manifest import MANIFEST
    from fullshard.errors import CheckpointError
    from fullshard.quantities import join_names

    place = _find_checkpoints_root(directory)
    one = place.root_as_checkpoint()
    is_single = MANIFEST in one.file_sizes_bytes()
    checkpoints = [one] if is_single else [files for _, files in reversed(place.list_checkpoints())]
    if not checkpoints:
        got, fix = join_names(place.describe_drafts()), "the run's directory, such as runs/default"
        raise CheckpointError(f"no checkpoint in {place}.", got=got or None, fix=fix)
    number, parts = _parse_part(part)
    found = {str(files): _verify_one_checkpoint(files, part=(number, parts)) for files in checkpoints}
    if as_json:
        kept = {name: many for name, (status, many) in found.items() if status != _REMOVED}
        typer.echo(json.dumps({name: [asdict(one) for one in many] for name, many in kept.items()}))
    else:
        for name, (status, many) in found.items():
            of = f"part {number} of {parts}  " if parts > 1 else ""
            typer.echo(escape_to_single_line(f"{name}  {of}{status}"))
            for damage in many:
                touched = join_names(damage.tensors, most=3)
                line = f"  {damage.file}: {damage.what}{f'; touches {touched}' if touched else ''}"
                typer.echo(escape_to_single_line(line))
    if any(many for _, many in found.values()):
        raise typer.Exit(CheckpointError.exit_code)


def _parse_part(text: str | None) -> tuple[int, int]:
    """Returns (number from 1, parts) of `I/N`; without a text this rank of torchrun's, or (1, 1)."""
    from fullshard.errors import SpecError

    if text is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        rank = os.environ["RANK"]
        text = f"{int(rank) + 1 if rank.isdecimal() else rank}/{os.environ['WORLD_SIZE']}"
    number, _, parts = (text or "1/1").partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise SpecError("there is no such part.", got=text, fix="--part 3/8, the third of eight")
    return int(number), int(parts)


def _verify_one_checkpoint(files: "CheckpointFiles", *, part: tuple[int, int]) -> "tuple[str, list[Damage]]":
    """Returns a checkpoint's status and damage. A checkpoint that cannot be read has the status REFUSED."""
    from fullshard.checkpoint.load import Damage, find_damage
    from fullshard.checkpoint.manifest import MANIFEST
    from fullshard.errors import CheckpointError

    try:
        found = find_damage(files, part=part)
    except CheckpointError as error:  # another format, no permission
        return "REFUSED", [Damage(MANIFEST, f"{error.what.removesuffix('.')}: {error.got}", ())]
    if found is None:
        return _REMOVED, []
    return ("DAMAGED" if found else "whole" if part == (1, 1) else "no damage"), found


ExportFormat = Literal["safetensors", "hf", "peft", "dcp", "torchtitan", "accelerate", "torch"]
ShardBytes = Annotated[
    int | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        parser=partial(parse_bytes, source="--shard-size"),
        help="Write several files of at most this size (5 GB), and an index.",
    ),
]


def export_checkpoint(  # signature: typer's, one parameter an option  # noqa: PLR0913
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's directory for its newest.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file, or with most options the directory, to write.")
    ],
    *,
    form: Annotated[
        ExportFormat, typer.Option("--format", help="hf adds config and tokenizer; peft is adapters alone.")
    ] = "safetensors",
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="With dcp, torchtitan, accelerate, torch: its state too.")
    ] = False,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(help="Dtype of floats, if not as trained.")
    ] = None,
    shard_bytes: ShardBytes = None,
    weights: Annotated[
        Literal["model", "ema"], typer.Option(help="ema writes the averages that a run with [ema] keeps.")
    ] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace other files, or write beside.")] = False,
) -> None:
    """Write a checkpoint as safetensors, or for another trainer."""
    from fullshard.errors import SpecError

    if form not in ("safetensors", "hf") and (shard_bytes is not None or dtype is not None):
        what = f"--format {form} takes neither --shard-size nor --dtype."
        raise SpecError(what, fix="--format hf, or neither")
    if optimizer and form in ("safetensors", "hf", "peft"):
        fix = "--format dcp, torchtitan, accelerate or torch"
        raise SpecError(f"--format {form} holds no optimizer.", fix=fix)
    _check_export_target(target, form, sharded=shard_bytes is not None, force=force)
    _print_log_messages()  # which checkpoint was written, and its size
    place = _find_checkpoints_root(source)
    if form == "hf":
        from fullshard.weights.export_hf import SHARD_BYTES, export_hf

        most = SHARD_BYTES if shard_bytes is None else shard_bytes
        export_hf(place, target, dtype=dtype, shard_bytes=most, weights=weights)
    elif form == "peft":
        from fullshard.weights.export_peft import export_peft

        export_peft(place, target, weights=weights)
    elif form != "safetensors":
        from fullshard.weights.export_state import export_state

        export_state(place, target, form=form, optimizer=optimizer, weights=weights)
    else:
        import torch

        from fullshard.weights.export import export

        chosen = None if dtype is None else {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        export(place, target, shard_bytes=shard_bytes, dtype=chosen, weights=weights)
    typer.echo(escape_to_single_line(f"{target}"))


def _print_log_messages() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fullshard").setLevel(logging.INFO)


def _check_export_target(target: Path, form: ExportFormat, *, sharded: bool, force: bool) -> None:
    """Raises an error if an export would replace other files than an earlier one's; with hf, any weights."""
    from fullshard.system.targets import check_output_directory, check_output_file, make_load_predicate
    from fullshard.weights.export import check_holds_no_weights
    from fullshard.weights.files import INDEX, read_header

    is_weights = make_load_predicate(read_header, most_bytes=None)
    if form == "hf":
        check_holds_no_weights(target)
    if form not in ("safetensors", "torch") or sharded:
        check_output_directory(target, is_kind=lambda one: one.name == INDEX or is_weights(one), force=force)
    else:
        check_output_file(target, is_kind=is_weights if form == "safetensors" else None, force=force)


def _find_checkpoints_root(directory: str) -> "CheckpointLocation":
    """Returns the location `<directory>/checkpoints` if it exists, else `directory`, as for every URL.

    Raises CheckpointError if neither exists.
    """
    from fullshard.checkpoint.location import location_of
    from fullshard.errors import CheckpointError
    from fullshard.system.files import os_errors_as_checkpoint_errors

    for path in (directory if "://" in directory else Path(directory) / "checkpoints", directory):
        place = location_of(path)
        with os_errors_as_checkpoint_errors(f"{place} cannot be read."):
            if place.exists():
                return place
    raise CheckpointError(f"{directory} is not a directory.", fix="the run's directory, such as runs/default")


def _checkpoint_rows(place: "CheckpointLocation") -> list[dict[str, object]]:
    """Returns the rows of all checkpoints, the oldest first, and marks the one with the best result.

    Without `checkpoint.keep_best`, the lowest validation loss is the best result.
    """
    from fullshard.checkpoint.manifest import read_manifest
    from fullshard.checkpoint.results import RESULTS, find_best_step
    from fullshard.errors import CheckpointError
    from fullshard.spec.settings.evaluate_section import LOWEST_VALIDATION_LOSS

    found = place.list_checkpoints()
    rows = [_checkpoint_row(files) for _, files in found]
    good = [row for row in rows if row["problem"] is None and row["why_avoided"] is None]
    run = None
    with suppress(CheckpointError):
        run = read_manifest(str(good[0]["path"])).run_settings if good else None
    wanted = (run and run.best_result) or LOWEST_VALIDATION_LOSS
    saved = [(int(str(row["step"])), {RESULTS: cast(Any, row["results"])}) for row in good]
    best = find_best_step(saved, wanted)
    for row in good:
        row["best"] = wanted.key if row["step"] == best else None
    return rows[::-1]


def _checkpoint_row(files: "CheckpointFiles") -> dict[str, object]:
    """Returns a checkpoint's row; `problem` is None if its files are complete, judged by their sizes."""
    from fullshard.checkpoint.manifest import read_manifest_and_check_sizes
    from fullshard.checkpoint.results import RESULTS
    from fullshard.errors import CheckpointError

    try:
        manifest = read_manifest_and_check_sizes(files)
    except CheckpointError as error:
        return {"path": str(files), "problem": f"{error.got or error.what}"}
    plan: Any = manifest.plan or {}
    return {
        "path": str(files),
        "problem": None,
        "step": manifest.step,
        "trained_tokens": manifest.values.get("tokens"),
        "ranks": manifest.world_size,
        "strategy": plan.get("strategy"),
        "bytes": manifest.checkpoint_bytes,
        "why_avoided": manifest.why_avoided,
        "results": manifest.values.get(RESULTS),
        "best": None,
    }


def _results_text(row: dict[str, object]) -> str:
    """Returns the results after the checkpoint's own step, with a mark behind the best."""
    from fullshard.checkpoint.results import read_results

    own = {
        key: one for key, one in read_results(cast(Any, row["results"])).items() if one.step == row["step"]
    }
    return "  ".join(
        f"{key} {one.value:.4f}{' (best)' if key == row['best'] else ''}" for key, one in own.items()
    )


def _format_checkpoint_table(rows: list[dict[str, object]]) -> str:
    from fullshard.quantities import count_text, format_bytes, format_count

    lines: list[str] = []
    for row in rows:
        name = Path(str(row["path"])).name
        if row["problem"] is not None:
            lines.append(f"{name}  not whole: {row['problem']}")
            continue
        tokens = row["trained_tokens"]
        trained = format_count(tokens) if isinstance(tokens, int) and tokens < 2**63 else "?"
        size = format_bytes(int(str(row["bytes"])))
        strategy = row["strategy"] or ""
        ranks = count_text(int(str(row["ranks"])), "rank")
        line = f"{name}  {trained:>6} trained tokens  {ranks:>9}  {strategy:<18}  {size:>11}"
        line += f"  {_results_text(row)}"
        if row["why_avoided"] is not None:
            line += f"  avoided: {row['why_avoided']}"
        lines.append(line.rstrip())
    return "\n".join(map(escape_to_single_line, lines))
