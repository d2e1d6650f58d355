"""Optimizers that update whole matrices of blocks, and all other parameters by AdamW.

Matrices travel to owners and back: see [Note: owners] in `spec.dealing`. State is sharded like its parameter,
so a checkpoint of it is like AdamW's, and loads on any number of ranks. State that an owner needs whole
travels with its matrix; its last two dims may have other sizes. On the CPU matrices are multiplied one by
one: in a batch, the last bits depend on what else is in it, and so on the number of ranks.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fullshard.distributed.agreement import rank
from fullshard.distributed.owners import Wave, find_layouts
from fullshard.spec.dealing import WAVE_ELEMENTS, DealtMatrix, deal_matrices, deal_state
from fullshard.spec.settings.train_section import OptimizerSection
from fullshard.spec.shard_layout import Shape
from fullshard.training.low_bit_adamw import find_or_make_adamw_state, local_part_of

KIND = "kind"
"""Entry of a parameter group: "adamw", or the name of the optimizer of whole matrices."""
DIRECTION = "direction"
"""Key of what an owner gets and returns for every matrix: of the former, it computes the update O."""


@dataclass(frozen=True, eq=False)
class MatrixUpdate:
    """The update of a parameter's matrices in one step, of this rank's part: value ← kept value + step O.

    owner_tensors: tensors whose whole matrices owners need, by key: the direction, sharded like the
        parameter, and state
    batch: equal for parameters that are dealt and updated together, on all ranks
    """

    parameter: Tensor
    owner_tensors: Mapping[str, Tensor]
    kept: float
    step: float
    batch: Hashable = None

    def iterate_whole_matrices(self) -> Iterator[Any]:
        """Yields the index of each matrix, or on a GPU of each batch of them. All are whole on this rank."""
        *lead, rows, columns = local_part_of(self.parameter).shape
        if self.parameter.is_cuda and lead:
            count = max(1, WAVE_ELEMENTS // max(1, rows * columns))
            yield from (slice(first, first + count) for first in range(0, lead[0], count))
        else:
            yield from product(*map(range, lead))

    def apply(self, key: str, result: Tensor, *, index: Any, skip: Tensor | None) -> None:
        """Sets the state `key`, or updates the value by O, at `index`. A skipped step changes nothing."""
        own = self.parameter if key == DIRECTION else self.owner_tensors[key]
        value = cast(Tensor, local_part_of(own))[index]
        before = None if skip is None else value.clone()
        if key == DIRECTION:
            value.mul_(self.kept).add_(result, alpha=self.step)
        else:
            value.copy_(result)
        if skip is not None and before is not None:
            value.copy_(torch.where(skip.bool(), before, value))


class _Dealt(NamedTuple):
    """Division of an optimizer's matrices into those that travel to owners, and those that stay.

    waves: those that are sent to owners, by the keys of `MatrixUpdate.owner_tensors`
    alone: indices of the parameters whose matrices are whole where they are
    begins: position of the first element of this rank's part of each parameter
    """

    waves: list[dict[str, Wave]]
    alone: list[int]
    begins: list[Shape]


class WholeMatrixAdamW(torch.optim.Optimizer, ABC):
    """An optimizer of whole matrices, and AdamW for groups of kind "adamw". `step` is collective.

    dtype: that in which directions are sent and updates are computed; state is in fp32
    grad_scale, found_inf: as torch's fused AdamW takes them; unset, 1 and 0. A step overwrites the gradients
        of matrices. See [Note: decided on the device] in `gradients.py`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], section: OptimizerSection, *, dtype: torch.dtype) -> None:
        defaults = {"lr": section.learning_rate, "betas": section.betas, "eps": section.eps}
        super().__init__(params, defaults | {"weight_decay": 0.0, KIND: "adamw"})
        self.section, self._dtypes = section, defaultdict(lambda: torch.float32, {DIRECTION: dtype})
        self._dealt: dict[tuple[int, ...], _Dealt] = {}

    @abstractmethod
    def _start_update(self, parameter: Tensor, group: dict[str, Any]) -> MatrixUpdate:
        """Returns the update of a parameter of `group`, whose state is made before the first update."""

    @abstractmethod
    def _update_wholes(self, wholes: dict[str, list[Tensor]], batch: Any) -> None:
        """Replaces each direction by O, and updates state, both of whole matrices and in place in `wholes`.

        Removes the keys of what stays as it was, on all ranks alike. `batch`: that of the updates.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        batches = defaultdict[Hashable, list[MatrixUpdate]](list)
        for group in self.param_groups:
            own = [one for one in cast(list[Tensor], group["params"]) if one.grad is not None]
            if group[KIND] != "adamw":
                for update in (self._start_update(one, group) for one in own):
                    batches[update.batch].append(update)
            elif own:
                self._update_by_adamw(own, group)
        for batch, updates in batches.items():
            self._update_matrices(updates, batch)
        return loss

    def _update_by_adamw(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [find_or_make_adamw_state(self, one) for one in parameters]
        adamw(
            [local_part_of(one) for one in parameters],
            [local_part_of(one.grad) for one in parameters],
            [local_part_of(state["exp_avg"]) for state in states],
            [local_part_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update_matrices(self, updates: Sequence[MatrixUpdate], batch: Hashable) -> None:
        dealt, device = self._deal(updates), updates[0].parameter.device
        for update in (updates[number] for number in dealt.alone):
            for index in update.iterate_whole_matrices():
                self._update_alone(update, index)

        def place(one: DealtMatrix) -> tuple[int, ...]:
            return tuple(i - b for i, b in zip(one.index, dealt.begins[one.tensor], strict=False))

        for waves in dealt.waves:
            wholes = dict[str, list[Tensor]]()
            for key, wave in waves.items():
                every = [local_part_of(update.owner_tensors[key]) for update in updates]
                parts = (every[one.tensor][place(one)] for one in wave.given)
                wholes[key] = wave.gather(parts, dtype=self._dtypes[key], device=device)
            self._update_wholes(wholes, batch)
            for key, whole in wholes.items():
                results = waves[key].scatter(whole, dtype=self._dtypes[key], device=device)
                for one, result in zip(waves[key].given, results, strict=True):
                    updates[one.tensor].apply(key, result, index=place(one), skip=self.found_inf)

    def _update_alone(self, update: MatrixUpdate, index: Any) -> None:
        own = ((key, local_part_of(one)[index]) for key, one in update.owner_tensors.items())
        wholes = {key: [cast(Tensor, one).to(self._dtypes[key], copy=True)] for key, one in own}
        self._update_wholes(wholes, update.batch)
        for key, (result,) in wholes.items():
            update.apply(key, result, index=index, skip=self.found_inf)

    def _deal(self, updates: Sequence[MatrixUpdate]) -> _Dealt:
        """Returns how these parameters are dealt."""
        key = tuple(id(one.parameter) for one in updates)
        if key not in self._dealt:
            keys, follow = updates[0].owner_tensors, partial(deal_state, rank=rank())
            layouts = {name: find_layouts([one.owner_tensors[name] for one in updates]) for name in keys}
            of_parameters = layouts[DIRECTION]
            waves = deal_matrices(of_parameters, rank=rank(), cost=self.section.matrix_section.flops)
            self._dealt[key] = _Dealt(
                [{name: Wave(follow(one, of)) for name, of in layouts.items()} for one in waves],
                alone=[i for i, one in enumerate(of_parameters) if one.has_whole_matrices],
                begins=[one.boxes[rank()].begin for one in of_parameters],
            )
        return self._dealt[key]
