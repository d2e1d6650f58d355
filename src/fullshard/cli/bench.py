"""`fullshard bench`."""

import os
from pathlib import Path

import typer

from fullshard.cli.options import AsJson, Overrides, RunPath

# Default settings of the timed run: steps small enough that time outside compute is visible.
SETTINGS = ("data.sequence_length=128", "train.global_batch=4", "precision.mode=fp32")


def overhead(
    *,
    run_path: RunPath = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Time fullshard's step against a plainly written fully_shard loop, in alternating pairs in one job."""
    from fullshard.launch.request import Request
    from fullshard.launch.start import start
    from fullshard.report.overhead import overhead_page
    from fullshard.spec.run import Run
    from fullshard.spec.small_files import VALUE_BYTES, parse_json, read_text
    from fullshard.system.targets import require_file

    settings = SETTINGS if run_path is None else ()
    run = Run.load(run_path, overrides=[*settings, *(overrides or [])])
    result = Path(run.run.dir, "overhead.json")
    require_file(result, is_kind=_is_result, force=False)
    request = Request(run=run, job="fullshard.jobs.bench_overhead:run_overhead")
    exit_code = start(request)
    if exit_code == 0 and os.environ.get("RANK", "0") == "0":
        text = read_text(result, most_bytes=VALUE_BYTES)
        typer.echo(text if as_json else overhead_page(parse_json(text)))
    raise typer.Exit(exit_code)


def _is_result(path: Path) -> bool:
    """Returns True if an earlier measurement wrote the file."""
    from fullshard.spec.pretrained import read_config
    from fullshard.system.targets import read_by

    return read_by(read_config)(path) and "seconds_a_step" in read_config(path)
