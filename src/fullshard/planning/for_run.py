"""The plan that `fullshard train` runs: the planner's choice for this machine and the run's own settings."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.launch.environment import from_slurm, quiet_logs, share_cores, under_srun, under_torchrun
from fullshard.launch.gc import gc_disabled, gc_frozen_imports
from fullshard.system.terminal import printable

if TYPE_CHECKING:
    from torch.nn import Module

    from fullshard.launch.request import Request
    from fullshard.spec.hardware import Hardware
    from fullshard.spec.plan import DeviceType, Plan
    from fullshard.spec.run import Run


def plan_run(request: "Request") -> "Request":
    """Returns `request` with the fastest plan that fits, and its prediction.

    Every process that calls this for the same run on the same machine gets the same plan. If the planner
    cannot decide (because it does not know the hardware or the optimizer), the run's plain defaults are used,
    and a note on standard error reports this. Raises PlanError if nothing fits, before anything is allocated.
    """
    from fullshard.training.schedule import warmup_note

    if (note := warmup_note(request.run)) is not None:
        _note(note)
    ranks, device = _place(request)
    given = request.plan
    if given is not None and (given.world_size, given.device) != (ranks, device):
        return request  # `start` raises the error
    if given is not None:
        from fullshard.spec.plan import check_runs

        check_runs(given.run)
    if given is None:
        from fullshard.spec.plan import Plan

        # Plain mistakes are found here, before torch is imported (unless something has imported it already).
        Plan.from_run(request.run, world_size=ranks, device=device)
    section = request.run.checkpoint
    # A run that cannot save must not train, and this is checked before the model is built.
    if section.dir is not None:
        from fullshard.checkpoint.location import location_of

        # Raises for a location that cannot be saved to.
        location_of(section.dir)
    if section.key_file is not None:
        from fullshard.checkpoint.digests import KeyFile

        KeyFile(Path(section.key_file)).require()
    # A model of this package imports only torch, if anything.
    with gc_frozen_imports() if _is_checked(request.run) else gc_disabled():
        plan = _planned(request, ranks=ranks, device=device)
    if plan is not None and plan.prediction is not None and not plan.prediction.is_timed:
        _note(
            "how fast the drive is is not known: bytes are planned, and the step's time is predicted without "
            "it\n  try: fullshard calibrate --drive DIRECTORY, one on that drive"
        )
    return request if plan is None else request.model_copy(update={"run": plan.run, "plan": plan})


def _place(request: "Request") -> "tuple[int, DeviceType]":
    """Returns the number of ranks that the request will run on, and their device type."""
    if under_srun() and not under_torchrun():
        os.environ.update(from_slurm(os.environ))
    if not under_torchrun():
        from fullshard.launch.start import own_ranks

        return own_ranks(request)
    quiet_logs(os.environ)
    share_cores(os.environ)  # before torch is imported: this process is a rank
    from fullshard.sharding.mesh import pick_device_type

    return int(os.environ["WORLD_SIZE"]), pick_device_type(request.run.run.device)


def _planned(request: "Request", *, ranks: int, device: "DeviceType") -> "Plan | None":
    from fullshard.errors import PlanError, SpecError
    from fullshard.planner.offload import with_untimed_drive
    from fullshard.planner.search import no_plan_fits, predict, search
    from fullshard.planning.describe_run import describe_run
    from fullshard.profiler.detect import detect_hardware

    run = _with_precision(request.run, device)
    model = None if _is_checked(run) else _checked_model(run)
    try:
        # Under torchrun, it finds the ranks per node in the environment.
        hardware = detect_hardware(device, ranks=None if under_torchrun() else ranks)
        if run.offload.on_disk and hardware.disk_bytes_per_second is None:
            hardware = with_untimed_drive(hardware)
        if request.plan is not None:
            return predict(describe_run(request.plan, device, model=model), request.plan, hardware)
        quick = _without_recompute(run, hardware, model=model)
        if quick is not None:
            return quick
        spec = describe_run(run, device, model=model)
        found = search(spec, hardware, run)
    except (PlanError, SpecError) as error:
        if run.offload.host_bytes is not None and _uses_the_host(run):
            raise PlanError(
                "offload.host_bytes cannot be held to: this run cannot be planned.",
                got=f"offload.host_bytes = {run.offload.host_bytes}",
                why=error.what,
                fix=error.fix or "offload.host_bytes left out",
            ) from error
        _note(
            f"not planned, so with plain defaults: {error.what}"
            + (f"\n  try: {error.fix}" if error.fix else "")
        )
        return None
    if found.best is None:
        assert found.closest is not None, "a search that considered something has a best plan or a closest"
        raise no_plan_fits(found.closest, spec=spec, hardware=hardware, run=run)
    return found.best


def _is_checked(run: "Run") -> bool:
    """Returns whether reading the run has checked it: its model, data and loss belong to this package."""
    from fullshard.spec.model_section import DecoderConfig

    outside = run.train.loss or run.data.tokenizer or run.data.source == "python" or run.adapter.rank
    return isinstance(run.model, DecoderConfig) and not outside


def _checked_model(run: "Run") -> "Module":
    """Returns the run's model.

    Raises the SpecError, DataError or MissingExtraError that the ranks would raise.
    """
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


def _uses_the_host(run: "Run") -> bool:
    return run.offload.takes_optimizer or run.recompute.mode == "offload"


def _without_recompute(run: "Run", hardware: "Hardware", *, model: "Module | None") -> "Plan | None":
    """Returns the fastest plan if it is also the fastest when memory is ignored; else None.

    Recompute trades time for memory, so in that case no plan with recompute is faster. Tracing the model
    without it takes a quarter of the time of tracing all modes.
    """
    if run.recompute.mode != "auto":
        return None
    from fullshard.planner.search import search
    from fullshard.planning.describe_run import describe_run

    plain = run.model_copy(update={"recompute": run.recompute.model_copy(update={"mode": "none"})})
    found = search(describe_run(plain, hardware.device, model=model), hardware, plain)
    return found.best if found.best == found.fastest else None


def _with_precision(run: "Run", device: "DeviceType") -> "Run":
    """Replaces `auto` with bf16 if the device supports it, or else fp32.

    The planner cannot query the device.
    """
    if run.precision.mode != "auto":
        return run
    bf16 = False
    if device == "cuda":
        import torch

        bf16 = torch.cuda.is_bf16_supported()
    precision = run.precision.model_copy(update={"mode": "bf16" if bf16 else "fp32"})
    return run.model_copy(update={"precision": precision})


def _note(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {printable(text)}", file=sys.stderr)
