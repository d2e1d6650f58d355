"""Reads the spans that the ranks of a run wrote, and the planned step beside them."""

from collections.abc import Iterable
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.spec.measured_step import StepSpans
from fullshard.spec.run_files import METRICS, PREDICTED_STEP, SPANS
from fullshard.spec.step_span import StepSpan
from fullshard.system.files import open_regular_file

_LONGEST_LINE_BYTES = 16 << 20


def find_steps(directory: Path) -> dict[int, set[str]]:
    """Returns step -> names of the files that hold it, for the run in `directory`. Raises OSError."""
    found: dict[int, set[str]] = {}
    for path in _rank_files(directory):
        with open(path, "rb", opener=open_regular_file) as file:
            for line in file:
                if (step := _step_of_line(line)) is not None:
                    found.setdefault(step, set()).add(path.name)
    return found


def read_step(directory: Path, step: int) -> list[StepSpans]:
    """Returns the spans of `step` on each rank that wrote it, in the order of ranks. Raises OSError.

    A step that was repeated counts as its last attempt ran it.
    """
    ranks: dict[int, StepSpans] = {}
    for path in _rank_files(directory):
        with open(path, "rb", opener=open_regular_file) as file:
            lines = [line for line in file if _step_of_line(line) == step]
        if lines and (measured := StepSpans.parse(lines[-1])) is not None:
            ranks[measured.rank] = measured
    last = max((one.attempt for one in ranks.values()), default=0)
    return [one for _, one in sorted(ranks.items()) if one.attempt == last]


def read_predicted_step(directory: Path) -> StepSpans | None:
    """Returns the planned step of the run; None if it was not recorded, or cannot be read."""
    try:
        with open(directory / SPANS / PREDICTED_STEP, "rb", opener=open_regular_file) as file:
            return StepSpans.parse(file.read(_LONGEST_LINE_BYTES))
    except OSError:
        return None


def choose_step(directory: Path, step: int | None) -> int:
    """Returns `step`, or the last sampled step. Raises SpecError if the run has no such spans."""
    if not directory.is_dir():
        raise SpecError(f"{directory} is not a directory.", fix="the directory of a run: runs/default")
    try:
        found = find_steps(directory)
    except OSError as error:
        raise SpecError(f"{error.filename} cannot be read.", got=error.strerror) from error
    if not found:
        known = (directory / METRICS).exists()
        raise SpecError(
            f"{directory} holds no spans.",
            got=f"no {SPANS}/rank-*.jsonl" + ("" if known else f", and no {METRICS}"),
            why="a run writes them from its tenth step on, unless log.trace_every = 0" if known else None,
            fix="log.trace_every = 100"
            if known
            else "the directory that run.dir names, such as runs/default",
        )
    if step is None:
        most = max(len(files) for files in found.values())
        return max(one for one, files in found.items() if len(files) == most)
    if step not in found:
        raise SpecError(
            f"{directory} holds no spans of step {step}.",
            got=f"spans of steps {_list_text(sorted(found))}",
            fix="one of these with --step, or a smaller log.trace_every in the next run",
        )
    return step


def trace_processes(measured: list[StepSpans], predicted: StepSpans | None) -> dict[str, list[StepSpan]]:
    """Returns the processes of a trace: one for each rank, on one axis of time, and the planned step.

    The axis begins where the first rank begins; the planned step begins there, too.
    """
    start = min(one.begin_ns for one in measured)
    processes: dict[str, list[StepSpan]] = {}
    for one in measured:
        late = (one.begin_ns - start) * 1e-9
        processes[f"rank {one.rank} on {one.host}"] = [
            span._replace(begin=span.begin + late, end=span.end + late) for span in one.spans
        ]
    if predicted is not None:
        processes["predicted: one rank"] = list(predicted.spans)
    return processes


def _rank_files(directory: Path) -> Iterable[Path]:
    return sorted((directory / SPANS).glob("rank-*.jsonl"))


def _step_of_line(line: bytes) -> int | None:
    """Returns the step of a whole line, which `StepSpans.to_line` begins with it."""
    begin, _, rest = line.partition(b'{"step":')
    digits, comma, _ = rest.partition(b",")
    is_whole = not begin and comma and line.endswith(b"\n") and len(line) <= _LONGEST_LINE_BYTES
    return int(digits) if is_whole and digits.isdigit() and len(digits) < 16 else None


def _list_text(steps: list[int]) -> str:
    """Returns the steps; of more than eight, the first three and the last three."""
    shown = [f"{one}" for one in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-3:]])
