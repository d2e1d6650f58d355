"""The predicted step as spans on the streams of one rank, to be drawn as a trace.

These are of a simulation that skips no turn. Contention and stragglers are factors on the whole step, and so
are spans after its end.
"""

from fullshard.planner.predict.fsdp_time import TICKS, RecordedWork
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.records.step_spans import COLLECTIVES, StepSpan

_TRACKS = {
    "copy_in": "copy-in",
    "gather": "all-gather",
    "hpz_network": "all-gather over fewer ranks",
    "reduce": "reduce-scatter",
    "all_reduce": "all-reduce",
    "disk": "drive",
    "updating": "update",
    "host_in": "copies from host",
    "host_out": "copies to host",
    "host_sum": "sums on host",
}
_WORK = {
    "copies": "copy",
    "launches": "launches",
    "all_gathers": "all-gather",
    "reduce_scatters": "reduce-scatter",
    "all_reduces": "all-reduce",
    "all_gather": COLLECTIVES["all_gather"][1],
    "reduce_scatter": COLLECTIVES["reduce_scatter"][1],
    "all_reduce": COLLECTIVES["all_reduce"][1],
    "copy": "wait for copies of gradients",
    "host": "wait for host memory or drive",
    "disk": "read or write",
    "updating": "update",
    "host_in": "copy",
    "host_out": "copy",
    "host_sum": "add gradients",
}
_KERNELS = {
    "start": "start",
    "pre_forward": "forward",
    "post_forward": "after forward",
    "end_forward": "loss",
    "pre_backward": "backward",
    "post_backward": "after backward",
    "end_backward": "end of backward",
}


def predict_step_spans(spec: ModelSpec, plan: Plan, *, hardware: Hardware) -> list[StepSpan]:
    """Returns the spans of one predicted step of the slowest rank, from its start to the predicted step time.

    Their number grows with the microbatches of a step: about 20 per unit and microbatch.

    Raises PlanError if `spec` lacks the trace, or `hardware` a rate, that `plan` needs.
    """
    predictor, recorded = StepTimePredictor(spec, hardware, skips=False), list[RecordedWork]()
    streams = predictor.simulate_streams(plan, units=predictor.unit_costs(plan), recorded=recorded)
    spans = [
        StepSpan(
            _TRACKS.get(one.stream, one.stream),
            _span_name(one),
            one.begin / TICKS,
            one.end / TICKS,
            unit=spec.units[one.unit].name if one.unit >= 0 else None,
            microbatch=one.microbatch,
        )
        for one in recorded
    ]
    # Another predictor: this one skips no repeated turn.
    return spans + _spans_after_backward(
        plan, StepTimePredictor(spec, hardware), after=streams.compute / TICKS
    )


def _span_name(work: RecordedWork) -> str:
    if work.kind == "kernels":
        return _KERNELS[work.phase]
    if work.kind == "launches" and work.stream == "compute":
        return "wait for launches"
    return _WORK.get(work.kind, work.kind)


def _spans_after_backward(plan: Plan, predictor: StepTimePredictor, *, after: float) -> list[StepSpan]:
    """Returns the spans from `after`, the end of the last backward in seconds, to the end of the step."""
    terms, summed = predictor.predict_time(plan), predictor.unit_costs(plan).all_reduce / TICKS
    lengths = {
        "sum of loss and norm": summed,
        "update": terms.optimizer,
        "contention (of the whole step)": terms.contention,
        "wait for the slowest rank (of the whole step)": terms.stragglers,
    }
    lengths = {"wait for drive": terms.total - after - sum(lengths.values()), **lengths}
    spans: list[StepSpan] = []
    for name, length in lengths.items():
        if length > 1 / TICKS:
            spans.append(StepSpan("compute", name, after, after + length))
            after += length
    return spans
