"""Muon for the matrices of blocks.

Muon (Keller Jordan, kellerjordan.github.io/posts/muon, 2024; at scale: Moonlight, arXiv:2502.16982) moves
each matrix by its momentum with all singular values near 1. For a gradient G of an m x n matrix, momentum μ,
rate η and weight decay λ:

    M ← μ M + (1 - μ) G                     U = μ M + (1 - μ) G with nesterov, else M
    O = newton_schulz(U)                    p ← (1 - η λ) p - η s O
    s = 0.2 √max(m, n)      "rms": an update's mean square is that of AdamW's, whose rate and decay then suit
        √max(1, m / n)      "original": Jordan's, for rates near 0.02

NorMuon (arXiv:2510.05491) is Muon with `row_decay` β: each row of O is divided by the root of an average of
its mean square, v of m x 1 elements, and then O is scaled back to its norm:

    v ← β v + (1 - β) mean over columns of O²               O ← O / √v · ‖O‖ / ‖O / √v‖
"""

import math
from collections import defaultdict
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fullshard.distributed.tensors import zeros_sharded_like
from fullshard.spec.shard_layout import Shape
from fullshard.training.low_bit_adamw import local_part_of
from fullshard.training.whole_matrices import DIRECTION, MatrixUpdate, WholeMatrixAdamW

# Jordan's, of the quintic polynomial with the steepest slope at 0.
NS_COEFFICIENTS = _A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
_SQUARES = "row_var"  # v of NorMuon, by its key in the state


def newton_schulz(matrix: Tensor, *, steps: int) -> Tensor:
    """Returns U V^T, nearly, of `matrix` = U S V^T: singular values from 0.7 to 1.2. Overwrites `matrix`.

    matrix: (..., m, n), each matrix by itself

    Each step is X ← a X + (b A + c A²) X with A = X X^T, of the matrix divided by its Frobenius norm. Below
    m = n, the smaller of X X^T and X^T X is used.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp_(min=_EPS))
    for _ in range(steps):
        x = _iterate(x)
    return x.mT if is_tall else x


def _iterate(x: Tensor) -> Tensor:
    gram = x @ x.mT
    polynomial = (gram @ gram).mul_(_C).add_(gram, alpha=_B)
    del gram  # before the product, which is larger: see `update_temporary_bytes` of the planner
    return (polynomial @ x).add_(x, alpha=_A)


def rate_factor(shape: Shape, scale: Literal["rms", "original"]) -> float:
    """Returns s, the factor on the rate of a matrix of this shape."""
    rows, columns = shape[-2:]
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "rms" else math.sqrt(max(1.0, rows / columns))


def normalise_rows(matrix: Tensor, squares: Tensor, *, decay: float) -> None:
    """Updates NorMuon's v, in `squares` (..., m, 1), and then O, in `matrix` (..., m, n), in place."""
    norm = matrix.norm(dim=(-2, -1), keepdim=True)
    sums = torch.linalg.vector_norm(matrix, dim=-1, keepdim=True, dtype=squares.dtype).square_()
    squares.lerp_(sums.div_(matrix.shape[-1]), 1 - decay)
    matrix.div_(squares.sqrt().clamp_(min=_EPS))
    matrix.mul_(norm / matrix.norm(dim=(-2, -1), keepdim=True).clamp_(min=_EPS))


class MuonAdamW(WholeMatrixAdamW):
    """Muon for groups of kind "muon", AdamW for those of kind "adamw"."""

    def _start_update(self, parameter: Tensor, group: dict[str, Any]) -> MatrixUpdate:
        state = self.state[parameter]
        if "momentum_buffer" not in state:  # none, or AdamW's, in the checkpoint
            state.clear()
            state["momentum_buffer"] = torch.zeros_like(parameter)
        if not self.section.muon.row_decay:
            state.pop(_SQUARES, None)  # of a run before, with `row_decay`
        elif _SQUARES not in state:
            shape = (*parameter.shape[:-1], 1)
            state[_SQUARES] = zeros_sharded_like(parameter, shape, dtype=torch.float32)
        rate = float(group["lr"])
        return MatrixUpdate(
            parameter,
            {DIRECTION: self._direction(parameter), **{key: state[key] for key in state if key == _SQUARES}},
            kept=1 - rate * group["weight_decay"],
            step=-rate * rate_factor(tuple(parameter.shape), self.section.muon.scale),
        )

    def _direction(self, parameter: Tensor) -> Tensor:
        """Returns U. The momentum moves; where the step is skipped, it keeps its values."""
        settings, kept = self.section.muon, self.state[parameter]["momentum_buffer"]
        gradient, momentum = cast(Tensor, local_part_of(parameter.grad)), cast(Tensor, local_part_of(kept))
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if self.found_inf is not None:  # a product with 0 would leave NaN
            gradient.copy_(torch.where(self.found_inf.bool(), momentum, gradient))
        momentum.lerp_(gradient, 1 - settings.momentum)
        if not settings.nesterov:
            return kept
        gradient.lerp_(momentum, settings.momentum)
        return cast(Tensor, parameter.grad)

    def _update_wholes(self, wholes: dict[str, list[Tensor]], batch: Any) -> None:
        wholes[DIRECTION] = self._orthogonalise(wholes[DIRECTION])
        for matrix, squares in zip(wholes[DIRECTION], wholes.get(_SQUARES, ()), strict=False):
            normalise_rows(matrix, squares, decay=self.section.muon.row_decay)

    def _orthogonalise(self, wholes: list[Tensor]) -> list[Tensor]:
        """Replaces each matrix in `wholes` by its Newton–Schulz. On a GPU, equal shapes are one batch."""
        alike = defaultdict[object, list[int]](list)
        for number, one in enumerate(wholes):
            alike[one.shape if one.is_cuda else number].append(number)
        for numbers in alike.values():
            if len(numbers) == 1:
                wholes[numbers[0]] = newton_schulz(wholes[numbers[0]], steps=self.section.muon.steps)
            else:
                batch = newton_schulz(
                    torch.stack([wholes[i] for i in numbers]), steps=self.section.muon.steps
                )
                for number, one in zip(numbers, batch.unbind(), strict=True):
                    wholes[number] = one
        return wholes
