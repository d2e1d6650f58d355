"""A plan with round figures, as the tests of what is printed take it."""

from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, Prediction, TimeTerms
from fullshard.spec.run import Run

GIB = 1024**3


def predicted(*overrides: str, world_size: int = 8, seconds: float = 2.0, capacity: int = 80 * GIB) -> Plan:
    """Over 8 GPUs, 128 sequences of 8,192 tokens; 40 GiB of tensors, 4 of reserve and 1 of context."""
    run = Run.load(
        overrides=[
            "model.max_sequence=8192",
            "data.sequence_length=8192",
            "train.global_batch=128",
            "train.microbatch=2",
            *overrides,
        ]
    )
    plan = Plan.from_run(run, world_size=world_size, device="cuda")
    prediction = Prediction(
        hardware="8xH100",
        memory=MemoryTerms(
            moment="microbatch 1, post backward of blocks.31",
            parameter_shards=4 * GIB,
            gradients=4 * GIB,
            optimizer_state=8 * GIB,
            buffers=0,
            units_in_flight=2 * GIB,
            activations=16 * GIB,
            loss=6 * GIB,
        ),
        allocator_reserve_bytes=4 * GIB,
        context_bytes=GIB,
        capacity_bytes=capacity,
        time=TimeTerms(compute=0.75 * seconds, exposed_all_gather=0.25 * seconds),
        tokens_per_step=run.tokens_per_step,
        tokens_per_second=run.tokens_per_step / seconds,
        mfu=0.8 / seconds,
    )
    return plan.model_copy(update={"prediction": prediction})
