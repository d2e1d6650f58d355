"""The plan that `fullshard train` runs, and the settings that would have fitted a rank out of memory."""

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.errors import FullshardError, PlanError, SpecError, TraceError
from fullshard.launch import environment
from fullshard.launch.calibration import measure_unless_known
from fullshard.launch.detect import detect_hardware
from fullshard.launch.gc import disable_gc, freeze_imports_in_gc
from fullshard.launch.outcome import OwnFaultRecorder
from fullshard.launch.rank import be_killed_when_torchrun_ends
from fullshard.launch.request import LaunchRequest
from fullshard.launch.start import choose_rank_count_and_device
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.predict.offload import with_infinitely_fast_drive
from fullshard.planner.search import parallel_degrees
from fullshard.planner.search.search import no_plan_fits_error, predict, require_best, search
from fullshard.quantities import format_bytes
from fullshard.report.plan import differing_settings
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType, Plan, other_rank_count_error
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.run_files import CHECKPOINTS
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.settings.run_checks import check_own_model_has_data, unused_setting_notes
from fullshard.system.terminal import print_to_stderr

if TYPE_CHECKING:
    from torch.nn import Module


_PATHS_OF_NODE = ("offload.path", "data.cache", "data.paths", "data.validation_paths")


@contextmanager
def planned_on_rank_zero(
    request: LaunchRequest, make_plan: Callable[[], LaunchRequest], *, timeout_seconds: float | None = None
) -> Generator[LaunchRequest]:
    """Context with the request that `make_plan()` returns. Collective under torchrun or srun.

    There the ranks open the process group of `request` first, and `call_on_rank_zero` calls `make_plan`. If
    that fails, rank 0 raises its error, and the others exit with its exit code: one text is shown. A rank
    with other settings than rank 0 keeps those of `_PATHS_OF_NODE`, and prints the others. To plan epochs,
    rank 0 needs the data, which all ranks build together.

    timeout_seconds: how long the ranks wait for each other; None for the run's time
    """
    if not environment.prepare_environment_if_started_as_rank():
        yield make_plan()
        return
    be_killed_when_torchrun_ends()  # also while it waits for the plan
    with freeze_imports_in_gc():
        from fullshard.distributed.agreement import call_on_rank_zero
        from fullshard.parallel.mesh import process_group

    def build_data_of_epochs(alive: Callable[[], None]) -> None:
        if request.run.train.epochs is not None and request.run.data.source != "python":
            import_module("fullshard.data.build").build_data(request.run, alive=alive)

    timeout_seconds = timeout_seconds or request.run.fault_tolerance.process_group_timeout_seconds
    with ExitStack() as stack:
        with OwnFaultRecorder(request.run.run.dir):
            stack.enter_context(process_group(request.run.run.device, timeout_seconds=timeout_seconds))
            try:
                texts = call_on_rank_zero(
                    lambda: [o.model_dump_json() for o in (make_plan(), request)],
                    meanwhile=build_data_of_epochs,
                )
            except FullshardError as error:
                if os.environ["RANK"] == "0":
                    raise
                raise SystemExit(error.exit_code) from error
        planned, first = map(LaunchRequest.model_validate_json, texts)
        yield _with_paths_of_node(planned, request, first=first)


def _with_paths_of_node(planned: LaunchRequest, own: LaunchRequest, *, first: LaunchRequest) -> LaunchRequest:
    """Returns `planned` with the paths of this rank's node. Prints its other settings that rank 0's replace.

    own, first: the requests of this rank and of rank 0, before they were planned
    """
    pairs = differing_settings([own.run, first.run])
    pairs += [("run.dir", [own.run.run.dir, first.run.run.dir])]
    pairs += [("--resume", [str(own.resume), str(first.resume)])]
    unused, run = list[str](), planned.run
    for key, (value, used) in pairs:
        section, _, name = key.partition(".")
        if key in _PATHS_OF_NODE:
            run = run.with_settings({section: {name: getattr(getattr(own.run, section), name)}})
        elif value != used:
            unused.append(f"{key} = {value} (used: {used})")
    if unused:
        _print_note(f"rank {os.environ['RANK']}: not used, because rank 0's hold: {', '.join(unused)}")
    plan = planned.plan and planned.plan.model_copy(update={"run": run})
    return planned.model_copy(update={"run": run, "plan": plan})


def request_with_plan(request: LaunchRequest, *, plain_defaults: bool = False) -> LaunchRequest:
    """Returns `request` with the fastest plan that fits, and its prediction.

    Called on one rank: see `planned_on_rank_zero`. If the planner cannot decide (because it does not know the
    hardware or the optimizer, or cannot trace the model), the plan has the run's plain defaults, and a note
    on standard error reports this. A plan in `request` only gets a prediction, or stays as it is if torchrun
    now has another number of ranks.

    plain_defaults: whether to plan nothing, and use the plain defaults

    Raises the error of a run that cannot be trained, before anything is allocated.
    """
    check_own_model_has_data((request.plan or request).run)
    request = _with_resolved_epochs(request)
    ranks, device = _rank_count_and_device_type(request)
    if request.plan is not None and not _check_plan_and_match_ranks(request.plan, ranks, device=device):
        return request  # nodes have left or joined: only the job can decide
    # Plain mistakes are found here, before torch is imported (unless something has imported it already).
    run = _with_resolved_precision((request.plan or request).run, device)
    plain = Plan.from_run(run, world_size=ranks, device=device)
    for note in unused_setting_notes(run):
        _print_note(note)
    if run.checkpoint.dir is not None:
        from fullshard.checkpoint.location import location_of

        location_of(run.checkpoint.dir)  # raises for a location that is not valid, before the model is built
    # A model of this package imports only torch, if anything.
    with freeze_imports_in_gc() if _has_only_builtin_parts(run) else disable_gc():
        model = None
        if not _has_only_builtin_parts(run):
            _print_note("the model is built without weights first, to check and plan the run")
            model = _build_and_check_model(run)
        if plain_defaults:
            _check_no_host_limit_if_unplanned(run, why="--no-plan was given", fix="leave out one of the two")
            plan = plain
        else:
            plan = _choose_plan(run, chosen=request.plan, plain=plain, model=model)
    if plan.prediction is not None and not plan.prediction.has_complete_step_time:
        _print_note(
            "how fast the drive is is not known: bytes are planned, and the step's time is predicted without "
            "it\n  try: fullshard calibrate --drive DIRECTORY, one on that drive"
        )
    return request.model_copy(update={"run": plan.run, "plan": plan})


def _with_resolved_epochs(request: LaunchRequest) -> LaunchRequest:
    """Returns `request` with the number of steps that its epochs take, which needs the tokenized data."""
    run = request.run
    if run.train.epochs is None:
        return request
    with freeze_imports_in_gc():
        from fullshard.data.build import build_data, resolve_epochs

    data = build_data(run)
    step, rows = _newest_step_and_rows(run) if request.resume else (0, 0)
    resolved = resolve_epochs(run, data, step=step, rows=rows)
    _print_note(
        f"train.epochs = {run.train.epochs:g} of {data.training_sequences:,} sequences: "
        f"train.steps = {resolved.train.step_count:,}"
    )
    plan = request.plan and request.plan.model_copy(update={"run": resolved})
    return request.model_copy(update={"run": resolved, "plan": plan})


def _newest_step_and_rows(run: Run) -> tuple[int, int]:
    """Returns the step of the run's newest checkpoint, and the rows that its steps took; else (0, 0)."""
    from fullshard.checkpoint.location import iterate_complete_checkpoints, location_of
    from fullshard.training.state import rows_taken_by_saved_state

    place = location_of(run.checkpoint.dir or Path(run.run.dir, CHECKPOINTS))
    for _, manifest in iterate_complete_checkpoints(place):
        rows = rows_taken_by_saved_state(manifest.values_with_run)
        return manifest.step, manifest.step * run.train.global_batch if rows is None else rows
    return 0, 0


def _rank_count_and_device_type(request: LaunchRequest) -> tuple[int, DeviceType]:
    if not environment.prepare_environment_if_started_as_rank():
        return choose_rank_count_and_device(request)
    from fullshard.parallel.mesh import choose_device_type

    ranks, asked = int(os.environ["WORLD_SIZE"]), request.run.run.ranks
    if asked not in (0, ranks):
        _print_note(f"run.ranks = {asked} is not used: the launcher has set WORLD_SIZE = {ranks}")
    if restarts := request.run.run.restarts:
        _print_note(f"run.restarts = {restarts} is not used: another launcher has started the ranks")
    return ranks, choose_device_type(request.run.run.device)


def _check_plan_and_match_ranks(plan: Plan, ranks: int, *, device: DeviceType) -> bool:
    """Returns whether the plan is for this number of ranks. Under torchrun, their number may have changed.

    Raises PlanError for a plan for another device, or, without torchrun, for other ranks.
    """
    if plan.device != device:
        raise PlanError(f"the plan is for {plan.device}.", got=f"this machine has {device}")
    may_change = environment.is_started_by_torchrun() and "TORCHELASTIC_RUN_ID" in os.environ
    if plan.world_size != ranks and not may_change:
        raise other_rank_count_error(plan.world_size, ranks)
    return plan.world_size == ranks


def _choose_plan(run: Run, *, chosen: Plan | None, plain: Plan, model: "Module | None") -> Plan:
    """Returns the plan to train with, including its prediction unless the planner cannot decide.

    chosen: the user's plan, which gets a prediction; None to search for the fastest plan
    plain: the run's plan with plain defaults, returned if there is no other
    model: the run's model; None if it is built only if the planner needs it
    """
    try:
        hardware = measure_unless_known(_detect_hardware_of_ranks(plain))
        if run.offload.is_on_drive and hardware.disk_bytes_per_second is None:
            hardware = with_infinitely_fast_drive(hardware)
        if chosen is not None:
            spec = _describe_on(hardware, chosen, model=model)
            return predict(spec, chosen, hardware)
        quick = _find_plan_without_recompute(run, hardware, model=model)
        if quick is not None:
            return quick
        _, spec, found = parallel_degrees.search_parallel_degrees(
            lambda one: _describe_on(hardware, one, model=model), run, hardware=hardware, only_best=True
        )
    except (PlanError, SpecError, TraceError) as error:
        _check_no_host_limit_if_unplanned(run, why=error.what, fix=error.fix or "offload.host_bytes left out")
        got = f" ({error.got})" if isinstance(error, TraceError) else ""
        fix = f"\n  try: {error.fix}" if error.fix and not isinstance(error, TraceError) else ""
        _print_note(f"not planned, so with plain defaults: {error.what}{got}{fix}")
        return chosen or plain
    for left_out in spec.untraced:
        _print_note(str(left_out))
    return require_best(found, spec=spec, hardware=hardware, run=run)


def _detect_hardware_of_ranks(plan: Plan) -> Hardware:
    """Detects the hardware of the plan's ranks. Under torchrun, the environment has the ranks per node."""
    ranks = None if environment.is_started_by_torchrun() else plan.world_size
    return detect_hardware(plan.device, ranks=ranks)


def _check_no_host_limit_if_unplanned(run: Run, *, why: str, fix: str) -> None:
    """Raises PlanError if the run, which is not planned, limits the host's memory."""
    uses_host = run.offload.offloads_optimizer or run.recompute.offloads
    if run.offload.host_bytes is not None and uses_host:
        raise PlanError(
            "offload.host_bytes cannot be held to: this run cannot be planned.",
            got=f"offload.host_bytes = {run.offload.host_bytes}",
            why=why,
            fix=fix,
        )


def _has_only_builtin_parts(run: Run) -> bool:
    """Returns whether all is from this package, and no setting names a part of the model.

    Loading the run has then checked all of it.
    """
    outside = (
        run.train.loss
        or run.data.tokenizer
        or run.data.source == "python"
        or run.adapter.rank
        or any(one.call or one.task for one in run.evaluate)
    )
    return isinstance(run.model, DecoderConfig) and not outside and not run.optimizer.groups


def _build_and_check_model(run: Run) -> "Module":
    """Builds the run's model. Raises the errors that the ranks would raise for it, the data and the loss."""
    if "torch" not in sys.modules:
        with freeze_imports_in_gc():  # the user's own modules are imported later
            import_module("fullshard.torch_private.graphs")  # needed by fake tensors
            import_module("fullshard.planner.describe.describe")
    from fullshard.data.build import tokenizer_vocabulary_size
    from fullshard.jobs.evaluations import import_functions
    from fullshard.models.build import build_model, check_sequence_length, check_vocabulary
    from fullshard.models.huggingface import unused_balance_loss_factor_note
    from fullshard.models.loss import choose_loss
    from fullshard.training.groups import match_groups

    model = build_model(run)
    options = run.model.options if isinstance(run.model, HuggingFaceModel) else {}
    if (note := unused_balance_loss_factor_note(model, options)) is not None:
        _print_note(note)
    check_sequence_length(model, run)
    check_vocabulary(run, token_count=tokenizer_vocabulary_size(run.data), model=model)
    choose_loss(run, model)
    import_functions(run)
    match_groups(model, run.optimizer)
    return model


def _find_plan_without_recompute(run: Run, hardware: Hardware, *, model: "Module | None") -> Plan | None:
    """Returns the fastest plan without recompute if it fits; None if it does not, or recompute is not auto.

    None also if ranks may divide experts, or it may pay that they share matmuls. Recompute trades time for
    memory, so no plan with recompute is faster. Tracing the model without it takes a quarter of the time of
    tracing all modes.
    """
    if run.recompute.mode != "auto":
        return None
    plain = run.with_settings({"recompute": {"mode": "none"}})
    spec = _describe_on(hardware, plain, model=model)
    is_open = run.sharding.expert_parallel == "auto"
    if is_open and any(parallel_degrees.iterate_expert_degrees(hardware, spec.expert_count_gcd)):
        return None
    found = search(spec, hardware, plain)
    if found.best is None or found.best != found.fastest:
        return None
    if parallel_degrees.may_pay_to_share_matmuls(found.best, hardware):
        return None
    return found.best


def _describe_on(hardware: Hardware, plan: Plan | Run, *, model: "Module | None") -> ModelSpec:
    """Returns the spec of the plan's model with the kernels that run on `hardware`."""
    return describe_run(plan, hardware.device, model=model, attention_kernel=hardware.attention_kernel)


def _with_resolved_precision(run: Run, device: DeviceType) -> Run:
    """Returns the run with the precision `auto` replaced by bf16 if the device supports it, else by fp32."""
    if run.precision.mode != "auto":
        return run
    bf16 = False
    if device == "cuda":
        import torch

        bf16 = torch.cuda.is_bf16_supported()
    return run.with_settings({"precision": {"mode": "bf16" if bf16 else "fp32"}})


def _print_note(text: str) -> None:
    print_to_stderr(f"note: {text}")


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
        hardware = _detect_hardware_of_ranks(plan)
        spec = describe_run(run, hardware.device, attention_kernel=hardware.attention_kernel)
        return fitting_settings_text_on_hardware(spec, hardware, run=run, plan=plan, failures=failures)
    except (PlanError, SpecError, TraceError, MemoryError):
        return None


def fitting_settings_text_on_hardware(
    spec: ModelSpec, hardware: Hardware, *, run: Run, plan: Plan, failures: Sequence[RunEvent]
) -> str | None:
    """Returns the settings of the fastest plan of `run` that fits into the ranks' memory, or the error's fix.

    None if a rank needed so much more than planned that it is not the plan's model or data that needs it.
    Raises PlanError, as `search` does.
    """
    prediction = plan.prediction
    assert prediction is not None, "the caller has checked it"
    capacity = min(largest_fitting_predicted_bytes(prediction, one) for one in failures)
    if not capacity:
        return None
    found = search(spec, hardware, run, capacity_bytes=capacity)
    if found.best is None:
        chip = hardware.chip.model_copy(update={"memory_bytes": capacity})
        limited = hardware.model_copy(update={"chip": chip, "usable_fraction": 1.0})
        error = no_plan_fits_error(found, spec=spec, hardware=limited, run=run)
        return f"no plan of this run fits into the {format_bytes(capacity)} that the rank had; {error.fix}"
    best, needed = found.best, found.best.prediction
    assert needed is not None, "the search predicts its plans"
    changes = [f"{key} = {new} (was {old})" for key, (old, new) in differing_settings([plan.run, best.run])]
    slower = needed.time.total / prediction.time.total - 1 if prediction.time.total else 0.0
    price = f", with {100 * slower:.0f} % more time per step" if slower >= 0.005 else ""
    text = ", ".join(changes) or "the same settings"
    return f"{text}: {format_bytes(needed.required_device_bytes)} of {format_bytes(capacity)}{price}"


def largest_fitting_predicted_bytes(prediction: Prediction, failure: RunEvent) -> int:
    """Returns the bytes that a plan's prediction may have at most, so that it fits where this plan failed.

    If the rank needed more than the plan expected, other plans are assumed to need more by the same factor. 0
    if it is over 10: an allocation of terabytes does not shrink with the settings.
    """
    held = failure.details["held_bytes"]
    factor = max(1.0, (held + (failure.details["requested_bytes"] or 0)) / prediction.memory.total)
    beside = prediction.required_device_bytes - prediction.memory.total
    return 0 if factor > 10 else int(held / factor) + beside
