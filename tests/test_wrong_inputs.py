"""Wrong input ends with a message that says what, got, why or try; with no traceback, and nothing lost."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main

TINY = [
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.d_ff=16"),
    *("data.sequence_length=16", "train.steps=2", "train.global_batch=2", "train.validate_sequences=2"),
    "run.device=cpu",
]


@dataclass(frozen=True)
class Wrong:
    """Settings (over TINY) or arguments, and what must be in the message. `text`: the words of data.txt."""

    name: str
    code: int
    says: tuple[str, ...]
    settings: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    file: str | bytes | None = None
    text: bytes | None = None


BEFORE_ANY_RANK = [
    Wrong(
        "tier without its part",
        2,
        ("it is one of none, optimizer:cpu,", "try: optimizer:nvme or params+optimizer:nvme"),
        ("offload.tier=nvme",),
    ),
    Wrong("cuda without a GPU", 7, ("no CUDA device", "try:"), ("run.device=cuda",)),
    Wrong("directory for a run.toml", 2, ("cannot be read",), argv=("train", ".")),
    Wrong(
        "TOML nested deep", 2, ("cannot be read", "deep"), argv=("train", "file"), file="a = " + "[" * 5000
    ),
    Wrong("plan nested deep", 2, ("not a saved plan",), argv=("train", "--plan", "file"), file="[" * 50_000),
    Wrong("long path of a run", 2, ("cannot be read",), argv=("train", "a" * 300)),
    Wrong("long name of a model", 2, ("there is no model",), argv=("plan", "a" * 300)),
    Wrong("long path of a model", 2, ("cannot be read",), argv=("plan", "a" * 300 + ".json")),
    Wrong("NUL in a path", 2, ("cannot be read",), argv=("plan", "a\0b.json")),
    Wrong("long path of hardware", 2, ("cannot be read",), argv=("plan", "--on", "a" * 300 + ".toml")),
    Wrong("long path of a report", 2, ("is not a directory",), argv=("report", "a" * 300)),
    Wrong("long path of a checkpoint", 6, ("too long",), argv=("ckpt", "list", "a" * 300)),
    Wrong("device for a model", 2, ("not a regular file",), argv=("plan", "/dev/zero")),
    Wrong("device for a run", 2, ("not a regular file",), argv=("train", "/dev/zero")),
    Wrong("device for a config", 2, ("not a regular file",), argv=("convert", "/dev/zero")),
    Wrong("device for a plan", 2, ("not a regular file",), argv=("train", "--plan", "/dev/zero")),
    Wrong("device for hardware", 2, ("cannot be read",), argv=("plan", "--on", "/dev/zero.toml")),
    Wrong("config nested deep", 2, ("file is of no format",), argv=("convert", "file"), file="[" * 1500),
]

ON_A_RANK = [
    Wrong("data that is not there", 5, ("got:", "try:"), ("data.source=text", 'data.paths=["none-*.txt"]')),
    Wrong("empty data", 5, ("got:",), ("data.source=text", 'data.paths=["data.txt"]'), text=b""),
    Wrong(
        "too little data", 5, ("got:",), ("data.source=text", 'data.paths=["data.txt"]'), text=b"too short"
    ),
    Wrong(
        "data with the separator in it",
        5,
        ("data.txt",),
        ("data.source=text", 'data.paths=["data.txt"]'),
        text=b"a\0b" * 1000,
    ),
    Wrong("vocabulary of less than a byte", 2, ("vocabulary",), ("model.vocabulary=100",)),
    Wrong("nothing to resume", 6, ("no run to resume", "try:"), argv=("--resume",)),
    Wrong("file for a directory", 2, ("run's directory", "try:"), ("run.dir=file",), file="precious"),
    Wrong(
        "model that no memory holds",
        8,
        ("ran out of memory", "got:", "TiB more", "out-of-memory/step-00000001-rank-00000.txt"),
        ("model.vocabulary=1000000000", "model.d_model=200000"),
    ),
    Wrong("tracker that is not installed", 2, ("fullshard[wandb]",), ('log.trackers=["wandb"]',)),
]


def arguments(case: Wrong, *options: str) -> list[str]:
    if case.argv and not case.argv[0].startswith("-"):
        return list(case.argv)
    settings = [*TINY, "run.dir=run", *case.settings]
    return ["train", *options, *case.argv, *(part for setting in settings for part in ("--set", setting))]


def check(case: Wrong, capfd: Any, *options: str) -> None:
    if case.file is not None:
        Path("file").write_bytes(case.file.encode() if isinstance(case.file, str) else case.file)
    if case.text is not None:
        Path("data.txt").write_bytes(case.text)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    code = main(arguments(case, *options))
    said = capfd.readouterr().err
    assert code == case.code, said
    for words in case.says:
        assert words in said, said
    assert "Traceback" not in said
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed"


@pytest.mark.parametrize("case", BEFORE_ANY_RANK, ids=lambda case: case.name)
def test_wrong_input_is_refused_before_any_rank_starts(
    case: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    check(case, capfd)


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as the one rank that torchrun would have started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.chdir(tmp_path)
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", ON_A_RANK, ids=lambda case: case.name)
def test_wrong_input_is_refused_on_a_rank(case: Wrong, capfd: Any) -> None:
    check(case, capfd, "--no-plan")


@pytest.mark.usefixtures("one_rank")
def test_the_checkpoint_of_another_model_is_refused_and_kept(capfd: Any) -> None:
    settings = ["--no-plan", *(part for setting in [*TINY, "run.dir=run"] for part in ("--set", setting))]
    assert main(["train", *settings]) == 0
    before = {path: path.read_bytes() for path in Path("run/checkpoints").rglob("*") if path.is_file()}
    capfd.readouterr()
    for other, says in [("model.layers=2", "blocks.1"), ("model.d_ff=32", "feed_forward")]:
        assert main(["train", "--resume", *settings, "--set", other, "--set", "train.steps=4"]) == 6
        said = capfd.readouterr().err
        assert says in said
        assert "Traceback" not in said
    assert (
        main(["train", "--resume", *settings, "--set", "optimizer.name=sgd", "--set", "train.steps=4"]) == 6
    )
    assert "optimizer.name adamw -> sgd" in capfd.readouterr().err
    assert before == {
        path: path.read_bytes() for path in Path("run/checkpoints").rglob("*") if path.is_file()
    }
