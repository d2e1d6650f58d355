"""Collects the values that rank 0's module holds before it is sharded, and broadcasts them to all ranks."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.distributed.agreement import all_gather_object
from fullshard.errors import ShardError


@dataclass
class Rank0Values:
    """Rank 0's parameters and buffers. All ranks have the same names, in the order of broadcasts."""

    # rank 0's tensors by name; on the other ranks, meta tensors of the same shapes and dtypes
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    # the memory in which this rank receives all broadcasts
    receive_buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def broadcast_and_remove(self, name: str, device: torch.device) -> Tensor:
        """Broadcasts and removes a tensor. Returns it on all ranks, valid until the next call. Collective."""
        value = self.tensors[name]
        if value.is_meta:
            # One buffer for all: gloo's thread may keep a tensor for a while after its broadcast has ended.
            if self.receive_buffer.nbytes < value.nbytes:
                largest = max(tensor.nbytes for tensor in self.tensors.values())
                self.receive_buffer = torch.empty(largest, dtype=torch.uint8, device=device)
            whole = self.receive_buffer[: value.nbytes].view(value.dtype).view(value.shape)
        else:
            whole = value.to(device).contiguous()
        if dist.is_initialized() and dist.get_world_size() > 1 and whole.numel():
            dist.broadcast(whole, src=0)
        del self.tensors[name]
        return whole


class MissingWeightsWarning(UserWarning):
    """Warning of a model that holds only some of its weights; the missing ones are initialised."""


def warn_of_missing_weights(model: nn.Module, values: Rank0Values, *, stacklevel: int) -> None:
    """Issues a MissingWeightsWarning on rank 0 if `values` lacks some, but not all, parameters of `model`.

    New adapters lack values on purpose. Without the warning, weights missing from a checkpoint would go
    unnoticed (NeMo Automodel#1148).
    """
    missing = [name for name, _ in model.named_parameters() if name not in values.tensors]
    given = len(list(model.parameters())) - len(missing)
    if dist.get_rank() == 0 and given and missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        count = f"{len(missing)} of {given + len(missing)} parameters"
        text = f"{count} hold no values, and are initialised: {shown}"
        warnings.warn(text, MissingWeightsWarning, stacklevel=stacklevel + 1)


@dataclass(frozen=True)
class _TensorProperties:
    """Properties of a rank's tensor, for comparison with rank 0's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_real: bool
    is_parameter: bool
    requires_grad: bool


def collect_rank0_values(model: nn.Module) -> Rank0Values:
    """Returns rank 0's real parameters and buffers. Collective.

    Raises ShardError on all ranks if they hold different models, or one holds weights that rank 0 lacks.
    """
    tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    own = {
        name: _TensorProperties(
            tuple(t.shape), t.dtype, not t.is_meta, isinstance(t, nn.Parameter), t.requires_grad
        )
        for name, t in tensors.items()
    }
    first = _agree_on_tensor_properties(own) if dist.get_world_size() > 1 else own
    real = {name: given for name, given in first.items() if given.is_real}
    if dist.get_rank() == 0:
        return Rank0Values({name: tensors[name].detach() for name in real})
    return Rank0Values({n: torch.empty(g.shape, dtype=g.dtype, device="meta") for n, g in real.items()})


def _agree_on_tensor_properties(own: dict[str, _TensorProperties]) -> dict[str, _TensorProperties]:
    """Returns rank 0's tensor properties. Raises on all ranks if `own` differs from them on one rank."""
    sent = [own]
    dist.broadcast_object_list(sent, src=0)
    for rank, error in enumerate(all_gather_object(_find_model_difference_error(sent[0], own))):
        if error is not None:
            raise ShardError(f"rank {rank} holds {error.what}", got=error.got, why=error.why, fix=error.fix)
    return sent[0]


def _find_model_difference_error(
    first: Mapping[str, _TensorProperties], given: Mapping[str, _TensorProperties]
) -> ShardError | None:
    for name in {**first, **given}:
        if difference := _tensor_difference_text(first.get(name), given.get(name)):
            return ShardError(
                "another model than rank 0.",
                got=f"{name}: {difference} on this rank",
                why="every rank must shard the same parameters",
                fix="build the same model on every rank",
            )
    extra = [n for n, g in given.items() if g.is_parameter and g.is_real and not first[n].is_real]
    if extra:
        return ShardError(
            "weights that rank 0 does not.",
            got=f"{len(extra)} parameters, {extra[0]} among them, on the meta device of rank 0",
            why="rank 0's values are the ones that every rank gets",
            fix="load the weights on rank 0, or on every rank",
        )
    return None


def _tensor_difference_text(first: _TensorProperties | None, given: _TensorProperties | None) -> str | None:
    if first is None or given is None:
        return "nothing" if given is None else "not on rank 0, but"
    if first.shape != given.shape:
        return f"shape {given.shape}, not {first.shape},"
    if not first.is_parameter:
        return None
    if first.requires_grad != given.requires_grad:
        return "trainable" if given.requires_grad else "frozen"
    # Trainable parameters get the plan's master dtype in any case.
    frozen_apart = not first.requires_grad and first.dtype != given.dtype
    return f"{given.dtype}, not {first.dtype}," if frozen_apart else None
