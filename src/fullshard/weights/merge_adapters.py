"""A checkpoint of a model with adapters, read as the model without: each base weight with its adapter
added."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.errors import CheckpointError
from fullshard.weights.tensor_source import SavedModel

# As peft names its modules: what was there, beside what was added.
BASE, ADDED = ".base_layer.", ".lora_"
_LINEAR = (".lora_A.default.weight", ".lora_B.default.weight")
_EMBEDDING = (".lora_embedding_A.default", ".lora_embedding_B.default")


@dataclass(frozen=True)
class _Adapter:
    """What is added to the weight `base`: `scale` · B A, turned around if `turned`."""

    base: str
    a: str
    b: str
    turned: bool


@dataclass(frozen=True)
class Merging:
    """How adapters of peft's LoRA (arXiv:2106.09685) are added to their base: W + `scale` · B A.

    `turned`: modules, by their saved names, whose weight is (in, out), as GPT-2's are; embeddings' are
    anyway.
    """

    scale: float
    turned: frozenset[str] = frozenset()


class MergedModel:
    """Every weight that has an adapter with it added, in fp32 and rounded once, to its own dtype; the rest
    as it is. Raises CheckpointError for adapters without their base, and for others than of matrices.
    """

    def __init__(self, source: SavedModel, merging: Merging) -> None:
        self._source, self._scale = source, merging.scale
        self._adapters = _adapters(source.tensors, turned=merging.turned)
        self._saved = {
            name.replace(BASE, "."): name for name in source.tensors if ADDED not in name
        }  # new name -> saved one
        self.tensors: Mapping[str, SavedTensor] = {
            name: source.tensors[saved] for name, saved in self._saved.items()
        }
        self._loaded: tuple[str, Tensor, Tensor] | None = None

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        """As `SavedModel.read_into`."""
        self._source.read_into(target, self._saved[name], begin=begin)
        adapter = self._adapters.get(self._saved[name])
        if adapter is None:
            return
        row = self.tensors[name].shape[1]
        first, last = begin // row, -(-(begin + target.numel()) // row)
        a, b = self._factors(adapter)
        added = (a.T[first:last] @ b.T) if adapter.turned else (b[first:last] @ a)
        start = begin - first * row
        flat = added.reshape(-1)[start : start + target.numel()]
        target.copy_(target.float() + self._scale * flat)

    def _factors(self, adapter: _Adapter) -> tuple[Tensor, Tensor]:
        """Both in fp32; kept until another is asked for, since a large weight is read in pieces."""
        if self._loaded is None or self._loaded[0] != adapter.base:
            self._loaded = (adapter.base, self._whole(adapter.a), self._whole(adapter.b))
        return self._loaded[1], self._loaded[2]

    def _whole(self, name: str) -> Tensor:
        saved = self._source.tensors[name]
        flat = torch.empty(math.prod(saved.shape), dtype=saved.torch_dtype)
        self._source.read_into(flat, name, begin=0)
        return flat.view(saved.shape).float()


def _adapters(tensors: Mapping[str, SavedTensor], *, turned: frozenset[str]) -> dict[str, _Adapter]:
    """By the saved name of the weight that they are added to."""
    found: dict[str, _Adapter] = {}
    for name, tensor in tensors.items():
        if ADDED not in name:
            continue
        module, _, _ = name.partition(ADDED)
        base = f"{module}{BASE}weight"
        kinds = [pair for pair in (_LINEAR, _EMBEDDING) if name in (f"{module}{one}" for one in pair)]
        if not kinds or len(tensor.shape) != 2:
            raise CheckpointError(
                "the adapters cannot be merged.", got=f"{name}, {tensor}", why="it is no factor of a matrix"
            )
        if base not in tensors:
            raise CheckpointError(
                "the adapters cannot be merged.",
                got=f"{name}, and no {base}",
                why="the checkpoint holds adapters alone",
                fix="--format peft, which writes these",
            )
        a, b = (f"{module}{one}" for one in kinds[0])
        found[base] = _Adapter(base, a, b, turned=module in turned or kinds[0] is _EMBEDDING)
    return found
