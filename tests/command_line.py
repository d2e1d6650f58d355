"""Reads what a command gets from its arguments, without running it."""

from typing import Any

import typer

from fullshard.cli.main import build_app


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """Returns the values that a command gets from its name and arguments. Raises for wrong ones."""
    command: Any = typer.main.get_command(build_app())
    words = []
    while arguments[0] in getattr(command, "commands", {}):
        words.append(arguments[0])
        command, arguments = command.commands[arguments[0]], arguments[1:]
    assert words
    return command.make_context(" ".join(words), list(arguments)).params
