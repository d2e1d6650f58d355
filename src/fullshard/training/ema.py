"""An exponential moving average of the trained parameters, which each rank keeps of its own shards.

[Note: averages in fp32] With a decay of 0.999, an update moves the average by a thousandth of its distance
from the parameter. bf16 rounds changes of less than 1/256 of a value away, so an average in bf16 would stand
still. Averages are therefore in fp32 (in fp64 for parameters in fp64), whatever the parameter's dtype.

[Note: averages beside masters] If the masters are in host memory, so are their averages, in this rank's part.
They are updated on the thread that updates the masters, after the update that was submitted before.
"""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.manifest import AVERAGE_PREFIX, SavedTensor
from fullshard.distributed.agreement import rank
from fullshard.distributed.tensors import detached_local_tensor, dtensor_from_local_part
from fullshard.errors import TrainError
from fullshard.offload.gather_source import dtensor_like
from fullshard.offload.state import find_offloaded_state
from fullshard.parallel.unit_events import reshard_unsharded_units
from fullshard.quantities import count_text
from fullshard.spec.settings.train_section import EmaSection
from fullshard.torch_private.tensors import foreach_lerp

logger = logging.getLogger("fullshard")


class ParameterAverage:
    """Averages of the trained parameters of a sharded model, by name. See [Note: averages in fp32].

    Until `begin`, or a load, they have no values. is_swapped: whether the model computes with them now
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._offloaded = model, find_offloaded_state(model)
        self._averages: dict[str, Tensor] = {}  # this rank's part
        self._unset = set[str]()
        self.is_swapped = False
        self._allocate()

    @property
    def device_tensors(self) -> list[Tensor]:
        """The averages that are not of offloaded masters."""
        return [one for name, one in self._averages.items() if not self._is_offloaded(name)]

    @property
    def host_bytes(self) -> int:
        """Bytes of the averages of offloaded masters."""
        return sum(one.nbytes for name, one in self._averages.items() if self._is_offloaded(name))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages as DTensors like the parameters, by their names in checkpoints."""
        refuse_swapped(self)
        self._fill_unset()
        parameters, found = dict(self._model.named_parameters()), dict[str, Tensor]()
        for name, average in self._averages.items():
            parameter = parameters[name]
            if self._is_offloaded(name) and self._offloaded:
                average = dtensor_like(self._offloaded.engine[name], average)
            elif isinstance(parameter, DTensor):
                average = dtensor_from_local_part(parameter, average)
            found[AVERAGE_PREFIX + name] = average
        return found

    def begin(self) -> None:
        """Sets averages without values to the parameters. No update of an offload target may be running."""
        self._allocate()
        self._fill_unset()
        self._unset.clear()

    @torch.no_grad()
    def update(self, section: EmaSection, *, step: int, skipped: Tensor | None = None) -> None:
        """Adds the parameters after `step`, from 1, if an update is due. Does not wait for the device.

        skipped: () 1 if the device skipped the step, else 0; None if the host knows that it did not
        """
        if step > section.start and step % section.every:
            return
        weight: float | Tensor = 1.0 if step <= section.start else 1.0 - section.decay
        if skipped is not None:
            weight = weight * (1.0 - skipped.double())
        pairs = list(self._pairs())
        _move_averages([(a, source) for name, a, source in pairs if not self._is_offloaded(name)], weight)
        if self._offloaded is not None:
            beside = [(a, source) for name, a, source in pairs if self._is_offloaded(name)]
            self._offloaded.updates.submit(partial(_move_averages, beside, weight))

    def finish_load(self, received: Mapping[str, Tensor], *, step: int) -> None:
        """Notes which averages a checkpoint has set; the others begin with the parameters."""
        self._unset = {name for name in self._averages if AVERAGE_PREFIX + name not in received}
        if self._unset and rank() == 0:
            logger.warning(
                "the checkpoint of step %d has no average of %d of %s: there, the average begins with the "
                "loaded parameters",
                step,
                len(self._unset),
                count_text(len(self._averages), "trained parameter"),
            )

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Context in which the parameters have the values of the averages, and the averages theirs."""
        refuse_swapped(self)
        self._fill_unset()
        kept = dict[str, Tensor]()
        self._exchange(kept)
        self.is_swapped = True
        try:
            yield
        finally:
            self._exchange(kept)
            self.is_swapped = False

    @torch.no_grad()
    def _exchange(self, kept: dict[str, Tensor]) -> None:
        """Exchanges parameters and averages. `kept`: parameters of other dtypes than their averages."""
        reshard_unsharded_units(self._model)
        for name, average, source in self._pairs():
            before = source.clone()
            source.copy_(kept.pop(name, average))
            if before.dtype == average.dtype:
                average.copy_(before)
            elif not self.is_swapped:
                kept[name] = before
        if self._offloaded is not None:
            self._offloaded.rewrite_shards_from_masters(verify=False)
            self._offloaded.wait_for_update()

    def _allocate(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._averages:
                local = detached_local_tensor(parameter)
                dtype = torch.promote_types(local.dtype, torch.float32)
                device = torch.device("cpu") if self._is_offloaded(name) else local.device
                self._averages[name] = torch.zeros(local.shape, dtype=dtype, device=device)
                self._unset.add(name)

    @torch.no_grad()
    def _fill_unset(self) -> None:
        for _, average, source in (one for one in self._pairs() if one[0] in self._unset):
            average.copy_(source)

    def _is_offloaded(self, name: str) -> bool:
        return self._offloaded is not None and name in self._offloaded.engine

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields (name, average, parameter or master) of this rank's parts."""
        parameters = dict(self._model.named_parameters())
        for name, average in self._averages.items():
            if self._offloaded is None or name not in self._offloaded.engine:
                yield name, average, detached_local_tensor(parameters[name])
            elif (parts := self._offloaded.store.read_parameter_state(name)) is not None:
                yield name, average, parts.master.view(average.shape)


@torch.no_grad()
def _move_averages(pairs: Sequence[tuple[Tensor, Tensor]], weight: float | Tensor) -> None:
    """Moves each average towards its parameter by the fraction `weight` of the difference."""
    if isinstance(weight, float) and pairs and all(one.dtype == other.dtype for one, other in pairs):
        foreach_lerp([one for one, _ in pairs], [other for _, other in pairs], weight=weight)
        return
    for average, source in pairs:  # a weight that only the device knows takes a launch for each
        average.lerp_(source.to(average.dtype), torch.as_tensor(weight, dtype=average.dtype))


def averages_to_load(average: ParameterAverage | None, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """Returns the averages to fill from a checkpoint that holds `saved`. Logs that others are left out."""
    own = average.tensors() if average is not None else {}
    if any(name.startswith(AVERAGE_PREFIX) for name in saved) and average is None and rank() == 0:
        logger.warning("the checkpoint's averages of parameters are not kept, since the run has no [ema]")
    return {name: tensor for name, tensor in own.items() if name in saved}


def refuse_swapped(average: ParameterAverage | None) -> None:
    """Raises TrainError while the model computes with the averages."""
    if average is not None and average.is_swapped:
        raise TrainError(
            "the parameters are exchanged for their averages.",
            got="a step, save, load or exchange inside `with averaged_weights(state)`",
            why="it would take averages for parameters",
            fix="leave the context before",
        )


def check_average_is_planned(average: ParameterAverage | None, section: EmaSection) -> None:
    """Raises TrainError if a state keeps an average that its run does not ask for, or the other way round."""
    if (average is not None) != (section.decay > 0):
        raise TrainError(
            "the state and the run differ in whether an average is kept.",
            got=f"TrainState(ema={average is not None}), ema.decay = {section.decay:g}",
            fix="TrainState(model, optimizer, ema=plan.run.ema.decay > 0)",
        )
