"""Makes pages of `fullshard report --html` from real runs, and opens each in a headless browser.

    PYTHONPATH=. python bench/report_pages.py DIRECTORY [--browser /usr/bin/chromium]

The runs: the default one; one with a rank that was killed and one that held the other up, which was stopped
and resumed; one whose rank was killed; one that trains while its page is made; these four side by side; and
100,000 recorded steps. Each page is opened in light and dark, and printed.

Fails if a page is larger than 150 KB, has a script error, makes a request, or is wider than its window.
Writes pictures. Needs `pip install playwright` and a Chromium; without these, only the pages are made.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.report import runs

LARGEST_BYTES = 150_000
LONG_STEPS = 100_000
PICTURED = "faults.html"
SMALL = ("model.d_model=96", "model.layers=3", "model.heads=4", "checkpoint.every=20", "log.every=5")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("directory", type=Path)
    asked.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    given = asked.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    pages = make_pages(given.directory.resolve())
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        given.browser = None
    if given.browser is None:
        print("no browser: the pages were made, and not opened")
        return
    problems = [one for page in pages for one in open_page(page, browser=given.browser)]
    print("\n".join(problems) or f"{len(pages)} pages are right")
    sys.exit(bool(problems))


def make_pages(root: Path) -> list[Path]:
    """Trains the runs, and returns the paths of their pages."""
    default, faults, died, going = (root / name for name in ("default", "faults", "died", "goes-on"))
    if not (default / "measurement.json").exists():
        with training(default, "train.steps=200") as run:
            run.wait()
    if not faults.exists():
        settings = (*SMALL, "train.steps=200", "run.restarts=2", "optimizer.learning_rate=1e-3")
        with training(faults, *settings) as run:
            wait_for_step(faults, 50)
            os.kill(rank_process(run.pid, rank=1), signal.SIGKILL)
            wait_for_step(faults, 60)
            hold_up(rank_process(run.pid, rank=1), lambda: has_step(faults, 110))
            wait_for_step(faults, 130)
            run.send_signal(signal.SIGINT)
            run.wait()
        with training(faults, *settings, resume=True) as run:
            run.wait()
    if not died.exists():
        with training(died, *SMALL, "train.steps=400", "optimizer.learning_rate=1e-2") as run:
            wait_for_step(died, 70)
            os.kill(rank_process(run.pid, rank=1), signal.SIGKILL)
            run.wait()
    pages = [report(root, one.name, one) for one in (default, faults, died)]
    shutil.rmtree(going, ignore_errors=True)
    with training(going, *SMALL, "train.steps=5000", "sharding.strategy=full_shard") as run:
        wait_for_step(going, 60)
        pages.append(report(root, "goes-on", going))
        run.send_signal(signal.SIGINT)
        run.wait()
    long = root / "long"
    if not long.exists():
        runs.write_steps(long, LONG_STEPS)
        saves = [("save", 1, step, {"path": "p"}) for step in range(500, LONG_STEPS, 500)]
        events = (*runs.start(1, runs.plan(steps=LONG_STEPS)), *saves, ("end", 1, LONG_STEPS, {"loss": 2.0}))
        runs.write_events(long, *events)
    return [*pages, report(root, "long", long)]


@contextmanager
def training(directory: Path, *settings: str, resume: bool = False) -> Iterator["subprocess.Popen[bytes]"]:
    """Context with `fullshard train` of two ranks, which is killed if it still runs."""
    command = [sys.executable, "-m", "fullshard", "train", *(["--resume"] if resume else [])]
    for one in ("run.ranks=2", f"run.dir={directory}", *settings):
        command += ["--set", one]
    with open(directory.with_suffix(".log"), "ab") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def wait_for_step(directory: Path, step: int, *, seconds: float = 600) -> None:
    """Waits until `metrics.jsonl` has `step`."""
    end = time.monotonic() + seconds
    while not has_step(directory, step):
        time.sleep(0.2)
        if time.monotonic() > end:
            raise SystemExit(f"{directory} does not reach step {step}")


def has_step(directory: Path, step: int) -> bool:
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return bool(lines) and json.loads(lines[-1])["step"] >= step


def hold_up(process: int, has_ended: Callable[[], bool]) -> None:
    """Pauses a process for 150 ms again and again."""
    while not has_ended():
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.15)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.1)


def rank_process(launcher: int, *, rank: int) -> int:
    """Returns the process id of a rank that `launcher` started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    below = [launcher]
    for process in below:
        below += children.get(process, [])
    is_rank: Callable[[int], bool] = lambda one: f"RANK={rank}".encode() in environment(one)  # noqa: E731
    return next(one for one in below[1:] if is_rank(one))


def environment(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")


def report(root: Path, name: str, *directories: Path) -> Path:
    """Writes a page, and returns its path."""
    path = root / f"{name}.html"
    names = [str(one.relative_to(root)) for one in directories]
    command = [sys.executable, "-m", "fullshard", "report", *names, "--html", path.name, "--force"]
    subprocess.run(command, check=True, cwd=root)
    return path


def open_page(path: Path, *, browser: str) -> list[str]:
    """Returns what is wrong with a page, after pictures of it were written beside it."""
    from playwright.sync_api import sync_playwright

    size, problems = path.stat().st_size, list[str]()
    if size >= LARGEST_BYTES:
        problems.append(f"{path.name}: {size} bytes")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page: Any = opened.new_page(color_scheme=scheme, viewport={"width": 1180, "height": 900})
            page.on("pageerror", lambda error: problems.append(f"{path.name}: script: {error}"))
            page.on("console", lambda one: problems.append(f"{path.name}: console: {one.text}"))
            page.on("request", lambda one: _note_request(problems, one.url, page=path))
            page.goto(path.as_uri())
            for svg in page.query_selector_all("svg[data-key]"):
                svg.hover()
                if not page.evaluate("document.querySelector('.readout').textContent.includes('step')"):
                    problems.append(f"{path.name}: the pointer reads no value")
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                problems.append(f"{path.name}: wider than its window")
            page.screenshot(path=path.with_suffix(f".{scheme}.png"), full_page=True)
            if scheme == "light" and path.name == PICTURED:
                clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": 660}
                page.screenshot(path=path.with_name("report-curves.png"), clip=clip)  # of docs/images
        page.emulate_media(media="print")
        page.pdf(path=path.with_suffix(".pdf"))
        page.set_viewport_size({"width": 718, "height": 1000})  # a sheet of A4 between its margins
        page.screenshot(path=path.with_suffix(".print.png"), full_page=True)
        opened.close()
    return problems


def _note_request(problems: list[str], url: str, *, page: Path) -> None:
    if url != page.as_uri():
        problems.append(f"{page.name}: request of {url}")


if __name__ == "__main__":
    main()
