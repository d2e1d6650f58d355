"""Saving and restoring of the offloaded part of a training state, in checkpoints and generations."""

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from pydantic import JsonValue
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.distributed.agreement import all_gather_object, rank, run_on_all_ranks
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import CheckpointError
from fullshard.offload.adamw import StreamingAdamW
from fullshard.offload.drive_store import DriveStore
from fullshard.offload.generations import Generation
from fullshard.offload.store import MasterAndMoments

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class NonOffloadedState:
    """State that a generation holds besides the offloaded tensors: JSON values and small tensors, by name."""

    values: dict[str, JsonValue]
    tensors: dict[str, Tensor]


class OffloadedTensors:
    """The offloaded tensors of one optimizer, by their names in a checkpoint.

    `model.<name>` is the full-precision parameter, `optimizer.<name>.<key>` a moment.

    frozen: whether checkpoints also hold frozen parameters
    """

    def __init__(self, optimizer: StreamingAdamW, *, frozen: bool = True) -> None:
        self._optimizer, self._offloaded, self._frozen = optimizer, optimizer.offloaded, frozen

    def wait_for_updates(self) -> None:
        """Waits until no update is running. Raises OffloadError if an update failed."""
        self._offloaded.wait_for_update()

    @property
    def tensor_names(self) -> set[str]:
        names, keys = self._offloaded.names, MasterAndMoments._fields
        own = {_checkpoint_tensor_name(name, key) for name in names for key in keys}
        return own | {_checkpoint_tensor_name(name, "master") for name in self._offloaded.frozen.engine}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the offloaded tensors by name, without moments of parameters that were never updated."""
        found: dict[str, Tensor] = {}
        for parameter, name in self._offloaded.names_of.items():
            updated = bool(self._optimizer.state.get(parameter))
            for key, tensor in self._offloaded.parameter_state_tensors(name).items():
                if key == "master" or updated:
                    found[_checkpoint_tensor_name(name, key)] = tensor
        for name in self._offloaded.frozen.engine if self._frozen else ():
            found[_checkpoint_tensor_name(name, "master")] = self._offloaded.frozen.parameter_dtensor(name)
        return found

    def iterate_load_targets(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Yields portions of tensors by name, to fill from `saved` before the next. Others become 0."""
        for portion in self._offloaded.iterate_tensors_to_fill(frozen=self._frozen):
            receivers: dict[str, Tensor] = {}
            of_other_dtypes: list[tuple[Tensor, Tensor]] = []
            for name, new in portion.items():
                for key, tensor in new.items():
                    saved_name = _checkpoint_tensor_name(name, key)
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

    def commit_generation(self, step: int, beside: Callable[[], NonOffloadedState]) -> None:
        """Queues the commit of the state after `step` steps as a generation, which a crashed run can resume.

        beside: returns the state that is not offloaded; called at once

        Does nothing if the offloaded state is in host memory, not on a drive.
        """
        store = self._offloaded.store
        if isinstance(store, DriveStore):
            payload = io.BytesIO()
            torch.save(vars(beside()), payload)
            self._offloaded.updates.submit(lambda: store.commit_generation(step, payload.getvalue()))

    def withdraw_generation(self) -> None:
        """Keeps runs from resuming from the newest generation, because all steps since were skipped.

        Skipped steps make no generation. So the older one is the newest after which a step was not skipped.
        """
        store = self._offloaded.store
        if isinstance(store, DriveStore):
            self.wait_for_updates()
            slot, committed = store.swap_newest_slot(None)
            if slot is not None and committed:
                store.generations.reopen_generation(slot)
                committed = False
            store.swap_newest_slot(slot, committed=committed)

    def newest_restorable_step(self, *, at_least: int) -> int | None:
        """Returns the newest step >= `at_least` that every rank has a generation of, or None. Collective."""
        steps_by_rank = all_gather_object(set(self._resumable_generations()))
        newest = max(set[int].intersection(*steps_by_rank), default=None)
        return None if newest is None or newest < at_least else newest

    def restore_generation(self, step: int) -> NonOffloadedState | None:
        """Restores the offloaded tensors of `step` and returns the state beside them. Collective.

        Later generations are dropped. If the generation of `step` is damaged on any rank, all ranks drop it,
        keep their state, and return None.
        """
        store = self._offloaded.store
        assert isinstance(store, DriveStore), "others have no generations"
        found, lacking = self._resumable_generations()[step], self._offloaded.updates.unusable
        for later in (one for one in store.generations.list_complete_generations() if one.step > step):
            store.generations.invalidate_generation(later.slot)

        def read_payload_and_rewrite_shards() -> NonOffloadedState:
            payload = io.BytesIO(store.generations.read_generation_payload(found))
            beside = NonOffloadedState(**torch.load(payload, weights_only=True))
            self._offloaded.rewrite_shards_from_masters(verify=True)
            return beside

        file, committed = store.swap_newest_slot(found.slot)
        doing = f"going on from step {step} in {store.generations.directory}"
        try:
            return run_on_all_ranks(read_payload_and_rewrite_shards, doing=doing)
        except CheckpointError as error:
            store.generations.invalidate_generation(found.slot)
            store.swap_newest_slot(file, committed=committed)
            if file is not None:
                self._offloaded.rewrite_shards_from_masters(verify=False)
            self._offloaded.updates.unusable = lacking
            if rank() == 0:
                logger.warning("%s", error)
            return None

    def _resumable_generations(self) -> dict[int, Generation]:
        store = self._offloaded.store
        if not isinstance(store, DriveStore):
            return {}
        files = store.generations
        complete = files.list_complete_generations()
        return {one.step: one for one in complete if files.read_generation_payload(one)}


def _checkpoint_tensor_name(name: str, key: str) -> str:
    return f"model.{name}" if key == "master" else f"optimizer.{name}.{key}"
