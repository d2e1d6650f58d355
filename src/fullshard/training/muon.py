"""Muon for the matrices of blocks, and AdamW for all other parameters, in one optimizer.

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

Newton–Schulz needs whole matrices. They travel to owners and back: see [Note: owners] in `spec.dealing`.
State is sharded like its parameter, so a checkpoint of it is like AdamW's, and loads on any number of ranks.
State that an owner needs whole (v) travels with its matrix; its last two dims may have other sizes. On the
CPU matrices are multiplied one by one: in a batch, the last bits depend on what else is in it, and so on the
number of ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fullshard.distributed.agreement import rank
from fullshard.distributed.owners import Wave, gather_layouts
from fullshard.distributed.tensors import empty_sharded_like
from fullshard.spec.dealing import (
    WAVE_ELEMENTS,
    DealtMatrix,
    Shape,
    deal_matrices,
    deal_state,
    newton_schulz_flops,
)
from fullshard.spec.settings.train_section import MuonSection
from fullshard.torch_private.tensors import foreach_add, fused_adamw
from fullshard.training.low_bit_adamw import find_or_make_adamw_state, local_part_of

KIND = "kind"
"""Entry of a parameter group: "muon" or "adamw"."""
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's, of the quintic polynomial with the steepest slope at 0
_EPS = 1e-7
_DIRECTION, _SQUARES = "direction", "row_var"  # U, which becomes O; v of NorMuon, by its key in the state


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


class _Dealt(NamedTuple):
    """Division of an optimizer's matrices into those that travel to owners, and those that stay.

    waves: those that are sent to owners, by the keys of `_MatrixUpdate.owner_tensors`
    alone: indices of the parameters whose matrices are whole where they are
    begins: position of the first element of this rank's part of each parameter
    """

    waves: list[dict[str, Wave]]
    alone: list[int]
    begins: list[Shape]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups of kind "muon", AdamW for those of kind "adamw". `step` is collective.

    dtype: that of Newton–Schulz, in which matrices are sent too
    grad_scale, found_inf: as torch's fused AdamW takes them; unset, 1 and 0. A step overwrites the gradients
        of matrices. See [Note: decided on the device] in `gradients.py`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: MuonSection,
        dtype: torch.dtype,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, KIND: "adamw"}
        super().__init__(params, defaults)
        self.muon, self._dtypes = muon, {_DIRECTION: dtype, _SQUARES: torch.float32}
        self._dealt: dict[tuple[int, ...], _Dealt] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        matrices: list[_MatrixUpdate] = []
        for group in self.param_groups:
            own = [one for one in cast(list[Tensor], group["params"]) if one.grad is not None]
            if group[KIND] == "muon":
                matrices += [_MatrixUpdate(self, one, group=group) for one in own]
            elif own:
                self._update_by_adamw(own, group)
        if matrices:
            self._update_matrices(matrices)
        return loss

    def _update_by_adamw(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [find_or_make_adamw_state(self, one) for one in parameters]
        steps = [state["step"] for state in states]
        foreach_add(steps, [torch.ones_like(steps[0])] * len(steps))
        lists = ([local_part_of(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        fused_adamw(
            [local_part_of(one) for one in parameters],
            [local_part_of(one.grad) for one in parameters],
            *lists,
            [],
            steps,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            foreach_add(steps, [-self.found_inf] * len(steps))

    def _update_matrices(self, updates: "Sequence[_MatrixUpdate]") -> None:
        dealt, device = self._deal(updates), updates[0].value.device
        for update in (updates[number] for number in dealt.alone):
            for index in update.iterate_whole_matrices():
                self._update_alone(update, index)
        for waves in dealt.waves:

            def place(one: DealtMatrix) -> tuple[int, ...]:
                return tuple(i - b for i, b in zip(one.index, dealt.begins[one.tensor], strict=False))

            wholes = dict[str, list[Tensor]]()
            for key, wave in waves.items():
                parts = (updates[one.tensor].tensor(key)[place(one)] for one in wave.given)
                wholes[key] = wave.gather(parts, dtype=self._dtypes[key], device=device)
            self._update_wholes(wholes)
            for key, wave in waves.items():
                results = wave.scatter(wholes[key], dtype=self._dtypes[key], device=device)
                for one, result in zip(wave.given, results, strict=True):
                    updates[one.tensor].apply(key, result, index=place(one))

    def _update_alone(self, update: "_MatrixUpdate", index: Any) -> None:
        own = ((key, update.tensor(key)[index]) for key in update.owner_tensors)
        wholes = {key: [one.to(self._dtypes[key], copy=True)] for key, one in own}
        self._update_wholes(wholes)
        for key, (result,) in wholes.items():
            update.apply(key, result, index=index)

    def _update_wholes(self, wholes: dict[str, list[Tensor]]) -> None:
        """Replaces each U by O, and updates state, both of whole matrices and in place in `wholes`."""
        wholes[_DIRECTION] = self._orthogonalise(wholes[_DIRECTION])
        for matrix, squares in zip(wholes[_DIRECTION], wholes.get(_SQUARES, ()), strict=False):
            normalise_rows(matrix, squares, decay=self.muon.row_decay)

    def _deal(self, updates: "Sequence[_MatrixUpdate]") -> _Dealt:
        """Returns how these parameters are dealt. Collective on the first call for these parameters."""
        key = tuple(id(one.parameter) for one in updates)
        if key not in self._dealt:
            keys, follow = updates[0].owner_tensors, partial(deal_state, rank=rank())
            layouts = {name: gather_layouts([one.owner_tensors[name] for one in updates]) for name in keys}
            of_parameters = layouts[_DIRECTION]
            cost = partial(newton_schulz_flops, steps=self.muon.steps)
            waves = deal_matrices(of_parameters, rank=rank(), cost=cost)
            self._dealt[key] = _Dealt(
                [{name: Wave(follow(one, of)) for name, of in layouts.items()} for one in waves],
                alone=[i for i, one in enumerate(of_parameters) if one.has_whole_matrices],
                begins=[one.boxes[rank()].begin for one in of_parameters],
            )
        return self._dealt[key]

    def _orthogonalise(self, wholes: list[Tensor]) -> list[Tensor]:
        """Replaces each matrix in `wholes` by its Newton–Schulz. On a GPU, equal shapes are one batch."""
        alike = defaultdict[object, list[int]](list)
        for number, one in enumerate(wholes):
            alike[one.shape if one.is_cuda else number].append(number)
        for numbers in alike.values():
            if len(numbers) == 1:
                wholes[numbers[0]] = newton_schulz(wholes[numbers[0]], steps=self.muon.steps)
            else:
                batch = newton_schulz(torch.stack([wholes[i] for i in numbers]), steps=self.muon.steps)
                for number, one in zip(numbers, batch.unbind(), strict=True):
                    wholes[number] = one
        return wholes


class _MatrixUpdate:
    """The update of a parameter of kind "muon" in one step, of this rank's part.

    owner_tensors: tensors whose whole matrices owners need, by key: the parameter, which is sharded like U,
        and state
    """

    def __init__(self, optimizer: MuonAdamW, parameter: Tensor, *, group: dict[str, Any]) -> None:
        state = optimizer.state[parameter]
        if "momentum_buffer" not in state:  # none, or AdamW's, in the checkpoint
            state.clear()
            state["momentum_buffer"] = torch.zeros_like(parameter)
        if optimizer.muon.row_decay and _SQUARES not in state:
            shape = (*parameter.shape[:-1], 1)
            state[_SQUARES] = empty_sharded_like(parameter, shape, dtype=torch.float32).zero_()
        self.owner_tensors = {_DIRECTION: parameter}
        if optimizer.muon.row_decay:
            self.owner_tensors[_SQUARES] = state[_SQUARES]
        else:
            state.pop(_SQUARES, None)  # of a run before, with `row_decay`
        self.parameter, self._optimizer, self._group = parameter, optimizer, group
        self.value: Tensor = local_part_of(parameter)
        self._momentum: Tensor = local_part_of(state["momentum_buffer"])
        self._direction: Tensor | None = None

    def direction(self) -> Tensor:
        """Returns U, computed once. The momentum moves; where the step is skipped, it keeps its values."""
        if self._direction is None:
            gradient: Tensor = local_part_of(self.parameter.grad)
            momentum = self._momentum
            optimizer, settings = self._optimizer, self._optimizer.muon
            if optimizer.grad_scale is not None:
                gradient.div_(optimizer.grad_scale)
            if optimizer.found_inf is not None:  # a product with 0 would leave NaN
                gradient.copy_(torch.where(optimizer.found_inf.bool(), momentum, gradient))
            momentum.lerp_(gradient, 1 - settings.momentum)
            if settings.nesterov:
                momentum = gradient.lerp_(momentum, settings.momentum)
            self._direction = momentum
        return self._direction

    def tensor(self, key: str) -> Tensor:
        """Returns this rank's part of U, or of the state `key`."""
        return self.direction() if key == _DIRECTION else local_part_of(self.owner_tensors[key])

    def iterate_whole_matrices(self) -> Iterator[Any]:
        """Yields the index of each matrix, or on a GPU of each batch of them. All are whole on this rank."""
        *lead, rows, columns = self.value.shape
        if self.value.is_cuda and lead:
            count = max(1, WAVE_ELEMENTS // max(1, rows * columns))
            yield from (slice(first, first + count) for first in range(0, lead[0], count))
        else:
            yield from product(*map(range, lead))

    def apply(self, key: str, result: Tensor, *, index: Any) -> None:
        """Sets the state `key`, or updates the value by O, at `index`. A skipped step changes nothing."""
        skip = self._optimizer.found_inf
        if key != _DIRECTION:
            value = self.tensor(key)[index]
            value.copy_(result if skip is None else torch.where(skip.bool(), value, result))
            return
        value = self.value[index]
        rate = float(self._group["lr"])
        kept = 1 - rate * self._group["weight_decay"]
        step = -rate * rate_factor(tuple(self.parameter.shape), self._optimizer.muon.scale)
        if skip is None:
            value.mul_(kept).add_(result, alpha=step)
        else:
            value.copy_(torch.where(skip.bool(), value, (value * kept).add_(result, alpha=step)))
