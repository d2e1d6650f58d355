"""Common to all verbs: quick help, exit codes, one message for one mistake."""

import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from fullshard.cli.check import passed_and_skipped_check_names
from fullshard.cli.main import _COMMANDS, EXAMPLES, build_app, main
from fullshard.errors import FullshardError, PlanError, SpecError
from fullshard.jobs.checks.every_check import CHECKS
from fullshard.spec.records.finding import CheckReport, Finding

HEAVY = ("torch", "numpy", "fullshard.spec.run")
MOST_MODULES = 400  # of which Python and typer bring most; torch alone has 1,200


def test_help_of_all_commands_imports_little_and_nothing_heavy() -> None:
    helps = [["--help"], ["ckpt", "--help"], *([*name.split(), "--help"] for name in _COMMANDS)]
    code = (
        f"import sys, fullshard.cli.main as cli; codes = [cli.main(one) for one in {helps}]; "
        "print(codes, file=sys.stderr); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    exit_codes, modules = done.stderr.splitlines()
    assert exit_codes == str([0] * len(helps))
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
def test_wrong_usage_names_the_nearest_and_exits_with_2(wrong: list[str], nearest: str, capsys: Any) -> None:
    assert main(wrong) == 2
    out, err = capsys.readouterr()
    assert (out, nearest in err) == ("", True)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["train", "--set", "train.stpes=3"], SpecError, "train.steps"),
        (["train", "--set", "lr=3"], SpecError, "try: optimizer.learning_rate"),
        (["train", "--set", "thing=3"], SpecError, "section.key=value"),
        (["train", "--lr", "1e-3"], SpecError, "--set optimizer.learning_rate="),
        (["plan", "--batch-size=8"], SpecError, "train.microbatch"),
        (["train", "absent.toml"], SpecError, "fullshard init"),
        (["train", "--plan", "absent.json"], SpecError, "absent.json"),
        (["train", "--set", "run.ranks=5", "--set", "run.device=cpu"], PlanError, "20 or 25"),
    ],
)
def test_mistake_exits_with_the_code_of_its_error(
    arguments: list[str], error: type[SpecError], said: str, capsys: Any
) -> None:
    assert main(arguments) == error.exit_code
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)
    assert err.startswith("error: ")
    assert "Traceback" not in err


def value_options(*kinds: type) -> Iterator[tuple[str, str, object]]:
    """(command, option, default) of every option whose value is of one of `kinds`, or a list of them."""
    root: Any = typer.main.get_command(build_app())
    for name, callback in _COMMANDS.items():
        command = root
        for word in name.split():
            command = command.commands[word]
        shown = {one.name: one.opts[0] for one in command.params if one.param_type_name == "option"}
        for one in inspect.signature(callback).parameters.values():
            kind = get_args(one.annotation)[0]
            inner = {kind, *get_args(kind), *(inner for part in get_args(kind) for inner in get_args(part))}
            if one.name in shown and inner & {*kinds}:
                yield name, shown[one.name], one.default


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0"])
def test_options_refuse_numbers_that_are_not_positive(value: str, capsys: Any) -> None:
    options = list(value_options(float))
    assert ("plan", "--price", None) in options
    for name, option, _ in options:
        assert main([*name.split(), f"{option}={value}"]) == 2
        assert f"Invalid value for '{option}'" in capsys.readouterr().err


# Arguments with which a command gets as far as the value of an option, and does nothing that takes long.
ARGUMENTS = {
    "plan": ["smollm2-135m"],  # whose spec is shipped, and whose plans are found quickly
    "calibrate": ["--device=cpu", "--out=measured.toml"],
    "trace": ["."],
    "convert": ["ds.json"],
    "ckpt export": [".", "out"],
}


@pytest.mark.parametrize("value", ["0", "-1", "1e400", "nan", str(2**63), str(10**30), "", "x"])
def test_no_value_of_an_option_ends_in_an_unexpected_error(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    options = list(value_options(int, float, str))
    known = {"--ranks", "--seconds", "--budget", "--set", "--shard-size"}
    assert known <= {option for _, option, _ in options}
    for name, option, default in options:
        if value == str(default):
            continue
        more = ["--on=8xH100"] if name == "plan" and option not in ("--on", "--machines") else []
        code = main([*name.split(), *ARGUMENTS.get(name, []), *more, f"{option}={value}"])
        said = capsys.readouterr().err
        assert code != 1, (name, option, said)
        assert "Traceback" not in said
        assert code or value not in ("nan", "", "x"), (name, option)


def test_a_mistake_in_the_run_is_found_before_torch_is_imported() -> None:
    code = (
        "import sys; from fullshard.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    arguments = ["train", "--set", "run.device=cpu", "--set", "run.ranks=5"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == "False\n"
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("words", EXAMPLES, ids=lambda words: words or "fullshard")
def test_every_command_has_examples_and_each_of_them_parses(words: str) -> None:
    root: Any = typer.main.get_command(build_app())
    assert set(_COMMANDS) | {""} == set(EXAMPLES)
    for line in EXAMPLES[words].strip().splitlines():
        assert len(line) <= 76, "indented by four, it fits 80 columns"
        example = line.partition("   ")[0].partition(" > ")[0]
        name, _, arguments = example.partition("fullshard ")
        assert name in ("", "torchrun --nnodes 2 --nproc-per-node 8 ... -m ")
        command, rest = root, arguments.split()
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        if command is not root:
            assert arguments.startswith(words)
            command.make_context(words, rest)
        else:
            assert rest[0] in {name for option in root.params for name in option.opts}


def test_help_shows_examples_by_line(capsys: Any) -> None:
    for words in ("", "ckpt", "data"):
        assert main([*words.split(), "--help"]) == 0
        shown = capsys.readouterr().out.partition("Commands:")[2].splitlines()
        assert not [line for line in shown if line.endswith("...")]
    assert main(["train", "--help"]) == 0
    assert "\n    fullshard train run.toml\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pl", {"plan"}),
        ("ckpt ex", {"export"}),
        ("train --res", {"--resume"}),
        ("train --set optimizer.l", {"optimizer.learning_rate="}),
        ("plan llama3-7", {"llama3-70b"}),
    ],
)
def test_shell_completion(
    typed: str, completed: set[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("_FULLSHARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"fullshard {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert main([]) == 0
    assert set(capsys.readouterr().out.split()) == completed


def test_version_prints_versions(capsys: Any) -> None:
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fullshard", "torch", "python"]


def test_help_names_every_exit_code_of_an_error(capsys: Any) -> None:
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for kind in FullshardError.__subclasses__():
        assert re.search(rf"\b{kind.exit_code} [a-z]", said), kind.__name__


def test_run_that_cannot_be_planned_fails_the_check(capsys: Any) -> None:
    arguments = ["check", "--set", "run.ranks=5", "--set", "run.device=cpu"]
    assert main([*arguments, "--json"]) == 10
    report = CheckReport.model_validate_json(capsys.readouterr().out)
    assert [(one.check, one.status) for one in report.findings] == [("plan", "failure")]
    assert main(arguments) == 10
    said = capsys.readouterr().out
    assert "try: train.global_batch = 20 or 25" in said
    number = sum(map(len, CHECKS.values()))
    assert f"not run, because there is no plan: {number} checks of settings, machine," in said


def test_group_is_one_line_with_reasons_of_skipped_checks() -> None:
    found = [
        Finding.ok("a").model_copy(update={"check": "first_loss"}),
        Finding.skipped("no tokens").model_copy(update={"check": "labels"}),
        Finding.skipped("no tokens").model_copy(update={"check": "vocabulary_range"}),
    ]
    assert (
        passed_and_skipped_check_names(found) == "first loss; skipped: labels, vocabulary range (no tokens)"
    )


CONFIG = Path(__file__).parents[1] / "convert" / "configs" / "deepspeed_zero3.json"


def test_the_run_goes_to_output_and_the_words_to_error(capsys):
    assert main(["convert", str(CONFIG)]) == 0
    shown = capsys.readouterr()
    assert tomllib.loads(shown.out)["sharding"]["strategy"] == "full_shard"
    assert "zero_optimization.stage" in shown.err
    assert "40 keys" in shown.err


def test_wrong_arguments_are_refused(capsys, tmp_path):
    assert main(["convert", str(tmp_path / "absent.json")]) == SpecError.exit_code
    assert main(["convert", str(CONFIG), "--from", "megatron"]) == SpecError.exit_code
    assert "torchtitan" in capsys.readouterr().err


def test_a_mistake_in_the_run_is_printed_by_one_rank_of_each_node(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torchrun's error file it has no traceback."""
    monkeypatch.setenv("RANK", "1")
    for place, wrong, is_printed in (
        ("node 0/0", "stpes", True),
        ("node 0/1", "stpes", False),
        ("node 0/2", "bacth", True),  # other settings than the others
        ("node 1/0", "stpes", True),
    ):
        report = tmp_path / place / "error.json"
        report.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
        assert main(["train", "--set", f"train.{wrong}=3"]) == SpecError.exit_code
        said = capsys.readouterr().err
        assert said.startswith("error: --set: unknown key" if is_printed else ""), place
        assert (bool(said), report.exists()) == (is_printed, is_printed), place
        if is_printed:
            message = json.loads(report.read_text())["message"]
            assert (
                said == f"error: {message['message']}\n" == f"error: {message['extraInfo']['py_callstack']}\n"
            )


def test_a_rank_that_is_no_number_is_not_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "x")
    assert main(["trace", "a" * 300]) == SpecError.exit_code
    assert capsys.readouterr().err.startswith("error: a")


RANK_OF_TORCHRUN = {"LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "3"}
TASK_OF_SRUN = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3"}


@pytest.mark.parametrize(
    ("launcher", "variable"), [(RANK_OF_TORCHRUN, "RANK"), (TASK_OF_SRUN, "SLURM_PROCID")]
)
def test_rank_zero_alone_plans_for_all_ranks(
    launcher: dict[str, str], variable: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchruns = (*RANK_OF_TORCHRUN, "LOCAL_WORLD_SIZE", "RANK")
    for rank in range(3):
        for name in torchruns:  # those of srun's tasks are set by the command
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        local = variable.replace("RANK", "LOCAL_RANK").replace("PROCID", "LOCALID")
        for name, value in (launcher | {variable: str(rank), local: str(rank)}).items():
            monkeypatch.setenv(name, value)
        assert main(["plan", "--set", "run.device=cpu", "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == ("" if rank else "note: rank 0 of 3 runs fullshard plan, and the others end\n")
        assert out == "" if rank else json.loads(out)["best"]["world_size"] == 3
