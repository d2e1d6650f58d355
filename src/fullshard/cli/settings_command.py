"""The class of commands that take settings of a run by `--set`."""

from typing import Any

from typer.core import TyperCommand

from fullshard.errors import SpecError


class SettingsCommand(TyperCommand):
    """A command that answers an option which is a setting, such as `--lr 1e-3`, with the right `--set`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        for text in args:
            option = text.partition("=")[0]
            if "--set" in known and option.startswith("--") and option not in known:
                _check_is_not_setting(option)
        return super().parse_args(ctx, args)


def _check_is_not_setting(option: str) -> None:
    """Raises SpecError if an unknown option is the name of a setting, here or in another trainer."""
    from fullshard.spec.run import Run
    from fullshard.spec.value import find_key_by_name

    key = find_key_by_name(Run, option.removeprefix("--"))
    if key is not None:
        fix = f"--set {key}=…" if " " not in key else key
        raise SpecError(f"{option} is not an option, but a setting.", got=option, fix=fix)
