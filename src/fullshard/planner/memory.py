"""peak_bytes(spec, plan): the most that one rank holds at once in a step, term by term, from shapes alone.

[Note: the replay]
A step is the model's own computation (the trace in the ModelSpec: phases, each with its highest moment) and
what the engine does between two phases. What the engine holds does not change within a phase, so the peak is
the largest, over all phases, of (the phase's own highest + what the engine holds then), and of a few moments
inside the engine's acts. These are the acts of `torch.distributed.fsdp._fully_shard` (2.11 to 2.13):

unshard       a unit's shards, cast to the dtype computed in (W/N bytes, freed at once), are gathered into one
              buffer of W bytes, which is copied out into the parameters, W bytes more. W: the parameters of
              the unit, dim 0 padded to a multiple of N, in that dtype. Over one rank there is no buffer, only
              the copy. In forward the buffer lives until the next unit's copy-out (so that the next gather
              may overlap), or the end of forward; in backward it is freed after its own.
reshard       the parameters' W bytes are freed; resharding to k ranks keeps W/k of them.
prefetch      in backward, once a unit is there, the buffer of the one before it is gathered already.
reduce        a unit's gradients are copied into one buffer of R bytes (in the reduce dtype, padded),
              and freed; the reduced chunk of R/N bytes, cast to the master dtype, becomes the gradients. The
              buffer lives until the next unit's backward ends. With replicas, the chunk as it was all-reduced
              is held to the end of backward, beside its cast.
without sync  gradients stay whole, in the dtype that they are reduced in, until the last microbatch.

Collectives need no memory of their own: NCCL's is no tensor, gloo's are replaced (`sharding.collectives`).
Not counted: the random state that recompute keeps for each block (5,056 bytes on the CPU).
"""

from fullshard.errors import PlanError
from fullshard.planner.engine import Gathering, Ledger, Reducing
from fullshard.planner.unit_bytes import optimizer_bytes, unit_bytes, update_temporaries
from fullshard.spec.memory import MemoryTerms
from fullshard.spec.model import LiveBytes, ModelSpec, Phase
from fullshard.spec.plan import Plan


def peak_bytes(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> MemoryTerms:
    """The predicted peak of `rank` (rank 0 never holds less than another). See [Note: the replay].

    Raises PlanError if `spec` was traced with another microbatch, sequence, precision or recompute than the
    plan's, or if the state of its optimizer is not known.
    """
    _check_trace(spec, plan)
    replay = _Replay(spec, plan, rank=rank)
    for index in range(plan.accumulation):
        adds = index > 0 and not plan.sync_each_microbatch and spec.trace.accumulating
        replay.microbatch(index, adds or spec.trace.phases)
    return replay.finish()


def _check_trace(spec: ModelSpec, plan: Plan) -> None:
    trace = spec.trace
    differing = [
        f"{name}: {traced} traced, {planned} planned"
        for name, traced, planned in (
            ("microbatch", trace.microbatch, plan.microbatch),
            ("sequence_length", trace.sequence_length, plan.run.data.sequence_length),
            ("precision", trace.precision, plan.precision),
            ("recompute", trace.recompute, plan.run.recompute),
        )
        if traced != planned
    ]
    if differing:
        raise PlanError(
            f"the spec of {spec.name} was traced under other settings than the plan's.",
            got="; ".join(differing),
            why="what a microbatch allocates follows from them",
            fix="describe(model, plan) with this plan",
        )


class _Replay:
    """Goes through a step's phases, and through what the engine does between them."""

    def __init__(self, spec: ModelSpec, plan: Plan, *, rank: int) -> None:
        self.spec, self.plan = spec, plan
        self.sizes = [unit_bytes(unit, plan, rank=rank) for unit in spec.units]
        static = MemoryTerms(
            moment="before the step",
            parameter_shards=sum(size.shards for size in self.sizes),
            optimizer_state=sum(optimizer_bytes(size, plan) for size in self.sizes),
            buffers=spec.buffer_bytes,
            batch=spec.trace.batch_bytes,
        )
        self.ledger = Ledger(static)
        self.gathering = Gathering(
            self.sizes,
            self.ledger,
            section=plan.run.prefetch,
            by_position=sorted(range(len(spec.units)), key=lambda i: spec.units[i].position),
        )
        self.reducing = Reducing(self.sizes, self.ledger, plan=plan)

    def microbatch(self, index: int, phases: tuple[Phase, ...]) -> None:
        last = index == self.plan.accumulation - 1
        live = LiveBytes()
        for phase in phases:
            of_unit = f" of {self.spec.units[phase.unit].name}" if phase.unit >= 0 else ""
            self.ledger.moment = f"microbatch {index + 1}, {phase.event.replace('_', ' ')}{of_unit}"
            self._act(phase, live, last=last)
            self.ledger.observe(phase.peak)
            live = phase.end

    def finish(self) -> MemoryTerms:
        """The peak, the optimizer's step taken in."""
        self.ledger.moment = "optimizer step"
        largest = max((update_temporaries(size, self.plan) for size in self.sizes), default=0)
        self.ledger.observe(LiveBytes(backward=largest))
        return self.ledger.best

    def _act(self, phase: Phase, live: LiveBytes, *, last: bool) -> None:
        """What the engine does at the event that opens `phase`; `live` is the model's own until then."""
        match phase.event:
            case "pre_forward":
                self.gathering.pre_forward(phase.unit, live)
            case "post_forward":
                self.gathering.post_forward(phase.unit, live)
            case "end_forward":
                self.gathering.end_forward()
            case "pre_backward":
                self.gathering.pre_backward(phase.unit, live)
            case "post_backward":
                if last or self.plan.reshard_after_forward is not False:
                    self.gathering.reshard(phase.unit)
                self.reducing.post_backward(phase.unit, live, last=last)
            case "end_backward":
                self.gathering.end_backward()
                self.reducing.end_backward()
            case "start":
                pass
