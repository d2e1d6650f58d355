"""What every verb has in common: quick help, exit codes, one message for one mistake."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
import typer

from fullshard.cli.main import _build_app, main
from fullshard.errors import FullshardError, PlanError, SpecError

VERBS = [
    [],
    ["train"],
    ["plan"],
    ["calibrate"],
    ["report"],
    ["init"],
    ["version"],
    ["ckpt"],
    ["ckpt", "list"],
    ["ckpt", "export"],
]
HEAVY = ("torch", "numpy", "fullshard.spec.run")
MOST_MODULES = 400  # of which Python and typer bring most; torch alone has 1,200


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_imports_little_and_nothing_heavy(verb: list[str]) -> None:
    code = f"import sys, fullshard.cli.main as cli; print(cli.main({[*verb, '--help']})); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    *_, exit_code, modules = done.stdout.splitlines()
    assert exit_code == "0"
    assert not set(HEAVY) & set(modules.split())
    assert len(modules.split()) < MOST_MODULES


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        (["trian"], "'train'"),
        (["train", "--resme"], "--resume"),
        (["ckpt", "exprt"], "'export'"),
        (["init", "--forec"], "--force"),
        (["train", "a.toml", "b.toml"], "b.toml"),
        (["ckpt", "export", "only-one"], "OUT"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_nearest(
    wrong: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrong) == 2
    out, err = capsys.readouterr()
    assert (out, nearest in err) == ("", True)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["train", "--set", "train.stpes=3"], SpecError, "train.steps"),
        (["train", "--set", "train.steps=some"], SpecError, "train.steps"),
        (["train", "--set", "steps=3"], SpecError, "section.key=value"),
        (["train", "absent.toml"], SpecError, "fullshard init"),
        (["train", "--plan", "absent.json"], SpecError, "absent.json"),
        (["train", "--plan", "plan.json", "--set", "train.steps=3"], SpecError, "--set train.steps=3"),
        (["train", "--set", "run.ranks=5", "--set", "run.device=cpu"], PlanError, "20 or 25"),
    ],
)
def test_a_mistake_exits_with_the_code_of_its_error_and_its_message_alone(
    arguments: list[str], error: type[SpecError], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == error.exit_code
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)
    assert err.startswith(f"{error.__name__}: ")
    assert "Traceback" not in err


def float_options(app: typer.Typer, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """(words of the command, option) of every option that is a number with a point."""
    for group in app.registered_groups:
        yield from float_options(group.typer_instance, (*words, group.name))
    for command in app.registered_commands:
        for one in inspect.signature(command.callback).parameters.values():
            kind, option = get_args(one.annotation)[:2]
            if float in (kind, *get_args(kind)):
                yield (*words, command.name), option.default  # typer takes the first name for it


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0"])
def test_an_option_takes_no_number_that_is_none(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = list(float_options(_build_app()))
    assert (("plan",), "--price") in options
    for words, option in options:
        assert main([*words, f"{option}={value}"]) == 2
        assert f"Invalid value for '{option}'" in capsys.readouterr().err


def test_a_mistake_in_the_run_is_found_before_torch_is_imported() -> None:
    code = (
        "import sys; from fullshard.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    arguments = ["train", "--set", "run.device=cpu", "--set", "run.ranks=5"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == "False\n"
    assert done.stderr.startswith("PlanError")


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["version"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert (first, [line.split()[0] for line in rest]) == (rest[0], ["fullshard", "torch", "python"])


def test_help_names_every_exit_code_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for kind in FullshardError.__subclasses__():
        assert re.search(rf"\b{kind.exit_code} [a-z]", said), kind.__name__
