"""`fullshard`: parses the command line, runs one command, and converts its outcome into an exit code."""

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

import fullshard
from fullshard.cli import (
    calibrate,
    check,
    checkpoint,
    convert,
    data,
    import_checkpoint,
    init,
    plan,
    report,
    trace,
    train,
)
from fullshard.cli.options import RankZeroCommand, SettingHintCommand
from fullshard.errors import PlanError, SpecError
from fullshard.launch import environment
from fullshard.launch.outcome import FailureReport, ProcessOutcome
from fullshard.system.terminal import escape_log_messages, prepare_standard_streams

HELP = """Train PyTorch models whose parameters, gradients and optimizer state are sharded over ranks.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 75 interrupted and
saved (resume with train --resume), 130 ended by Ctrl-C, 1 unexpected error, 2 wrong usage or run.toml,
3 plan, 4 sharding, 5 data, 6 checkpoint, 7 launch, 8 training, 9 offload, 10 a failed check, 141 the reader
of standard output has left (a run continues without one).
"""

_COMMANDS: Mapping[str, Callable[..., None]] = {
    "train": train.train,
    "plan": plan.plan,
    "check": check.check,
    "calibrate": calibrate.calibrate,
    "report": report.report,
    "trace": trace.trace,
    "init": init.init,
    "convert": convert.convert,
    "ckpt list": checkpoint.list_checkpoints,
    "ckpt verify": checkpoint.verify_checkpoints,
    "ckpt export": checkpoint.export_checkpoint,
    "ckpt import": import_checkpoint.import_checkpoint,
    "data prepare": data.prepare_data,
}
# Ranks that torchrun or srun started share the work of these commands. Rank 0 alone runs all others.
_SHARED = ("train", "check", "calibrate", "ckpt verify", "data prepare")

# Command -> lines. Text behind two blanks explains; the rest runs as it is, with files of the user's.
EXAMPLES = {
    "": """
fullshard train                         the default model, about a minute
fullshard plan llama3-8b --on 8xH100    memory and time, without a GPU
fullshard init                          a run.toml to begin with
fullshard --install-completion          complete commands with Tab
""",
    "train": """
fullshard train run.toml
fullshard train run.toml --set train.steps=1000 --set train.global_batch=16
fullshard train run.toml --resume       after Ctrl-C or a crash
torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard train run.toml
""",
    "plan": """
fullshard plan llama3-8b --on 8xH100
fullshard plan llama3-70b --on 8x8xH100 --tokens-per-step 4M --compare
fullshard plan path/to/config.json --on 8xMI300X --budget 1T --price 2.5
fullshard plan llama3-8b --machines 8x8xH100,64x8xH100 --budget 15T
fullshard plan run.toml --save plan.json    for: train --plan plan.json
""",
    "check": """
fullshard check run.toml
fullshard check run.toml --verbose          what every check found
fullshard check run.toml --set train.steps=100 --json
torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard check run.toml
""",
    "calibrate": """
fullshard calibrate
fullshard calibrate --drive /tmp        with the drive of offload.path
torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard calibrate
""",
    "report": """
fullshard report runs/default
fullshard report runs/default --html a.html    a page with curves
fullshard report runs/a runs/b --json
""",
    "trace": """
fullshard trace runs/default            the last sampled step
fullshard trace runs/default --step 100 --out step-100.json.gz
""",
    "init": """
fullshard init
fullshard init experiments/small.toml
fullshard init --all                    every key, its default, its values
""",
    "convert": """
fullshard convert ds_config.json > run.toml
fullshard convert accelerate.yaml --ranks 8
""",
    "ckpt list": """
fullshard ckpt list runs/default
""",
    "ckpt verify": """
fullshard ckpt verify runs/default
fullshard ckpt verify runs/default/checkpoints/step-00000200
""",
    "ckpt export": """
fullshard ckpt export runs/default model.safetensors
fullshard ckpt export runs/x out --format hf    for from_pretrained
fullshard ckpt export runs/x adapters --format peft
fullshard ckpt export runs/x state.pt --format torch --optimizer
""",
    "ckpt import": """
fullshard ckpt import old/checkpoint-300 runs/new --run run.toml
fullshard ckpt import old/step-300 runs/new --run run.toml --dry-run
""",
    "data prepare": """
fullshard data prepare run.toml
fullshard data prepare run.toml --set data.packing=best_fit
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` or the command line names. Returns its exit code (`fullshard.errors`)."""
    if argv is None:
        prepare_standard_streams()
    escape_log_messages()
    environment.drop_leftover_torchrun_variables(os.environ)
    environment.set_default_user_name(os.environ)
    with ProcessOutcome() as ending:
        environment.set_torchrun_variables_of_srun_task(os.environ)
        try:
            build_app()(args=None if argv is None else [*argv], prog_name="fullshard")
        finally:
            sys.stdout.flush()  # its error is one of this command
    if ending.failure is not None:
        ending.failure.report_once_per_node(_failure_text(ending.failure, os.environ.get("RANK")))
    return ending.exit_code


def build_app() -> typer.Typer:
    app = _empty_command_group(HELP, examples=_examples_text(""), completion=True)
    app.callback()(_global_options)
    checkpoints = _empty_command_group("List, verify, export and import checkpoints.")
    prepared = _empty_command_group("Prepare the tokens of a run in advance.")
    prepared.callback()(lambda: None)  # a group without a callback and with one command is that command
    groups = {"": app, "ckpt": checkpoints, "data": prepared}
    for words, command in _COMMANDS.items():
        group, _, name = words.rpartition(" ")
        kind = SettingHintCommand if words in _SHARED else RankZeroCommand
        groups[group].command(name, cls=kind, epilog=_examples_text(words))(command)
    app.add_typer(checkpoints, name="ckpt")
    app.add_typer(prepared, name="data")
    return app


def _examples_text(command: str) -> str:
    """Returns the examples of a command as the end of its help; `\\b` keeps its line breaks."""
    lines = "\n".join(f"  {line}" for line in EXAMPLES[command].strip().splitlines())
    return f"\b\nExamples:\n{lines}"


def _empty_command_group(text: str, *, examples: str = "", completion: bool = False) -> typer.Typer:
    """Returns a command group with plain help: rich would take longer than the rest of `--help`."""
    return typer.Typer(
        help=text,
        epilog=examples,
        no_args_is_help=True,
        add_completion=completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def _print_version_and_exit(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # slow to import

        torch, python = importlib.metadata.version("torch"), platform.python_version()
        typer.echo(f"fullshard {fullshard.__version__}\ntorch {torch}\npython {python}")
        raise typer.Exit


def _global_options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version_and_exit,
            is_eager=True,
            help="Show the versions of fullshard, torch and Python.",
        ),
    ] = False,
) -> None:
    """Accepts the options that precede the command. Their help text is `HELP`."""


def _failure_text(failure: FailureReport, rank: str | None) -> str:
    if rank is not None and failure.peer_lost:
        return f"rank {rank}: another rank has gone; its own message says why, unless it was killed"
    if failure.exit_code in (SpecError.exit_code, PlanError.exit_code):
        rank = None  # usually an error of all ranks, which have read the same files
    return failure.user_message(int(rank) if rank is not None and rank.isdecimal() else None)
