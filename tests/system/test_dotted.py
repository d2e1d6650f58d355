"""package.module:name is looked up, also where the command was started."""

import sys
from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.system.dotted import import_callable


def test_a_dotted_path_gives_its_callable() -> None:
    assert import_callable("os.path:join", key="train.loss")("a", "b") == str(Path("a", "b"))


def test_modules_of_the_working_directory_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local_module.py").write_text("def make():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    assert import_callable("local_module:make", key="model.python")() == 3


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("os.path.join", "train.loss = 'os.path.join' does not exist"),
        ("os.path:", "does not exist"),
        ("../os:join", "does not exist"),
        ("no_such_package:make", "cannot be imported"),
        ("os.path:joined", "os.path has no joined"),
        ("os.path:sep", "sep is str"),
    ],
)
def test_a_path_without_an_object_is_refused(dotted: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        import_callable(dotted, key="train.loss")


def test_a_file_beside_the_run_never_replaces_a_module_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "this.py").write_text("raise SystemExit('it ran')\n")  # `this` of Python itself prints a poem
    (tmp_path / "os.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    with pytest.raises(SpecError, match=r"this\.py, not .*this\.py"):
        import_callable("this:make", key="model.python")
    assert callable(
        import_callable("os.path:join", key="train.loss")
    )  # os.py cannot be meant: it has no path
