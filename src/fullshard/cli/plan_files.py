"""Files that `fullshard plan` writes: the plan, the model's spec, and the planned step as a trace."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.planning.result import PlanResult
    from fullshard.spec.model import ModelSpec
    from fullshard.spec.plan import Plan


def check_outputs_replaceable(
    plan: Path | None, spec: Path | None, *, trace: Path | None, force: bool
) -> None:
    """Raises SpecError if an output file must not be replaced, or has no directory.

    This is checked before anything is planned.
    """
    from fullshard.report.step_traces import check_is_trace
    from fullshard.spec.model import ModelSpec
    from fullshard.spec.plan import Plan
    from fullshard.system.targets import build_can_load_predicate, check_output_file

    for path, load in ((plan, Plan.load), (spec, ModelSpec.load), (trace, check_is_trace)):
        if path is not None:
            with _convert_write_errors(path):
                path.parent.stat()
            check_output_file(path, is_kind=build_can_load_predicate(load), force=force, streams=True)


def save_to_file(value: "Plan | ModelSpec", path: Path | None) -> None:
    """Saves a plan or a spec to `path`, if one is given. Raises SpecError."""
    if path is not None:
        with _convert_write_errors(path):
            value.save(path)


def save_trace_file(answer: "PlanResult", path: Path | None) -> None:
    """Saves the predicted step of the best plan to `path`, if one is given. Raises SpecError."""
    if path is None:
        return
    from fullshard.planner.spans import predict_step_spans
    from fullshard.report.step_traces import save_trace

    question, plan = answer.question, answer.best
    spans = predict_step_spans(question.spec, plan, hardware=question.hardware)
    about = {
        "model": question.model_summary,
        "hardware": question.hardware_summary,
        "rates": question.hardware.source,
    }
    with _convert_write_errors(path):
        save_trace(path, {f"predicted: one of {plan.world_size:,} ranks": spans}, about=about)


@contextmanager
def _convert_write_errors(path: Path) -> Generator[None]:
    from fullshard.errors import SpecError

    try:
        yield
    except OSError as error:
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix="another path") from error
