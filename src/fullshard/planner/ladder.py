"""The ladder: settings that make a step faster or smaller, each on top of the others, and their predictions.

`fullshard plan --ladder` predicts the rungs for any model and hardware, `python -m bench.gpu` measures them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.errors import FullshardError, MissingExtraError, PlanError, SpecError, TraceError
from fullshard.planner.result import PlanRequest
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.planner.search.search import search
from fullshard.quantities import format_bytes
from fullshard.report.ladder import PlannedRung
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    what: what changes, in a few words
    settings: `section.key=value`, which replace those of the rungs below
    expandable_segments: whether CUDA's allocator grows its segments from here on, instead of making new ones
    unpredicted: why the planner may predict no change
    """

    name: str
    what: str
    settings: tuple[str, ...] = ()
    expandable_segments: bool = False
    unpredicted: str = ""


LADDER = (
    Rung(
        *("eager", "a kernel per operation, whole logits"),
        settings=("run.compile=false", "train.loss_chunk=0"),
    ),
    Rung("compile", "torch.compile of each block", ("run.compile=true",)),
    Rung("chunked loss", "logits in chunks of rows", ("train.loss_chunk=auto",)),
    Rung(
        *("segments", "expandable segments of CUDA's allocator"),
        expandable_segments=True,
        unpredicted="no change is predicted, because the reserve was measured without them only",
    ),
    Rung("fp8", "matmuls of blocks in fp8", ("precision.mode=fp8",)),
)


def plan_ladder(question: PlanRequest) -> list[PlannedRung]:
    """Plans every rung: the fastest plan that fits with its settings and those of the rungs below it.

    A rung that the model, the hardware or this installation cannot climb has a reason instead of a plan, and
    the rungs above it do without. Raises SpecError if the question is about a saved spec.
    """
    subject, hardware = question.subject, question.hardware
    if subject.spec is not None:
        raise SpecError(
            "--ladder needs the model itself.",
            got=subject.name,
            why="a saved spec holds for the loss and the precision that it was traced with",
            fix="a preset, a config.json or a run.toml",
        )
    rungs, run, below = list[PlannedRung](), question.asked, None
    for rung in LADDER:
        try:
            wanted = _run_on_rung(rung, run, hardware=hardware)
            plan = _fastest_plan(subject.describe_model(wanted, hardware), hardware, run=wanted)
        except (SpecError, PlanError, TraceError, MissingExtraError) as error:
            rungs.append(PlannedRung(rung.name, rung.what, reason=_reason_text(error)))
            continue
        same = below is not None and below.prediction == plan.prediction
        rungs.append(PlannedRung(rung.name, rung.what, plan, rung.unpredicted if same else ""))
        run, below = wanted, plan
    return rungs


def check_rungs_are_open(overridden: Sequence[str]) -> None:
    """Raises SpecError if `--set` gives a setting that a rung changes. `overridden`: `section.key=value`."""
    keys = {text.partition("=")[0].strip() for text in overridden}
    for rung in LADDER:
        for setting in rung.settings:
            key = setting.partition("=")[0]
            if key in keys and key != "precision.mode":  # the rungs below fp8 keep the user's
                raise SpecError(
                    f"--ladder sets {key} itself.",
                    got=f"--set {key}",
                    why=f"its rung {rung.name!r} is {setting}",
                    fix=f"--ladder without --set {key}",
                )


def _run_on_rung(rung: Rung, run: Run, *, hardware: Hardware) -> Run:
    """Returns the run with a rung's settings. Raises SpecError if run or hardware cannot have them."""
    if rung.expandable_segments and hardware.device == "cpu":
        raise SpecError("expandable segments are of CUDA's allocator, and these ranks are on the CPU.")
    wanted = run.with_overrides(rung.settings)
    if wanted.precision.mode.startswith("fp8") and "fp8" not in hardware.chip.flops_per_second:
        raise SpecError(f"the catalog has no fp8 matmuls of {hardware.chip.name}.")
    return wanted


def _fastest_plan(spec: ModelSpec, hardware: Hardware, *, run: Run) -> Plan:
    """Returns the fastest plan that fits. Raises PlanError, without looking for changes that would fit."""
    found = search(spec, hardware, run)
    if found.best is not None:
        return found.best
    assert found.closest is not None, "a search that considered something has a best plan or a closest"
    prediction = require_prediction(found.closest)
    over = prediction.required_device_bytes - prediction.capacity_bytes
    raise PlanError(f"no plan fits, the closest needs {format_bytes(max(0, over))} more per rank.")


def _reason_text(error: FullshardError) -> str:
    """Returns the error as one line without its full stop."""
    return " ".join(error.what.split()).removesuffix(".") + (f" (got {error.got})" if error.got else "")
