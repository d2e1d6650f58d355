"""`fullshard watch`."""

import json
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.options import AsJson, require_positive_number
from fullshard.spec.records.run_files import LIVE, METRICS

if TYPE_CHECKING:
    from fullshard.report.run_record import MetricsReader
    from fullshard.report.watch import WatchedRun
    from fullshard.spec.records.live_status import LiveStatus

# The lock of a run on another host cannot be read. Such a run counts as running while its live.json is at
# most this many intervals old.
_FRESH_INTERVALS = 15


def watch(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, such as runs/default.")
    ],
    *,
    once: Annotated[bool, typer.Option("--once", help="Show the current state, and exit.")] = False,
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            metavar="SECONDS",
            callback=require_positive_number,
            help="Time between updates (default: 1).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run in the terminal while it trains.

    Loss, speed against the plan, memory, saves and the phase of each rank. Ends when the run ends. Without a
    terminal, or with --json, it shows the state once.
    """
    from fullshard.report.run_record import MetricsReader
    from fullshard.report.watch import watch_values
    from fullshard.system.terminal import is_live_terminal

    reader = MetricsReader(directory / METRICS)
    if as_json:
        typer.echo(json.dumps(watch_values(_read_watched_run(directory, reader)), indent=2))
    elif once or not is_live_terminal(sys.stdout):
        _show_once(_read_watched_run(directory, reader))
    else:
        _show_until_end(directory, reader, every=every or 1.0)


def _show_once(run: "WatchedRun") -> None:
    from rich.console import Console

    from fullshard.report.watch import watch_lines

    console = Console(highlight=False, soft_wrap=True)
    for line in watch_lines(run):
        console.print(line)


def _show_until_end(directory: Path, reader: "MetricsReader", *, every: float) -> None:
    """Redraws the state until the run ends, or until Ctrl-C."""
    from rich.console import Console, Group
    from rich.live import Live

    from fullshard.report.watch import watch_lines

    console = Console(highlight=False)
    run = _read_watched_run(directory, reader)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                lines = watch_lines(run)
                for line in lines:
                    line.no_wrap, line.overflow = True, "ellipsis"
                live.update(Group(*lines), refresh=True)
                if run.has_ended:
                    return
                time.sleep(every)
                run = _read_watched_run(directory, reader)
        except KeyboardInterrupt:
            return


def _read_watched_run(directory: Path, reader: "MetricsReader") -> "WatchedRun":
    """Reads the state of the run. Raises SpecError if `directory` is not the directory of a run."""
    from fullshard.report.run_record import read_run
    from fullshard.report.watch import WatchedRun
    from fullshard.spec.records.live_status import LiveStatus

    now, live = datetime.now(UTC), LiveStatus.load_if_readable(directory / LIVE)
    record = read_run(
        directory,
        is_running=_is_running(directory, live, now=now),
        now=now,
        metrics_reader=reader,
        is_brief=True,
    )
    try:
        written = datetime.fromtimestamp((directory / METRICS).stat().st_mtime, UTC)
    except OSError:
        written = None
    return WatchedRun(record, now=now, last_step_at=written)


def _is_running(directory: Path, live: "LiveStatus | None", *, now: datetime) -> bool:
    """Returns whether a process trains in the directory: it holds the lock, or writes from another host."""
    from fullshard.jobs.run_directory import find_run_lock_holder

    try:
        if find_run_lock_holder(directory) is not None:
            return True
    except OSError:  # a lock that this user may not read, or none on such a file system
        pass
    if live is None or not live.running or live.process.startswith(f"{socket.gethostname()}:"):
        return False
    return (now - live.at).total_seconds() < _FRESH_INTERVALS * live.interval_seconds
