"""describe_run(plan, device): the spec of the model that a run trains, from the cache if possible."""

from typing import TYPE_CHECKING

from fullshard.planning.spec_cache import key_of, read_cached, write_cached
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import Run

if TYPE_CHECKING:
    from torch.nn import Module


def describe_run(plan: Plan | Run, device: DeviceType, *, model: "Module | None" = None) -> ModelSpec:
    """Returns the spec of the run's model as it is trained on `device`: with its own loss and batches.

    model: the same model, if it is already built

    torch is imported only if the spec is neither shipped nor cached. Raises the errors of building the model.
    """
    key = key_of(plan, device)
    spec = read_cached(key)
    if spec is None:
        spec = describe_anew(plan, device, model=model)
        write_cached(key, spec)
    return spec


def describe_anew(plan: Plan | Run, device: DeviceType, *, model: "Module | None" = None) -> ModelSpec:
    """Returns the same spec as `describe_run`, always from the model itself."""
    from fullshard.models.build import build_model
    from fullshard.tracing.describe import describe
    from fullshard.training.example_batch import make_example_batch
    from fullshard.training.loss import loss_of

    run = plan.run if isinstance(plan, Plan) else plan
    model = model or build_model(run)
    batch = make_example_batch(
        run, model, rows=plan.microbatch if isinstance(plan, Plan) else run.train.microbatch or 1
    )
    return describe(model, plan, loss=loss_of(run, model), batch=batch, kernels_for=device)
