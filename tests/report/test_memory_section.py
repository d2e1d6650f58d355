"""The page shows the memory of each rank, leaks at their steps, and ranks that ran out of memory."""

from pathlib import Path

from fullshard.report.page import render_page
from fullshard.report.run_record import read_run
from fullshard.spec.records.live_status import LiveStatus
from tests.report.runs import STARTED, plan, start, write_events, write_steps
from tests.report.test_watch import live_status


def leaking(directory: Path, live: LiveStatus) -> str:
    write_steps(directory, 40)
    leak = {"rank": 1, "memory": "device memory", "bytes_per_step": 3 << 20}
    lost = {
        "rank": 1,
        "phase": "forward",
        "held_bytes": 5 << 30,
        "requested_bytes": 7,
        "path": "p/report.txt",
    }
    retry = {"rank": 0, "count": 4, "reserved_bytes": 9}
    write_events(
        directory,
        *start(1, plan()),
        ("leak", 1, 20, leak),
        ("allocator_retry", 1, 20, retry),
        ("out_of_memory", 1, 41, lost),
        ("fault", 1, 40, {"rank": 1, "error": "TrainError", "message": "rank 1 ran out of memory"}),
    )
    (directory / "live.json").write_text(live.model_dump_json())
    return render_page([read_run(directory, is_running=False, now=STARTED)])


def test_the_page_shows_memory_leaks_and_the_end_of_memory(tmp_path: Path):
    page = leaking(tmp_path / "run", live_status())
    assert 'class="sign leak"' in page
    assert "rank 1 leaks device memory: 3.00 MiB per step" in page
    assert "rank 1 ran out of memory in forward, while it held 5.00 GiB of tensors; see p/report.txt" in page
    assert "allocator freed its cache, 4 times in 20 steps" in page
    assert "<td>node<td>300 B<td>350 B<td>0 %<td>2" in page


def test_the_state_of_an_earlier_attempt_is_not_shown(tmp_path: Path):
    old = live_status().model_copy(update={"attempt": 7})
    assert "Memory of the ranks" not in leaking(tmp_path / "run", old)
