"""Peak memory of the rank that needs most, by part."""

from torch import nn

from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.tensors import local_tensor
from fullshard.offload.state import find_offloaded_state, offloaded_host_bytes
from fullshard.profiler.memory import PeakMemory, storage_bytes_of_tensors
from fullshard.spec.measurement import PeakBytes
from fullshard.spec.plan import Plan


def gather_highest_peak(peak: PeakMemory, model: nn.Module, *, plan: Plan) -> PeakBytes | None:
    """Returns, on all ranks, the peak memory by part of the rank whose peak is highest. Collective.

    peak: measured on this rank
    """
    if peak.parts is None:
        return None
    offloaded, on_cuda = find_offloaded_state(model), plan.device == "cuda"
    masters, host = 0, None
    if offloaded is not None:
        # On the CPU, the meter counts fp32 masters as shards, and a plan counts them as host memory.
        masters = 0 if on_cuda else storage_bytes_of_tensors(offloaded.masters.values())
        gradients = sum(local_tensor(p).numel() * p.element_size() for p in offloaded.names_of)
        host = offloaded_host_bytes(offloaded) + (gradients if plan.copies_gradients_to_host else 0)
    parts = peak.parts.parts() | {"parameter_shards": peak.parts.parameter_shards - masters}
    own = PeakBytes(
        **parts,
        allocated=peak.bytes if on_cuda else None,
        active=peak.active_bytes if on_cuda else None,
        reserved=peak.reserved_bytes if on_cuda else None,
        host=host,
    )
    every = all_gather_object(own)
    fullest = max(every, key=lambda one: one.total)
    return fullest.model_copy(update={"host": max((one.host for one in every if one.host), default=host)})
