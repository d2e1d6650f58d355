"""The plan that `fullshard train` runs: the planner's choice for this machine and the run's own settings."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.errors import PlanError, SpecError
from fullshard.launch.environment import join_ranks, under_torchelastic, under_torchrun
from fullshard.launch.gc import gc_disabled, gc_frozen_imports
from fullshard.launch.request import Request
from fullshard.launch.start import own_ranks
from fullshard.planner.offload import with_untimed_drive
from fullshard.planner.search import no_plan_fits, predict, search
from fullshard.planning.describe_run import describe_run
from fullshard.profiler.detect import detect_hardware
from fullshard.spec.hardware import Hardware
from fullshard.spec.model_section import DecoderConfig
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import Run
from fullshard.system.terminal import printable
from fullshard.training.schedule import warmup_note

if TYPE_CHECKING:
    from torch.nn import Module


def plan_run(request: Request) -> Request:
    """Returns `request` with the fastest plan that fits, and its prediction.

    Every process that calls this for the same run on the same machine gets the same plan. If the planner
    cannot decide (because it does not know the hardware or the optimizer), the plan has the run's plain
    defaults, and a note on standard error reports this.

    Raises the error of a run that cannot be trained, before anything is allocated.
    """
    if (note := warmup_note(request.run)) is not None:
        _print_note(note)
    ranks, device = _place(request)
    if request.plan is not None and not _is_for(request.plan, ranks, device=device):
        return request  # nodes have left or joined: only the job can decide
    # Plain mistakes are found here, before torch is imported (unless something has imported it already).
    run = _with_precision((request.plan or request).run, device)
    plain = Plan.from_run(run, world_size=ranks, device=device)
    _require_writable_checkpoints(run)
    # A model of this package imports only torch, if anything.
    with gc_frozen_imports() if _is_checked(run) else gc_disabled():
        plan = _planned(run, chosen=request.plan, plain=plain)
    if plan.prediction is not None and not plan.prediction.is_timed:
        _print_note(
            "how fast the drive is is not known: bytes are planned, and the step's time is predicted without "
            "it\n  try: fullshard calibrate --drive DIRECTORY, one on that drive"
        )
    return request.model_copy(update={"run": plan.run, "plan": plan})


def _place(request: Request) -> tuple[int, DeviceType]:
    """Returns the number of ranks that the request will run on, and their device type."""
    if not join_ranks():
        return own_ranks(request)
    from fullshard.sharding.mesh import pick_device_type

    return int(os.environ["WORLD_SIZE"]), pick_device_type(request.run.run.device)


def _is_for(plan: Plan, ranks: int, *, device: DeviceType) -> bool:
    """Returns whether the plan is for this number of ranks. Under torchrun, their number may have changed.

    Raises PlanError for a plan for another device, or, without torchrun, for other ranks.
    """
    if plan.device != device:
        raise PlanError(f"the plan is for {plan.device}.", got=f"this machine has {device}")
    if plan.world_size != ranks and not under_torchelastic():
        raise PlanError(
            f"the plan is for {plan.world_size} ranks.",
            got=f"{ranks} ranks",
            fix=f"start {plan.world_size}, or make a plan for {ranks}",
        )
    return plan.world_size == ranks


def _require_writable_checkpoints(run: Run) -> None:
    """Raises an error if the checkpoint location or the key file is not valid, before the model is built."""
    if run.checkpoint.dir is not None:
        from fullshard.checkpoint.location import location_of

        location_of(run.checkpoint.dir)
    if run.checkpoint.key_file is not None:
        from fullshard.checkpoint.digests import KeyFile

        KeyFile(Path(run.checkpoint.key_file)).require()


def _planned(run: Run, *, chosen: Plan | None, plain: Plan) -> Plan:
    """Returns the plan to train with, including its prediction unless the planner cannot decide.

    chosen: the user's plan, which gets a prediction; None to search for the fastest plan
    plain: the run's plan with plain defaults, returned if there is no other
    """
    device = plain.device
    model = None if _is_checked(run) else _checked_model(run)
    try:
        # Under torchrun, it finds the ranks per node in the environment.
        hardware = detect_hardware(device, ranks=None if under_torchrun() else plain.world_size)
        if run.offload.on_disk and hardware.disk_bytes_per_second is None:
            hardware = with_untimed_drive(hardware)
        if chosen is not None:
            return predict(describe_run(chosen, device, model=model), chosen, hardware)
        quick = _without_recompute(run, hardware, model=model)
        if quick is not None:
            return quick
        spec = describe_run(run, device, model=model)
        found = search(spec, hardware, run)
    except (PlanError, SpecError) as error:
        uses_host = run.offload.takes_optimizer or run.recompute.mode == "offload"
        if run.offload.host_bytes is not None and uses_host:
            raise PlanError(
                "offload.host_bytes cannot be held to: this run cannot be planned.",
                got=f"offload.host_bytes = {run.offload.host_bytes}",
                why=error.what,
                fix=error.fix or "offload.host_bytes left out",
            ) from error
        _print_note(
            f"not planned, so with plain defaults: {error.what}"
            + (f"\n  try: {error.fix}" if error.fix else "")
        )
        return chosen or plain
    if found.best is None:
        assert found.closest is not None, "a search that considered something has a best plan or a closest"
        raise no_plan_fits(found.closest, spec=spec, hardware=hardware, run=run)
    return found.best


def _is_checked(run: Run) -> bool:
    """Returns whether model, data and loss are from this package, so that loading the run checked them."""
    outside = run.train.loss or run.data.tokenizer or run.data.source == "python" or run.adapter.rank
    return isinstance(run.model, DecoderConfig) and not outside


def _checked_model(run: Run) -> "Module":
    """Builds the run's model. Raises the errors that the ranks would raise for it, the data and the loss."""
    if "torch" not in sys.modules:
        with gc_frozen_imports():  # the user's own modules are imported later
            import_module("torch._dynamo")  # needed by fake tensors
            import_module("fullshard.tracing.describe")
    from fullshard.data.build import tokenizer_vocabulary
    from fullshard.models.build import build_model
    from fullshard.models.checks import check_positions, check_vocabulary
    from fullshard.training.loss import loss_of

    model = build_model(run)
    check_positions(model, run)
    check_vocabulary(run, tokens=tokenizer_vocabulary(run.data), model=model)
    loss_of(run, model)
    return model


def _without_recompute(run: Run, hardware: Hardware, *, model: "Module | None") -> Plan | None:
    """Returns the fastest plan without recompute if it fits; None if it does not, or recompute is not auto.

    Recompute trades time for memory, so no plan with recompute is faster. Tracing the model without it takes
    a quarter of the time of tracing all modes.
    """
    if run.recompute.mode != "auto":
        return None
    plain = run.model_copy(update={"recompute": run.recompute.model_copy(update={"mode": "none"})})
    found = search(describe_run(plain, hardware.device, model=model), hardware, plain)
    return found.best if found.best == found.fastest else None


def _with_precision(run: Run, device: DeviceType) -> Run:
    """Returns the run with the precision `auto` replaced by bf16 if the device supports it, else by fp32."""
    if run.precision.mode != "auto":
        return run
    bf16 = False
    if device == "cuda":
        import torch

        bf16 = torch.cuda.is_bf16_supported()
    precision = run.precision.model_copy(update={"mode": "bf16" if bf16 else "fp32"})
    return run.model_copy(update={"precision": precision})


def _print_note(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {printable(text)}", file=sys.stderr)
