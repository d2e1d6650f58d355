"""Traces: the file holds every span, and no two of a track overlap after rounding."""

import gzip
import json
from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.report.step_traces import check_is_trace, save_trace
from fullshard.spec.records.step_spans import StepSpan

THIRD = 1e-6 / 3
SPANS = [
    StepSpan("compute", "forward", 0.0, THIRD, unit="blocks.0", microbatch=1),
    StepSpan("compute", "forward", THIRD, 2 * THIRD, unit="blocks.1", microbatch=1),
    StepSpan("all-gather", "all-gather", 0.0, THIRD, unit="blocks.1", microbatch=1),
    StepSpan("compute", "update", 2 * THIRD, 3 * THIRD),
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_holds_its_spans_on_a_thread_for_each_track(tmp_path: Path, name: str):
    path = tmp_path / name
    save_trace(path, {"rank 0": SPANS[:1], "rank 1": SPANS}, about={"model": "small"})
    check_is_trace(path)
    text = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    trace = json.loads(text)
    assert trace["otherData"]["model"] == "small"
    events = [event for event in trace["traceEvents"] if event["pid"] == 2]
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(threads) == {"compute", "all-gather"}
    assert [name for name, thread in threads.items() if thread == 2] == ["compute"], (
        "shown as the main thread"
    )
    computing = [event for event in events if event["ph"] == "X" and event["tid"] == threads["compute"]]
    assert [event["name"] for event in computing] == ["forward (blocks.0)", "forward (blocks.1)", "update"]
    ends = [round(1000 * (event["ts"] + event["dur"])) for event in computing]
    assert ends == [333, 667, 1000], "nanoseconds"
    assert [round(1000 * event["ts"]) for event in computing] == [0, *ends[:-1]]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"traceEvents": []}'])
@pytest.mark.parametrize("name", ["other.json", "other.json.gz"])
def test_other_files_are_not_traces(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError):
        check_is_trace(path)
