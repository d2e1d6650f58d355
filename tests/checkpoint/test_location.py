"""Which URLs and paths are places for checkpoints."""

from pathlib import Path

import pytest

from fullshard.checkpoint.location import location_of
from fullshard.cli.main import main
from fullshard.errors import CheckpointError, SpecError
from fullshard.spec.run import Run


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3:///run", "gs://", "abfs:///run", "memory://"])
def test_a_url_without_a_bucket_is_no_place(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="names no bucket"):
        location_of(url)
    assert main(["ckpt", "list", url]) == SpecError.exit_code
    assert "names no bucket" in capsys.readouterr().err


@pytest.mark.parametrize("cut", ["s3:/bucket/run", Path("s3://bucket/run"), Path("memory://run")])
def test_a_url_that_lost_a_slash_is_no_directory(cut: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"://.* as text"):
        location_of(cut)


def test_disks_of_nodes_are_no_urls() -> None:
    with pytest.raises(SpecError, match="needs dir to be a directory"):
        Run.load(overrides=["checkpoint.storage=per_node", "checkpoint.dir=s3://bucket/run"])
