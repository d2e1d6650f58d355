"""Arguments and options that several commands share, and the class of commands with `--set`."""

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fullshard.errors import SpecError
from fullshard.launch.environment import check_rank_variables, is_started_by_torchrun
from fullshard.system.terminal import print_to_stderr


def require_positive_number(value: float | None) -> float | None:
    """Returns an option's number. Raises BadParameter for NaN, infinity, 0 and negative numbers."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value:g} is not a finite number over 0")
    return value


def complete_keys(incomplete: str) -> list[str]:
    """Returns the keys of a run that begin with `incomplete`, for the shell's completion of `--set`."""
    from fullshard.spec.run import Run
    from fullshard.spec.value import iterate_dotted_field_names

    return [f"{key}=" for key in iterate_dotted_field_names(Run) if key.startswith(incomplete)]


def complete_presets(incomplete: str) -> list[str]:
    """Returns the names of presets that begin with `incomplete`. Without one, the shell completes files."""
    from fullshard.spec.pretrained import read_presets

    return [one.name for one in read_presets() if one.name.startswith(incomplete)]


RunPath = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="The run; without it, all keys have their defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Set one key of the run, such as train.steps=10; may be repeated.",
        autocompletion=complete_keys,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


class SettingHintCommand(TyperCommand):
    """A command that answers an option which is a setting, such as `--lr 1e-3`, with the right `--set`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        for text in args:
            option = text.partition("=")[0]
            if "--set" in known and option.startswith("--") and option not in known:
                _check_is_not_setting(option)
        return super().parse_args(ctx, args)


class RankZeroCommand(SettingHintCommand):
    """A command that rank 0 alone runs if torchrun or srun has started several ranks."""

    def invoke(self, ctx: Any) -> Any:
        is_first = True
        if is_started_by_torchrun() and (ranks := os.environ["WORLD_SIZE"]) != "1":
            check_rank_variables()
            is_first = os.environ["RANK"] == "0"
            if os.environ["LOCAL_RANK"] == "0":  # once per node
                print_to_stderr(f"note: rank 0 of {ranks} runs {ctx.command_path}, and the others end")
        return super().invoke(ctx) if is_first else None


def _check_is_not_setting(option: str) -> None:
    """Raises SpecError if an unknown option is the name of a setting, here or in another trainer."""
    from fullshard.spec.run import Run
    from fullshard.spec.value import suggested_keys_text

    key = suggested_keys_text(Run, option.removeprefix("--"))
    if key is not None:
        fix = f"--set {key}=…" if " " not in key else key
        raise SpecError(f"{option} is not an option, but a setting.", got=option, fix=fix)
