"""A reader that leaves ends commands that print, quietly, and nothing else."""

import os
from pathlib import Path

import pytest

from fullshard.system.standard_streams import CLOSED_OUTPUT_EXIT_CODE, tolerant_stream


@pytest.fixture
def abandoned() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_messages_to_a_reader_that_has_left_are_dropped(abandoned: int) -> None:
    stream = tolerant_stream(abandoned, like=None, is_result=False)
    print("a message", file=stream, flush=True)
    os.close(abandoned)
    print("another, and the descriptor is closed", file=stream, flush=True)


def test_a_result_without_a_reader_ends_the_process_once(abandoned: int) -> None:
    stream = tolerant_stream(abandoned, like=None, is_result=True)
    with pytest.raises(SystemExit) as ended:
        print("a result", file=stream, flush=True)
    assert ended.value.code == CLOSED_OUTPUT_EXIT_CODE
    stream.flush()  # as Python does at its end: nothing more is raised


def test_a_result_that_cannot_be_written_to_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = tolerant_stream(full.fileno(), like=None, is_result=True)
        with pytest.raises(OSError, match="No space"):
            print("a result", file=stream, flush=True)


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as like:
        stream = tolerant_stream(like.fileno(), like=like, is_result=True)
        print("grün ␀", file=stream, flush=True)
    assert (tmp_path / "out").read_text() == "gr\\xfcn \\u2400\n"
