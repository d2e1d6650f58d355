"""Figures of a run that was resumed are those of its last attempt."""

import json
from datetime import UTC, datetime
from pathlib import Path

from fullshard.report.comparison import compare_run
from fullshard.report.run_record import read_run
from tests.report.runs import plan, start, write_events, write_steps


def test_the_peak_and_seconds_of_a_resumed_run_are_those_since_it_resumed(tmp_path: Path):
    write_steps(tmp_path, 20)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:  # the first attempt needed more memory, and was slower
        first = line["step"] <= 10
        line |= {"seconds": 5.0 if first else 1.0}
        line |= {2: {"peak_bytes": 900}, 12: {"peak_bytes": 300}}.get(line["step"], {})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    made = plan()
    write_events(tmp_path, *start(1, made), *start(2, made), ("resume", 2, 10, {"ranks": 2}))
    compared = compare_run(read_run(tmp_path, is_running=True, now=datetime.now(UTC)))
    assert [line.measured for line in (compared.memory[-1], compared.step[-1])] == [300, 1.0]
