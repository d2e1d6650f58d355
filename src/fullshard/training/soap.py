"""SOAP for the matrices of blocks: Adam in the eigenbases of Shampoo's preconditioner.

Vyas et al., arXiv:2409.11321, as in the authors' code (github.com/nikhilvyas/SOAP). For a gradient G of an
m x n matrix, the t-th update, rate η and weight decay λ:

    M ← β₁ M + (1 - β₁) G                               V ← β₂ V + (1 - β₂) (Q_Lᵀ G Q_R)²
    O = Q_L (Q_Lᵀ M Q_R / (1 - β₁ᵗ)) / (√(V / (1 - β₂ᵗ)) + ε) Q_Rᵀ                p ← (1 - η λ) p - η O
    L ← β₂ L + (1 - β₂) G Gᵀ                            R ← β₂ R + (1 - β₂) Gᵀ G

Q_L and Q_R are orthogonal. Every f updates, an iteration L Q_L and a QR decomposition of it refresh Q_L, and
R refreshes Q_R. Their columns, and V, are sorted by estimated eigenvalues first. A dimension that is not
rotated has the identity in place of Q.

[Note: the first step]
The first step of a matrix makes L, R and their eigenvectors, exactly, and changes neither the matrix nor M
and V. In the bases of its own singular vectors, a gradient is diagonal: in all other places, Adam would
divide rounding errors by themselves.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fullshard.distributed.tensors import zeros_sharded_like
from fullshard.training.low_bit_adamw import local_part_of
from fullshard.training.whole_matrices import DIRECTION, MatrixUpdate, WholeMatrixAdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Batch(NamedTuple):
    """Facts about the updates of one batch, for a step that `t` others precede. keys: of L, R and bases."""

    t: int
    refreshes: bool
    keys: tuple[str, ...]
    betas: tuple[float, float]
    eps: float


class SoapAdamW(WholeMatrixAdamW):
    """SOAP for groups of kind "soap", AdamW for those of kind "adamw".

    Refreshes depend on the count of steps, so the host waits for each step's decision.
    """

    def _start_update(self, parameter: Tensor, group: dict[str, Any]) -> MatrixUpdate:
        shapes, state = self.section.soap.state_shapes(tuple(parameter.shape)), self.state[parameter]
        if state.keys() != {"step", *_MOMENTS, *shapes}:  # none, or of another kind, in the checkpoint
            state.clear()  # the count is on the host, which reads it
            state |= {"step": torch.zeros(()), **{key: torch.zeros_like(parameter) for key in _MOMENTS}}
            for key, shape in shapes.items():
                state[key] = zeros_sharded_like(parameter, shape, dtype=torch.float32)
        t, betas, gradient = int(state["step"]), group["betas"], cast(Tensor, parameter.grad)
        refreshes = t % self.section.soap.precondition_frequency == 0
        state["step"] += 1
        if t:
            local_part_of(state["exp_avg"]).lerp_(local_part_of(gradient), 1 - betas[0])
        return MatrixUpdate(
            parameter,
            {DIRECTION: gradient, **{key: state[key] for key in (*_MOMENTS, *shapes)}},
            kept=1 - float(group["lr"]) * group["weight_decay"],
            step=-float(group["lr"]),
            batch=_Batch(t, refreshes, tuple(shapes), tuple(betas), group["eps"]),
        )

    def _update_wholes(self, wholes: dict[str, list[Tensor]], batch: _Batch) -> None:
        for number in range(len(wholes[DIRECTION])):
            own = {key: tensors[number] for key, tensors in wholes.items()}
            update = _adam_in_bases(own, batch) if batch.t else own[DIRECTION]
            _update_bases(own, batch)
            wholes[DIRECTION][number] = update
        unchanged = ["exp_avg"] if batch.t else [DIRECTION, *_MOMENTS]
        for key in unchanged + [key for key in batch.keys if key.endswith("basis") and not batch.refreshes]:
            del wholes[key]


def _adam_in_bases(own: dict[str, Tensor], batch: _Batch) -> Tensor:
    """Returns O of whole matrices in `own`, and updates V there."""
    (beta1, beta2), squares = batch.betas, own["exp_avg_sq"]
    squares.lerp_(_rotate(own[DIRECTION], own).square_(), 1 - beta2)
    update = _rotate(own["exp_avg"], own).div_(1 - beta1**batch.t)
    update.div_(squares.div(1 - beta2**batch.t).sqrt_().add_(batch.eps))
    return _rotate(update, own, back=True)


def _update_bases(own: dict[str, Tensor], batch: _Batch) -> None:
    """Updates L and R of whole matrices in `own`, and in a refresh their bases and the order of V."""
    gradient, squares = own[DIRECTION], own["exp_avg_sq"]
    for side, dim, rows in (("left", -2, gradient), ("right", -1, gradient.mT)):
        if (gram := own.get(f"{side}_gram")) is None:
            continue
        gram.lerp_(rows @ rows.mT, 1 - batch.betas[1])
        basis = own[f"{side}_basis"]
        if not batch.t:
            basis.copy_(torch.linalg.eigh(gram).eigenvectors.flip(-1))
        elif batch.refreshes:
            product = gram @ basis
            order = (product * basis).sum(-2).argsort(-1, descending=True)  # by estimated eigenvalue
            squares.copy_(torch.take_along_dim(squares, order.unsqueeze(-3 - dim), dim=dim))
            product = torch.take_along_dim(product, order.unsqueeze(-2), dim=-1)
            basis.copy_(torch.linalg.qr(product).Q)


def _rotate(matrix: Tensor, own: dict[str, Tensor], *, back: bool = False) -> Tensor:
    """Returns Q_Lᵀ `matrix` Q_R, or Q_L `matrix` Q_Rᵀ to go back."""
    if (left := own.get("left_basis")) is not None:
        matrix = (left if back else left.mT) @ matrix
    if (right := own.get("right_basis")) is not None:
        matrix = matrix @ (right.mT if back else right)
    return matrix
