"""The offloaded part of a training state, in the form that checkpoints and generations hold it."""

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.distributed.agreement import gathered, on_all_ranks, rank
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import CheckpointError
from fullshard.offload.adamw import StreamingAdamW
from fullshard.offload.drive_store import DriveStore
from fullshard.offload.generations import Generation
from fullshard.offload.store import Parts

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class ResidualState:
    """State that a run needs besides the offloaded tensors.

    values: JSON values by name
    tensors: small tensors by name
    """

    values: dict[str, JsonValue]
    tensors: dict[str, Tensor]


class OffloadedTensors:
    """The offloaded tensors of one optimizer.

    Tensors have their checkpoint names: `model.<name>` for masters, `optimizer.<name>.<key>` for moments.

    frozen: checkpoints hold frozen parameters too
    """

    def __init__(self, optimizer: StreamingAdamW, *, frozen: bool = True) -> None:
        self._optimizer, self._offloaded, self._frozen = optimizer, optimizer.offloaded, frozen

    def settle(self) -> None:
        """Waits until no update is running. Raises OffloadError if one failed."""
        self._optimizer.settle()

    @property
    def names(self) -> set[str]:
        own = {_saved_name(name, key) for name in self._offloaded.names for key in Parts._fields}
        return own | {_saved_name(name, "master") for name in self._offloaded.frozen.engine}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the offloaded tensors by name.

        Parameters that were never updated have no moments, as in `torch.optim.AdamW`.
        """
        found: dict[str, Tensor] = {}
        for parameter, name in self._offloaded.names_of.items():
            updated = bool(self._optimizer.state.get(parameter))
            for key, tensor in self._offloaded.tensors(name).items():
                if key == "master" or updated:
                    found[_saved_name(name, key)] = tensor
        for name in self._offloaded.frozen.engine if self._frozen else ():
            found[_saved_name(name, "master")] = self._offloaded.frozen.tensor(name)
        return found

    def partitions(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Yields tensors to fill from a checkpoint, one portion at a time.

        Tensors that it lacks become zero.
        """
        for portion in self._offloaded.refill(frozen=self._frozen):
            receivers: dict[str, Tensor] = {}
            of_other_dtypes: list[tuple[Tensor, Tensor]] = []
            for name, new in portion.items():
                for key, tensor in new.items():
                    saved_name = _saved_name(name, key)
                    info = saved.get(saved_name)
                    if info is None:
                        local_tensor(tensor).zero_()
                    elif info.torch_dtype == tensor.dtype:
                        receivers[saved_name] = tensor
                    else:
                        receivers[saved_name] = torch.empty_like(tensor, dtype=info.torch_dtype)
                        of_other_dtypes.append((receivers[saved_name], tensor))
            yield receivers
            for source, target in of_other_dtypes:
                local_tensor(target).copy_(local_tensor(source))

    def commit_step(self, step: int, beside: Callable[[], ResidualState]) -> None:
        """Commits the state after `step` steps as a generation once it is on its drive.

        A crashed run can resume from it. Does nothing if the state is in host memory.
        """
        store = self._offloaded.store
        if isinstance(store, DriveStore):
            payload = _packed(beside())
            self._offloaded.updates.submit(lambda: store.commit(step, payload))

    def newest_step(self, *, at_least: int) -> int | None:
        """Returns the step of the newest generation that is complete on all ranks. Collective.

        Returns None if it is before `at_least`.
        """
        newest = max(set[int].intersection(*gathered(set(self._resumable()))), default=None)
        return None if newest is None or newest < at_least else newest

    def restore_step(self, step: int) -> ResidualState | None:
        """Restores the generation of this step, and drops later ones. Collective.

        Returns the residual state saved with it, or None if any rank finds its own generation damaged. In
        that case the generation is dropped, and the state is unchanged.
        """
        store = self._offloaded.store
        assert isinstance(store, DriveStore), "others have no generations"
        found, lacking = self._resumable()[step], self._offloaded.updates.unusable
        for later in (one for one in store.generations.whole() if one.step > step):
            store.generations.drop(later.slot)

        def take() -> ResidualState:
            beside = _unpacked(store.generations.payload(found))
            self._offloaded.publish_all(verify=True)
            return beside

        file, committed = store.start_from(found.slot)
        try:
            return on_all_ranks(take, doing=f"going on from step {step} in {store.generations.directory}")
        except CheckpointError as error:
            store.generations.drop(found.slot)
            store.start_from(file, committed=committed)
            if file is not None:
                self._offloaded.publish_all(verify=False)
            self._offloaded.updates.unusable = lacking
            if rank() == 0:
                logger.warning("%s", error)
            return None

    def _resumable(self) -> dict[int, Generation]:
        store = self._offloaded.store
        if not isinstance(store, DriveStore):
            return {}
        return {one.step: one for one in store.generations.whole() if store.generations.payload(one)}


def gradients_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the gradients of all parameters that have one, from where they wait for their update."""
    if not isinstance(optimizer, StreamingAdamW):
        return [p.grad for p in model.parameters() if p.grad is not None]
    names, outside = optimizer.offloaded.names_of, optimizer.gradients
    every = (outside.of(names[p]) if p in names else p.grad for p in model.parameters())
    return [gradient for gradient in every if gradient is not None]


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clears the gradients of all model parameters.

    The optimizer may hold fewer, and the others would accumulate.
    """
    model.zero_grad(set_to_none=True)
    if isinstance(optimizer, StreamingAdamW):
        optimizer.gradients.clear()


def _packed(beside: ResidualState) -> bytes:
    file = io.BytesIO()
    torch.save({"values": beside.values, "tensors": beside.tensors}, file)
    return file.getvalue()


def _unpacked(payload: bytes) -> ResidualState:
    found = torch.load(io.BytesIO(payload), weights_only=True)
    return ResidualState(found["values"], found["tensors"])


def _saved_name(name: str, key: str) -> str:
    return f"model.{name}" if key == "master" else f"optimizer.{name}.{key}"
