"""The plan that `fullshard train` runs: the planner's choice for this machine, with whatever the run pins."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.launch.environment import from_slurm, quiet_logs, share_cores, under_srun, under_torchrun
from fullshard.launch.gc import importing, uncollected
from fullshard.system.terminal import printable

if TYPE_CHECKING:
    from torch.nn import Module

    from fullshard.launch.request import Request
    from fullshard.spec.hardware import Hardware
    from fullshard.spec.model import ModelSpec
    from fullshard.spec.plan import DeviceType, Plan
    from fullshard.spec.run import Run


def with_plan(request: "Request") -> "Request":
    """`request` with the fastest plan that fits, and its prediction.

    Every process that calls this for the same run on the same machine gets the same plan. Where the planner
    cannot tell (hardware or an optimizer that it does not know), the run's plain defaults are taken, and a
    note on standard error says so. Raises PlanError if nothing fits, before anything is allocated.
    """
    from fullshard.training.schedule import warmup_note

    if (note := warmup_note(request.run)) is not None:
        _note(note)
    ranks, device = _place(request)
    given = request.plan
    if given is not None and (given.world_size, given.device) != (ranks, device):
        return request  # `start` says what is wrong with that
    if given is not None:
        from fullshard.spec.plan import check_runs

        check_runs(given.run)
    if given is None:
        from fullshard.spec.plan import Plan

        # What is plainly wrong is found here, before torch is imported (if nothing has asked for it).
        Plan.from_run(request.run, world_size=ranks, device=device)
    if "torch" not in sys.modules:
        with importing():  # the user's own modules come after it
            import_module("torch._dynamo")  # which fake tensors need
            import_module("fullshard.tracing.describe")
    section = request.run.checkpoint
    # Where nothing can be saved nothing is trained, and this is known before the model is built.
    if section.dir is not None:
        from fullshard.checkpoint.location import place_of

        place_of(section.dir)
    if section.key_file is not None:
        from fullshard.checkpoint.digests import KeyFile

        KeyFile(Path(section.key_file)).require()
    with uncollected():
        plan = _planned(request, ranks=ranks, device=device)
    if plan is not None and plan.prediction is not None and not plan.prediction.is_timed:
        _note(
            "how fast the drive is is not known: bytes are planned, and the step's time is predicted without "
            "it\n  try: fullshard calibrate --drive DIRECTORY, one on that drive"
        )
    return request if plan is None else request.model_copy(update={"run": plan.run, "plan": plan})


def _place(request: "Request") -> "tuple[int, DeviceType]":
    """How many ranks the request will run on, and what each computes on."""
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
    from fullshard.data.build import tokenizer_vocabulary
    from fullshard.errors import PlanError, SpecError
    from fullshard.models.build import build_model
    from fullshard.models.checks import check_positions, check_vocabulary
    from fullshard.planner.offload import with_untimed_drive
    from fullshard.planner.search import nothing_fits, predict, search
    from fullshard.profiler.detect import detect_hardware
    from fullshard.training.loss import loss_of

    run = _with_precision(request.run, device)
    model = build_model(run)  # one that is not there is no matter of planning: the ranks would not find it
    check_positions(model, run)
    check_vocabulary(model, run, tokens=tokenizer_vocabulary(run.data))
    loss_of(run, model)
    try:
        # Under torchrun it finds by itself how the ranks lie on nodes.
        hardware = detect_hardware(device, ranks=None if under_torchrun() else ranks)
        if run.offload.on_disk and hardware.disk_bytes_per_second is None:
            hardware = with_untimed_drive(hardware)
        if request.plan is not None:
            return predict(described(request.plan, device, model=model), request.plan, hardware)
        quick = _without_recompute(run, hardware, model=model)
        if quick is not None:
            return quick
        spec = described(run, device, model=model)
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
        raise nothing_fits(found.closest, spec=spec, hardware=hardware, run=run)
    return found.best


def _uses_the_host(run: "Run") -> bool:
    return run.offload.takes_optimizer or run.recompute.mode == "offload"


def _without_recompute(run: "Run", hardware: "Hardware", *, model: "Module") -> "Plan | None":
    """The fastest plan, if it is the fastest without regard to memory too; else None.

    Recompute buys memory with time, so then no plan with recompute is faster; and tracing the model without
    it takes a quarter of what tracing all modes takes.
    """
    if run.recompute.mode != "auto":
        return None
    from fullshard.planner.search import search

    plain = run.model_copy(update={"recompute": run.recompute.model_copy(update={"mode": "none"})})
    found = search(described(plain, hardware.device, model=model), hardware, plain)
    return found.best if found.best == found.fastest else None


def _with_precision(run: "Run", device: "DeviceType") -> "Run":
    """`auto` is bf16 where the device has it, which the planner cannot ask."""
    if run.precision.mode != "auto":
        return run
    bf16 = False
    if device == "cuda":
        import torch

        bf16 = torch.cuda.is_bf16_supported()
    precision = run.precision.model_copy(update={"mode": "bf16" if bf16 else "fp32"})
    return run.model_copy(update={"precision": precision})


def described(plan: "Plan | Run", device: "DeviceType", *, model: "Module | None" = None) -> "ModelSpec":
    """The run's model (built already: `model`) as it is trained on `device`: on its own loss and batches."""
    from fullshard.models.build import build_model
    from fullshard.spec.plan import Plan
    from fullshard.tracing.describe import describe
    from fullshard.training.example_batch import example
    from fullshard.training.loss import loss_of

    run = plan.run if isinstance(plan, Plan) else plan
    model = model or build_model(run)
    batch = example(run, model, rows=plan.microbatch if isinstance(plan, Plan) else run.train.microbatch or 1)
    return describe(model, plan, loss=loss_of(run, model), batch=batch, kernels_for=device)


def _note(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {printable(text)}", file=sys.stderr)
