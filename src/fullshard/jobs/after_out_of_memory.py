"""Finds, after a rank ran out of memory, the settings of the run that would have fitted."""

from collections.abc import Sequence

from fullshard.errors import PlanError, SpecError, TraceError
from fullshard.launch.detect import detect_hardware
from fullshard.launch.environment import is_started_by_torchrun
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.search.search import no_plan_fits_error, search
from fullshard.quantities import format_bytes
from fullshard.report.run_comparison import differing_settings
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent
from fullshard.spec.run import Run


def fitting_settings_text(run: Run, plan: Plan, *, failures: Sequence[RunEvent]) -> str | None:
    """Returns the settings of the fastest plan that would have fitted; None if the planner cannot say.

    run: the user's settings, of which the open ones may change
    plan: the plan that ran out of memory, with its prediction
    failures: the events `out_of_memory` of its ranks
    """
    if plan.prediction is None or not failures:
        return None
    try:
        train = {name: getattr(plan.run.train, name) for name in ("steps", "epochs")}  # resolved since
        settings = {"precision": plan.run.precision, "train": run.train.model_copy(update=train)}
        run = run.model_copy(update=settings)
        hardware = detect_hardware(plan.device, ranks=None if is_started_by_torchrun() else plan.world_size)
        spec = describe_run(run, hardware.device, attention_kernel=hardware.attention_kernel)
        return choose_fitting_settings(spec, hardware, run=run, plan=plan, failures=failures)
    except (PlanError, SpecError, TraceError, MemoryError):
        return None


def choose_fitting_settings(
    spec: ModelSpec, hardware: Hardware, *, run: Run, plan: Plan, failures: Sequence[RunEvent]
) -> str:
    """Returns the settings of the fastest plan of `run` that fits into the ranks' memory, or the error's fix.

    Raises PlanError, as `search` does.
    """
    prediction = plan.prediction
    assert prediction is not None, "the caller has checked it"
    capacity = min(available_bytes(prediction, one) for one in failures)
    found = search(spec, hardware, run, capacity_bytes=capacity)
    if found.best is None:
        assert found.closest is not None, "a search that considered something has a best plan or a closest"
        chip = hardware.chip.model_copy(update={"memory_bytes": capacity})
        limited = hardware.model_copy(update={"chip": chip, "usable_fraction": 1.0})
        error = no_plan_fits_error(found.closest, spec=spec, hardware=limited, run=run)
        return f"no plan of this run fits into the {format_bytes(capacity)} that the rank had; {error.fix}"
    best, needed = found.best, found.best.prediction
    assert needed is not None, "the search predicts its plans"
    changes = [f"{key} = {new} (was {old})" for key, (old, new) in differing_settings([plan.run, best.run])]
    slower = needed.time.total / prediction.time.total - 1 if prediction.time.total else 0.0
    price = f", with {100 * slower:.0f} % more time per step" if slower >= 0.005 else ""
    text = ", ".join(changes) or "the same settings"
    return f"{text}: {format_bytes(needed.required_device_bytes)} of {format_bytes(capacity)}{price}"


def available_bytes(prediction: Prediction, failure: RunEvent) -> int:
    """Returns the bytes that a plan's prediction may have at most, so that it fits where this plan failed.

    If the rank needed more than the plan expected, other plans are assumed to need more by the same factor.
    """
    held = failure.details["held_bytes"]
    factor = max(1.0, (held + (failure.details["requested_bytes"] or 0)) / prediction.memory.total)
    beside = prediction.required_device_bytes - prediction.memory.total
    return int(held / factor) + beside
