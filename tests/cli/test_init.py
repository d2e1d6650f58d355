"""`fullshard init` writes keys with their defaults, and nothing that it would overwrite."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fullshard.cli.init import COMMON_KEYS, default_run_toml_text, short_run_toml_text
from fullshard.cli.main import main
from fullshard.errors import SpecError
from fullshard.spec.run import Run


def keys(value: BaseModel, prefix: str = "") -> set[str]:
    """Every dotted key of a value, tables and unset ones included."""
    found: set[str] = set()
    for name in type(value).model_fields:
        inner = getattr(value, name)
        found |= keys(inner, f"{prefix}{name}.") if isinstance(inner, BaseModel) else {f"{prefix}{name}"}
    return found


def written_keys(text: str) -> set[str]:
    """The dotted keys that stand in a run.toml, also those behind a #."""
    found: set[str] = set()
    table = ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        if line.startswith("# [["):  # a list of tables
            found.add(line.strip("# []"))
        key, equals, _ = line.removeprefix("# ").partition(" =")
        if equals and key.isidentifier():
            found.add(f"{table}.{key}")
    return found


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_init_writes_the_default_run(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), *options]) == 0
    assert Run.load(path) == Run()
    expected = {f"{section}.{key}" for section, names in COMMON_KEYS.items() for key in names}
    assert written_keys(path.read_text()) == (keys(Run()) if options else expected)
    assert len(expected) == 20


def test_every_key_has_a_comment() -> None:
    text = default_run_toml_text()
    values = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert all("  # " in line or " # " in line for line in values)


def test_no_two_keys_share_a_comment() -> None:
    comments = [line.partition(": ")[2] for line in short_run_toml_text().splitlines() if ": " in line]
    assert len(comments) == len(set(comments))


def test_unset_keys_are_comments_and_defaults_are_values() -> None:
    written = tomllib.loads(default_run_toml_text())
    assert "microbatch" not in written["train"]
    assert written["offload"]["tier"] == Run().offload.tier


def test_a_file_that_exists_is_kept_unless_forced(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    assert main(["init", str(path)]) == SpecError.exit_code
    assert path.read_text() == "mine"
    err = capsys.readouterr().err
    assert ("--force" in err, "another kind" in err) == (True, False)
    assert main(["init", str(path), "--force"]) == 0
    assert Run.load(path) == Run()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "absent" / "run.toml"
    assert main(["init", str(path)]) == SpecError.exit_code
    assert str(path) in capsys.readouterr().err


def test_a_name_that_is_not_text_is_written_as_escapes(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "\udcff\n[x].toml"
    assert main(["init", str(path)]) == 0
    assert Run.load(path) == Run()
    assert "fullshard train \\udcff\\n[x].toml" in path.read_text()
