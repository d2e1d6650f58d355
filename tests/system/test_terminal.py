"""Text of others reaches a terminal with its control characters shown, by every exit."""

import io
import json
import logging
import re
import unicodedata
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fullshard.cli.main import main
from fullshard.observe.progress import show_progress
from fullshard.report.comparison import show_measurement
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.system.terminal import escape_control_characters, escape_to_single_line
from tests.checkpoint.states import saved
from tests.checkpoint.test_strangers import rewritten_manifest
from tests.spec.records.test_measurement import measurement

EVIL = "a\x1b[2J\x07\x9b\u202eb\rc"


def assert_shown(text: str) -> None:
    assert r"a\u001b[2J\u0007\u009b\u202eb\u000dc" in text
    assert not re.search("[\x1b\x07\x9b\u202e\r]", text)


@given(st.text())
def test_printable_text_can_be_printed_and_json_reads_it_back(text: str) -> None:
    escape_control_characters(text).encode()
    assert not any(unicodedata.category(one) in ("Cc", "Zl", "Zp") for one in escape_to_single_line(text))
    encoded = escape_control_characters(json.dumps(text, ensure_ascii=False))
    assert json.loads(encoded) == text
    assert escape_control_characters(encoded) == encoded


def test_names_in_a_checkpoint_are_escaped_by_every_command(tmp_path: Path, capsys) -> None:
    root = tmp_path / EVIL
    one, other = saved(root / "checkpoints", 1), saved(root / "checkpoints", 2)
    name = json.dumps(f"model.{EVIL}")
    rewritten_manifest(one, lambda text: text.replace('"model.uneven"', name))
    (other / EVIL).touch()
    for arguments in (["verify", str(root)], ["diff", str(one), str(other)], ["list", str(root / "absent")]):
        main(["ckpt", *arguments])
        assert_shown("".join(capsys.readouterr()))


def test_logs_progress_and_tables_are_escaped(tmp_path: Path, capsys, caplog) -> None:
    main(["ckpt", "list", str(tmp_path)])
    logging.getLogger("fullshard").warning("passing over %s", EVIL)
    assert_shown(caplog.messages[-1])
    out = io.StringIO()
    with show_progress(steps=1, every=1, world_size=1, file=out) as shown:
        shown.print_line(EVIL)
    assert_shown(out.getvalue())
    show_labelled_lines([(EVIL, "")])
    assert_shown(capsys.readouterr().out)
    show_table([""], [[EVIL]])
    assert_shown(capsys.readouterr().out)
    for field in ("sample", "directory"):
        show_measurement(measurement().model_copy(update={field: EVIL}))
        assert_shown(capsys.readouterr().out)
