"""Hands the weights of a model that trains to an inference engine, in buckets of whole tensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import SpecError
from fullshard.models.adapted_parameters import name_in_base
from fullshard.models.packed_weights import (
    PackedWeight,
    find_packed_weights,
    shapes_of_matrices,
    unpack_weight,
)
from fullshard.offload.state import find_offloaded_state
from fullshard.parallel.model_parameters import persistent_buffers
from fullshard.parallel.unit_events import reshard_unsharded_units
from fullshard.spec.plan import Plan
from fullshard.spec.weight_map import BoxCopy, Shape, WeightMap, map_weights_by_name
from fullshard.weights.export_hf import describe_for_transformers, layer_merging_of_run
from fullshard.weights.files import iterate_copies
from fullshard.weights.names import full_transformers_config
from fullshard.weights.tensor_source import ADDED, LayerMerging, lora_adapters_by_base


def iterate_weights(
    model: nn.Module,
    plan: Plan,
    *,
    bucket_bytes: int = 512 << 20,
    dtype: torch.dtype | None = None,
    names: Literal["huggingface", "own"] = "huggingface",
) -> Iterator[dict[str, Tensor]]:
    """Yields all weights of a sharded model as whole tensors, by name, a bucket at a time. Collective.

    Every rank gets every bucket, on its device, and must iterate to the end. A bucket has at most
    `bucket_bytes`, or one larger tensor. It belongs to the caller: it is never used again here. Besides it,
    a rank holds one whole tensor of the model (for a mixture, the stack of a layer's experts). Nothing is
    kept between calls, and training continues afterwards as if there had been none.

    bucket_bytes: most bytes of a bucket
    dtype: dtype of all floating-point tensors; None keeps those of the parameters, fp32 in mixed precision
    names: "huggingface": names, shapes and tensors as in the files that `from_pretrained` reads, with
        experts apart, and adapters merged; the reference decoder is a Llama. "own": those of the model

    A tied parameter has one name, as in files. Raises SpecError for a `bucket_bytes` below 1, for another
    `names` and for a part of an offloaded model; CheckpointError for a model that transformers does not know
    and for adapters that cannot be merged; MissingExtraError.

    >>> for bucket in fs.iterate_weights(model, plan, dtype=torch.bfloat16):  # on every rank, to the end
    ...     print(len(bucket), bucket["lm_head.weight"].dtype)
    21 torch.bfloat16
    """
    if bucket_bytes < 1 or names not in ("huggingface", "own"):
        raise SpecError(
            "fullshard.iterate_weights cannot give such buckets.",
            got=f"bucket_bytes = {bucket_bytes}, names = {names!r}",
            fix='bucket_bytes of at least 1, and names = "huggingface" or "own"',
        )
    tensors = _parameters_and_buffers(model, plan)
    merging: Mapping[str, LayerMerging] = {}
    packed = find_packed_weights(model)
    shapes = shapes_of_matrices(tensors, packed)
    if names == "own":
        layout = map_weights_by_name(shapes, shapes, prefixes=())
    else:
        recorded = cast(JsonValue, full_transformers_config(model))
        own_names = {name: name for name in tensors}
        merging = layer_merging_of_run(own_names, recorded=recorded, run=plan.run) or {}
        layout = describe_for_transformers(recorded, plan.run, doing="handing weights over").naming(
            {name_in_base(name): shape for name, shape in shapes.items() if ADDED not in name}
        )
    source = _GatheredTensors(tensors, merging, packed=packed, has_own_names=names == "own")
    return _iterate_buckets(source, layout, most=bucket_bytes, dtype=dtype)


def _parameters_and_buffers(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Returns the parameters, also frozen and offloaded ones, and the persistent buffers, by name."""
    if plan.run.offload.offloads_optimizer and find_offloaded_state(model) is None:
        raise SpecError(
            "fullshard.iterate_weights cannot give the weights of a part of an offloaded model.",
            got=f"{type(model).__name__}, which is not what fullshard.shard got",
            why="the trained values are in the state of the whole model",
            fix='the model that was sharded, with names="own"',
        )
    reshard_unsharded_units(model)
    tensors: dict[str, Tensor] = {name: one.detach() for name, one in model.named_parameters()}
    if (offloaded := find_offloaded_state(model)) is not None:
        offloaded.wait_for_update()
        for name in offloaded.names_of.values():
            tensors[name] = offloaded.parameter_state_tensors(name)["master"]
        tensors |= {name: offloaded.frozen.parameter_dtensor(name) for name in offloaded.frozen.engine}
    return tensors | persistent_buffers(model)


@torch.no_grad()
def _iterate_buckets(
    source: "_GatheredTensors", layout: WeightMap, *, most: int, dtype: torch.dtype | None
) -> Iterator[dict[str, Tensor]]:
    """Yields the targets of `layout` in the order in which the model has their sources."""
    place = {name: number for number, name in enumerate(source.names)}
    targets = sorted(layout.parts, key=lambda name: min(place[part.source] for part in layout.parts[name]))
    last_use = {part.source: target for target in targets for part in layout.parts[target]}
    bucket, room = dict[str, Tensor](), most
    for target in targets:
        parts = layout.parts[target]
        own = source.dtype(parts[0].source)
        chosen = dtype if dtype is not None and own.is_floating_point else own
        size = torch.Size(layout.shapes[target]).numel() * chosen.itemsize
        if bucket and size > room:
            yield bucket
            bucket, room = {}, most
        bucket[target] = source.assemble(parts, layout.shapes[target], dtype=chosen)
        room -= size
        source.release(part.source for part in parts if last_use[part.source] == target)
    if bucket:
        yield bucket


class _GatheredTensors:
    """Whole tensors of a model, gathered when one is first used, and held until `release`.

    A packed weight is a matrix in bf16. An adapter is added to its base weight, in fp32, rounded once to the
    weight's dtype.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        merging: Mapping[str, LayerMerging],
        *,
        packed: Mapping[str, PackedWeight],
        has_own_names: bool,
    ) -> None:
        """`merging`: how the adapter of each layer is merged, by the layer's name."""
        self._tensors, self._packed = tensors, packed
        self._adapters = lora_adapters_by_base(tensors, merging) if merging else {}
        merged = {name_in_base(name): name for name in tensors if ADDED not in name}
        self._saved = {name: name for name in tensors} if has_own_names else merged
        self.names, self._whole = list(self._saved), dict[str, Tensor]()  # in the order of the model

    def dtype(self, name: str) -> torch.dtype:
        saved = self._saved[name]
        return torch.bfloat16 if saved in self._packed else self._tensors[saved].dtype

    def assemble(self, parts: Sequence[BoxCopy], shape: Shape, *, dtype: torch.dtype) -> Tensor:
        """Returns a new tensor of which `parts` fill boxes. Gathers their sources: collective."""
        sources = {part.source: self._gather(part.source).view(-1) for part in parts}
        target = torch.empty(shape, dtype=dtype, device=sources[parts[0].source].device)
        for move in iterate_copies(target, parts, offsets=[0] * len(shape)):
            move.fill_target(sources[move.source][move.begin :])
        return target

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self._whole.pop(name, None)

    def _gather(self, name: str) -> Tensor:
        if name not in self._whole:
            saved = self._saved[name]
            whole = _gather_whole(self._tensors[saved])
            if (packed := self._packed.get(saved)) is not None:
                whole = unpack_weight(whole, packed, dtype=torch.bfloat16)
            if (adapter := self._adapters.get(saved)) is not None:
                a, b = (_gather_whole(self._tensors[one]).float() for one in (adapter.a, adapter.b))
                whole = (whole.float() + adapter.merging.increment(a, b)).to(whole.dtype)
            self._whole[name] = whole
        return self._whole[name]


def _gather_whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
