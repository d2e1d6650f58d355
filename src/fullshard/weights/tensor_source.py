"""Reads ranges of elements of a checkpoint's tensors, with adapters merged into the base model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import AVERAGE_PREFIX, MODEL_PREFIX, Manifest, SavedTensor
from fullshard.checkpoint.shard_file import ShardRecord
from fullshard.checkpoint.storage import CheckpointReader
from fullshard.errors import CheckpointError
from fullshard.models.adapted_parameters import name_in_base
from fullshard.models.packed_weights import PackedWeight, packed_weights_in_record, unpack_weight
from fullshard.spec.weight_map import BoxCopy, row_major_strides
from fullshard.weights.files import iterate_copies

ADDED = ".lora_"
"""Part of the names that peft gives to adapters."""
LORA_FACTORS = (
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora_embedding_A.default", ".lora_embedding_B.default"),
)
"""Endings of the names of A and B: of linear modules, and of embeddings."""


class TensorSource(Protocol):
    """Reads ranges of elements of `tensors`, by name."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]: ...

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        """Fills the flat `target` with elements of the tensor `name` from `begin` on, row-major."""
        ...


_Place = tuple[str, ShardRecord]  # data file, and a saved piece of a tensor in it


Weights = Literal["model", "ema"]
"""Which weights of a checkpoint: the parameters, or the averages of those that have one."""


def select_model_tensors(manifest: Manifest, weights: Weights) -> dict[str, tuple[str, SavedTensor]]:
    """Returns {name of a model tensor: (name of the saved tensor, the saved tensor)}.

    With "ema", trained parameters have their averages. Raises CheckpointError for a checkpoint without any.
    """
    names = {name: name for name in manifest.model_tensors}
    if weights == "ema":
        averages = {name: AVERAGE_PREFIX + name.removeprefix(MODEL_PREFIX) for name in names}
        names |= {name: one for name, one in averages.items() if one in manifest.tensors}
        if all(name == saved for name, saved in names.items()):
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} holds no averages of parameters.",
                got="a run without [ema]",
                fix="its own weights; or ema.decay = 0.999 in a run that continues it",
            )
    return {name: (saved, manifest.tensors[saved]) for name, saved in names.items()}


class SavedModelTensors:
    """The model tensors of a checkpoint. Every read verifies the digests of the blocks that it reads."""

    def __init__(self, reader: CheckpointReader, *, weights: Weights = "model") -> None:
        self._reader = reader
        selected = select_model_tensors(reader.manifest, weights)
        self.tensors: Mapping[str, SavedTensor] = {name: tensor for name, (_, tensor) in selected.items()}
        self._places = {name: reader.find_pieces(saved) for name, (saved, _) in selected.items()}

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        if not target.numel():
            return
        shape = self.tensors[name].shape or (1,)
        row = math.prod(shape[1:])
        first, last = begin // row, -(-(begin + target.numel()) // row)
        start = begin - first * row
        whole_rows = start == 0 and target.numel() % row == 0
        block = (last - first, *shape[1:])
        rows = target.view(block) if whole_rows else torch.empty(block, dtype=target.dtype)
        places = self._places[name]
        parts = [
            BoxCopy(str(number), 0, row_major_strides(box), piece.index or (0,), box)
            for number, (_, piece) in enumerate(places)
            for box in (piece.shape or (1,),)
        ]
        for move in iterate_copies(rows, parts, offsets=(first, *(0 for _ in shape[1:]))):
            place = places[int(move.source)]
            if move.is_contiguous_on_both_sides:
                self._read_piece_elements(move.target.view(-1), place, begin=move.begin)
            else:
                elements = torch.empty(move.span_length, dtype=target.dtype)
                self._read_piece_elements(elements, place, begin=move.begin)
                move.fill_target(elements)
        if not whole_rows:
            target.copy_(rows.view(-1)[start : start + target.numel()])

    def _read_piece_elements(self, target: Tensor, place: _Place, *, begin: int) -> None:
        name, piece = place
        flat = piece.model_copy(update={"shape": (math.prod(piece.shape),), "index": (0,)})
        with self._reader.open_data_file(name) as file:
            self._reader.read_part_into(file, flat, offsets=(begin,), target=target)


class DequantisedModelTensors:
    """Tensors of a checkpoint, with packed weights as the matrices of bf16 that are multiplied."""

    def __init__(self, source: TensorSource, packed: Mapping[str, PackedWeight]) -> None:
        """`packed`: the packed weights by their saved names."""
        self._source, self._packed = source, packed
        self.tensors = {
            name: SavedTensor(shape=packed[name].shape, dtype="bfloat16") if name in packed else saved
            for name, saved in source.tensors.items()
        }

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        weight = self._packed.get(name)
        if weight is None:
            self._source.read_into(target, name, begin=begin)
            return
        columns, row_bytes = weight.shape[-1], self._source.tensors[name].shape[-1]
        first, last = begin // columns, -(-(begin + target.numel()) // columns)
        rows = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        self._source.read_into(rows, name, begin=first * row_bytes)
        values = unpack_weight(rows.view(-1, row_bytes), weight, dtype=target.dtype).view(-1)
        start = begin - first * columns
        target.copy_(values[start : start + target.numel()])


@dataclass(frozen=True)
class LayerMerging:
    """How the LoRA adapter (arXiv:2106.09685) of one layer is merged into its base: W + scale · B A.

    is_transposed: whether W has the shape of the transposed product, as in embeddings and in GPT-2's Conv1D
    parameter: name of W in its module
    experts: number of experts that W stacks, see [Note: adapted parameters]; 0 if it is a matrix
    """

    scale: float
    is_transposed: bool
    parameter: str = "weight"
    experts: int = 0

    def increment(self, a: Tensor, b: Tensor, *, rows: slice = slice(None)) -> Tensor:
        """Returns `rows` (of dim 0) of scale · B A, or of its transpose, in the dtype of A and B."""
        if self.experts:
            each_a = a.view(self.experts, -1, a.shape[1])[rows]
            each_b = b.view(len(b), -1, self.experts).permute(2, 0, 1)[rows]
            product = each_b @ each_a
            return self.scale * (product.transpose(1, 2) if self.is_transposed else product)
        return self.scale * ((a.T[rows] @ b.T) if self.is_transposed else (b[rows] @ a))


@dataclass(frozen=True)
class LoraAdapter:
    """Saved names of an adapted weight `base` and of the factors A and B, and how they are merged."""

    base: str
    a: str
    b: str
    merging: LayerMerging


class MergedModelTensors:
    """Tensors of a checkpoint, with each adapter added to its base weight.

    The sum is computed in fp32 and rounded once, to the weight's dtype. Other tensors are unchanged. Raises
    CheckpointError for adapters without their base, and for adapters that are not factors of matrices.
    """

    def __init__(self, source: TensorSource, layers: Mapping[str, LayerMerging]) -> None:
        """`layers`: how the adapter of each layer is merged, by the layer's saved name."""
        self._source = source
        self._adapters = lora_adapters_by_base(source.tensors, layers)
        # Merged name -> saved name.
        self._saved = {name_in_base(name): name for name in source.tensors if ADDED not in name}
        self.tensors = {name: source.tensors[saved] for name, saved in self._saved.items()}
        self._loaded: tuple[str, Tensor, Tensor] | None = None

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        """Fills the flat `target` with elements of the merged tensor `name` from `begin` on, row-major."""
        adapter = self._adapters.get(self._saved[name])
        if adapter is None:
            self._source.read_into(target, self._saved[name], begin=begin)
            return
        a, b = self._read_lora_factors(adapter)  # first, so that the base's last block stays buffered
        self._source.read_into(target, self._saved[name], begin=begin)
        row = math.prod(self.tensors[name].shape[1:])
        first, last = begin // row, -(-(begin + target.numel()) // row)
        added = adapter.merging.increment(a, b, rows=slice(first, last))
        start = begin - first * row
        flat = added.reshape(-1)[start : start + target.numel()]
        target.copy_(target.float() + flat)

    def _read_lora_factors(self, adapter: LoraAdapter) -> tuple[Tensor, Tensor]:
        """Returns (A, B) in fp32. Keeps them for the next call, since a large weight is read in pieces."""
        if self._loaded is None or self._loaded[0] != adapter.base:
            a, b = self._read_saved_tensor_as_fp32(adapter.a), self._read_saved_tensor_as_fp32(adapter.b)
            self._loaded = (adapter.base, a, b)
        return self._loaded[1], self._loaded[2]

    def _read_saved_tensor_as_fp32(self, name: str) -> Tensor:
        saved = self._source.tensors[name]
        flat = torch.empty(math.prod(saved.shape), dtype=saved.torch_dtype)
        self._source.read_into(flat, name, begin=0)
        return flat.view(saved.shape).float()


def merge_error(got: str, *, why: str | None = None, fix: str | None = None) -> CheckpointError:
    return CheckpointError("the adapters cannot be merged.", got=got, why=why, fix=fix)


def lora_adapters_by_base(
    tensors: Mapping[str, SavedTensor | Tensor], layers: Mapping[str, LayerMerging]
) -> dict[str, LoraAdapter]:
    """Returns the adapters by the name of their base weight.

    layers: how the adapter of each layer is merged, by the layer's name

    Raises CheckpointError for adapters without their base, and for those that are not factors of matrices.
    """
    found: dict[str, LoraAdapter] = {}
    saved = {name_in_base(name): name for name in tensors if ADDED not in name}
    for name, tensor in tensors.items():
        if ADDED not in name:
            continue
        module, _, _ = name.partition(ADDED)
        kinds = [pair for pair in LORA_FACTORS if name in (f"{module}{one}" for one in pair)]
        if not kinds or len(tensor.shape) != 2:
            raise merge_error(f"{name}, {tensor}", why="it is not a factor of a matrix")
        plain = name_in_base(f"{module}.{layers[module].parameter}")
        base = saved.get(plain)
        if base is None:
            why, fix = "the checkpoint holds adapters alone", "--format peft, which writes these"
            raise merge_error(f"{name}, and no {plain}", why=why, fix=fix)
        a, b = (f"{module}{one}" for one in kinds[0])
        found[base] = LoraAdapter(base, a, b, layers[module])
    return found


def open_model_tensors(
    reader: CheckpointReader,
    *,
    weights: Weights = "model",
    merging: Mapping[str, LayerMerging] | None = None,
) -> TensorSource:
    """Returns the model tensors of a checkpoint, packed ones dequantised.

    merging: how the adapter of each layer is merged, by its saved name; None without adapters
    """
    saved: TensorSource = SavedModelTensors(reader, weights=weights)
    shapes = {name.removeprefix(MODEL_PREFIX): one.shape for name, one in saved.tensors.items()}
    packed = packed_weights_in_record(reader.manifest.values.get("packed_weights"), shapes)
    if packed:
        saved = DequantisedModelTensors(saved, {f"{MODEL_PREFIX}{name}": one for name, one in packed.items()})
    return saved if merging is None else MergedModelTensors(saved, merging)
