"""Reads a checkpoint with adapters as the model without them: each adapter is added to its base weight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.errors import CheckpointError
from fullshard.weights.tensor_source import SavedModel

# Parts of the names that peft gives to the base module and to the adapter.
BASE, ADDED = ".base_layer.", ".lora_"
_LINEAR = (".lora_A.default.weight", ".lora_B.default.weight")
_EMBEDDING = (".lora_embedding_A.default", ".lora_embedding_B.default")


@dataclass(frozen=True)
class _Adapter:
    """An adapter of the weight `base`, which becomes base + scale · B A (transposed if `turned`).

    base: saved name of the base weight
    a, b: saved names of the factors
    turned: whether the weight is (in, out)
    """

    base: str
    a: str
    b: str
    turned: bool


@dataclass(frozen=True)
class Merging:
    """Parameters for merging peft's LoRA adapters (arXiv:2106.09685) into their base: W + `scale` · B A.

    scale: factor of the product B A
    turned: saved names of modules whose weight is (in, out), as in GPT-2; embeddings always are
    """

    scale: float
    turned: frozenset[str] = frozenset()


class MergedModel:
    """Tensors of a checkpoint, with each adapter added to its base weight.

    The sum is computed in fp32 and rounded once, to the weight's dtype. Other tensors are unchanged. Raises
    CheckpointError for adapters without their base, and for adapters that are not factors of matrices.
    """

    def __init__(self, source: SavedModel, merging: Merging) -> None:
        self._source, self._scale = source, merging.scale
        self._adapters = _adapters(source.tensors, turned=merging.turned)
        self._saved = {
            name.replace(BASE, "."): name for name in source.tensors if ADDED not in name
        }  # merged name -> saved name
        self.tensors: Mapping[str, SavedTensor] = {
            name: source.tensors[saved] for name, saved in self._saved.items()
        }
        self._loaded: tuple[str, Tensor, Tensor] | None = None

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        """Fills the flat `target`, see `SavedModel.read_into`."""
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
        """Returns both factors in fp32.

        They are kept until another adapter is read, since a large weight is read in pieces.
        """
        if self._loaded is None or self._loaded[0] != adapter.base:
            self._loaded = (adapter.base, self._whole(adapter.a), self._whole(adapter.b))
        return self._loaded[1], self._loaded[2]

    def _whole(self, name: str) -> Tensor:
        saved = self._source.tensors[name]
        flat = torch.empty(math.prod(saved.shape), dtype=saved.torch_dtype)
        self._source.read_into(flat, name, begin=0)
        return flat.view(saved.shape).float()


def _adapters(tensors: Mapping[str, SavedTensor], *, turned: frozenset[str]) -> dict[str, _Adapter]:
    """Returns the adapters by the saved name of their base weight."""
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
