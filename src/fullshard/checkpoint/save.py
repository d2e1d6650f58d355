"""Saving a state as a checkpoint, which becomes visible complete or not at all."""

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import location, storage
from fullshard.checkpoint.files import WRITER, CheckpointFiles
from fullshard.checkpoint.location import CheckpointLocation, location_of, path_or_url_of
from fullshard.checkpoint.manifest import (
    AVERAGE_PREFIX,
    METADATA,
    MODEL_PREFIX,
    Checkpointable,
    Manifest,
    SavedTensor,
    StateRequiringFiniteTensors,
    read_manifest_and_check_sizes,
    steps_skipped_in_a_row,
)
from fullshard.checkpoint.results import RESULTS
from fullshard.checkpoint.retention import prune_checkpoints
from fullshard.checkpoint.save_plan import OwnShard, SavePlan
from fullshard.checkpoint.storage import WrittenShards, write_own_shards
from fullshard.distributed.agreement import (
    Group,
    all_gather_object,
    all_ranks_have,
    raise_on_all_ranks,
    rank,
    run_on_rank_zero,
    world_size,
)
from fullshard.distributed.tensors import TRAINED, detached_local_tensor, find_unusable_number
from fullshard.errors import CheckpointError, DamagedCheckpointError, SpecError
from fullshard.quantities import count_text, format_bytes
from fullshard.spec.plan import Plan
from fullshard.system.direct_io import ALIGNMENT, LARGE_BYTES
from fullshard.system.process import installed_version

# Upper bound of the overhead per shard: zip archive (1.1 KiB to 1.9 KiB on torch 2.13) and its record.
_ENVELOPE_BYTES = 2560

_VALUES: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])

logger = logging.getLogger("fullshard")


def save(
    state: Checkpointable,
    directory: str | Path | CheckpointLocation,
    *,
    keep: int = 0,
    keep_every: int = 0,
    plan: Plan | None = None,
) -> Path | str:
    """Saves `state` as `directory/step-00000123` and returns that path. Collective: every rank calls it.

    Every rank writes its own shards, and the digests of their bytes, into a temporary directory beside the
    final one. The manifest is written last, everything is flushed to the disk, and only then is the directory
    renamed. If any rank fails, all ranks raise a CheckpointError that names the first failed rank, the
    temporary directory is removed, and older checkpoints are untouched.

    If a complete checkpoint of the same step and numbers exists, nothing is written. One with other numbers,
    of another run, is renamed to `.bad-…` with a warning, as is a damaged one. Raises CheckpointError if the
    step is of another model. Only one run at a time can save to a directory; others get a CheckpointError.

    Raises CheckpointError for a state that no training can continue from: NaN in the model, and of a
    TrainState, numbers that `find_unusable_number` finds in trained parameters or optimizer state. If the
    last steps were skipped, no other checkpoint is removed or replaced, and `load` prefers older ones.

    directory: location of the checkpoints, which all ranks share
    keep: number of newest complete checkpoints to keep after the save; 0 keeps all
    keep_every: also keeps the steps that are multiples of it; 0 for none
    plan: recorded in the manifest; for its `adapter.save = "adapters"`, give TrainState `saved="trained"`

    >>> fs.save(state, "checkpoints", plan=plan, keep=2)
    PosixPath('checkpoints/step-00000003')
    """
    saver = CheckpointSaver(location_of(directory), keep=keep, keep_every=keep_every, plan=plan)
    return saver.save(state)


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a state to save."""

    step: int
    values: dict[str, JsonValue]
    tensors: dict[str, Tensor]
    finite: Collection[str] = ()  # names of the tensors that must be finite

    def find_unusable_number(self, name: str, numbers: Tensor) -> float | None:
        """Returns a number of a tensor that no training can continue from, or None.

        Infinities are accepted in model tensors outside `finite`, such as masks. Other tensors are unchecked.
        """
        is_of_model = name.startswith((MODEL_PREFIX, AVERAGE_PREFIX))
        if name not in self.finite:
            return find_unusable_number(numbers, role=None) if is_of_model else None
        return find_unusable_number(numbers, role=TRAINED if is_of_model else name.rpartition(".")[2])

    def check_may_replace(self, other: CheckpointFiles) -> None:
        """Raises CheckpointError if `other` is to be preferred: [Note: the last good checkpoint].

        Reads this rank's tensors.
        """
        shards = ((name, detached_local_tensor(tensor).cpu()) for name, tensor in self.tensors.items())
        unusable = next((one for one in shards if self.find_unusable_number(*one) is not None), None)
        if unusable or steps_skipped_in_a_row(self.values):
            raise CheckpointError(
                f"{other} is kept, and this state of its step is not saved.",
                got=f"unusable numbers in {unusable[0]}" if unusable else "the last steps were skipped",
                why="the numbers that were saved before may be the last good ones",
                fix="an older checkpoint, and a look at the steps before",
            )


@dataclass(frozen=True)
class CheckpointSaver:
    """Location and settings of saves. See `save` for the fields.

    saves_unusable: whether a state that no training can continue from is saved, and marked, or refused
    dcp_shards: most shards for which `.metadata` is written, by which torch alone loads the checkpoint
    good: results of each good checkpoint that was read or saved, by step: see `prune_checkpoints`
    """

    place: CheckpointLocation
    keep: int = 0
    keep_every: int = 0
    plan: Plan | None = None
    saves_unusable: bool = False
    dcp_shards: int = storage.DCP_SHARDS
    good: dict[int, JsonValue] = field(default_factory=dict[int, JsonValue], init=False, repr=False)

    def __post_init__(self) -> None:
        for name, kept in (("keep", self.keep), ("keep_every", self.keep_every)):
            if kept < 0:
                raise SpecError("a number of checkpoints to keep cannot be negative.", got=f"{name} = {kept}")

    def save(self, state: Checkpointable) -> Path | str:
        """Saves `state` and returns the path of its checkpoint. Collective. Raises as the function `save`."""
        with raise_on_all_ranks("taking the state to save"):
            snapshot = take_snapshot(state)
        return self.save_snapshot(snapshot)

    def save_snapshot(self, mine: Snapshot, *, group: Group = None) -> Path | str:
        """Writes and commits a snapshot. Collective over `group`, by default all ranks. Raises as `save`."""
        doing = f"saving step {mine.step} to {self.place}"
        plan = run_on_rank_zero(lambda: SavePlan.from_tensors(mine.tensors), doing=doing, group=group)
        with raise_on_all_ranks(doing, group=group):
            own = plan.list_own_shards(mine.tensors)
        needed_bytes = _check_same_values_and_sum_bytes(mine, own, group=group)
        with ExitStack() as held:
            create = partial(self._lock_and_draft_unless_saved, held, mine, needed_bytes=needed_bytes)
            draft = run_on_rank_zero(create, doing=doing, group=group)
            if isinstance(draft, _SavedStep):
                if draft.has_same_smallest_matrix(mine, group=group):
                    return path_or_url_of(draft.files)
                with raise_on_all_ranks(doing, group=group):
                    mine.check_may_replace(draft.files)
                replace = partial(
                    self._quarantine_other_and_create_draft, mine, draft.files, needed_bytes=needed_bytes
                )
                draft = run_on_rank_zero(replace, doing=doing, group=group)
            try:
                with raise_on_all_ranks(doing, group=group):
                    part = self._write_own_shards(mine, own, plan=plan, draft=draft)
                written = all_gather_object(part, group=group)
                commit = partial(self._commit, mine, draft, plan=plan, written=written)
                return run_on_rank_zero(commit, doing=doing, group=group)
            except CheckpointError:
                if rank() == 0:
                    self.place.discard_draft(draft)
                raise

    def _warn_of_later_steps(self, step: int) -> None:
        """Warns if there is a checkpoint of a later step, which `load` takes rather than that of `step`."""
        later = max(self.place.list_steps(), default=step)
        if later > step and (later := location.newest_complete_step(self.place) or step) > step:
            logger.warning(
                "%s has step %d already, of another run or from before a rollback: load and exports take "
                "it rather than step %d",
                self.place,
                later,
                step,
            )

    def _lock_and_draft_unless_saved(
        self, held: ExitStack, mine: Snapshot, *, needed_bytes: int
    ) -> "CheckpointFiles | _SavedStep":
        """Returns a new draft, or the step if it is already saved, complete and good. Called on rank 0.

        Renames a damaged checkpoint of the step, and removes one that is to be avoided: [Note: the last good
        checkpoint]. The location stays locked until `held` closes. Raises CheckpointError for another model.
        """
        held.enter_context(self.place.lock_for_writing())
        if (there := self.place.find_checkpoint(mine.step)) is not None:
            try:
                manifest = read_manifest_and_check_sizes(there)
            except DamagedCheckpointError as error:
                aside = self.place.quarantine(there)
                logger.warning("%s is not whole (%s); renamed to %s", there, error.got, aside)
            else:
                _check_same_model_as_saved(there, manifest, mine=mine)
                if manifest.why_avoided is None:
                    return _SavedStep(there, manifest)
                logger.info("%s is replaced: %s", there, manifest.why_avoided)
                self.place.remove_checkpoint(there)
        return self.place.clean_up_and_create_draft(mine.step, needed_bytes=needed_bytes)

    def _quarantine_other_and_create_draft(
        self, mine: Snapshot, there: CheckpointFiles, *, needed_bytes: int
    ) -> CheckpointFiles:
        """Renames the saved step, which has other numbers, and returns a draft. Called on rank 0."""
        aside = self.place.quarantine(there)
        logger.warning(
            "%s had other numbers, of another run or from before a rollback; it is %s now", there, aside
        )
        return self.place.clean_up_and_create_draft(mine.step, needed_bytes=needed_bytes)

    def _write_own_shards(
        self, mine: Snapshot, own: Sequence[OwnShard], *, plan: SavePlan, draft: CheckpointFiles
    ) -> tuple[WrittenShards, str | None]:
        """Returns what this rank wrote, and a number there that no training can continue from, or None."""
        unusable: list[str] = []

        def check(name: str, numbers: Tensor) -> None:
            if (found := mine.find_unusable_number(name, numbers)) is None:
                return
            if not self.saves_unusable:
                raise CheckpointError(
                    f"{name} is not saved.",
                    got=f"{found:g} in it",
                    why="a run that resumes from it would be lost",
                    fix="an older checkpoint, and a look at the steps before",
                )
            unusable.append(f"{found:g} in {name}")

        try:
            written = write_own_shards(own, plan, draft=draft, check=check, dcp_shards=self.dcp_shards)
        except FileNotFoundError as error:
            if WRITER in draft.file_sizes_bytes():
                raise
            raise CheckpointError(
                "the directory of checkpoints is not the same on all ranks.",
                got=f"no {draft} there, which rank 0 has just made",
                fix="a directory on a file system that all machines share, or an object store (s3://…)",
            ) from error
        return written, next(iter(unusable), None)

    def _commit(
        self,
        mine: Snapshot,
        draft: CheckpointFiles,
        *,
        plan: SavePlan,
        written: Sequence[tuple[WrittenShards, str | None]],
    ) -> Path | str:
        """Commits a draft that has all shards, then removes old checkpoints. Called on rank 0."""
        files, tensors = storage.write_index(
            draft, plan, written=[one for one, _ in written], dcp_shards=self.dcp_shards
        )
        manifest = Manifest(
            step=mine.step,
            values=mine.values,
            tensors=tensors,
            files=dict(sorted(files.items())),
            world_size=world_size(),
            torch_version=torch.__version__,
            fullshard_version=installed_version("fullshard") or "unknown",
            plan=None if self.plan is None else self.plan.model_dump(mode="json"),
            unusable=next((one for _, one in written if one is not None), None),
        )
        storage.CheckpointReader(draft, manifest).read_index()  # as a load begins
        target = self.place.commit(draft, manifest)
        # A save is not acknowledged unless the next load would find it.
        read_manifest_and_check_sizes(target)
        logger.info("saved %s (%s)", target, format_bytes(manifest.checkpoint_bytes))
        if METADATA not in files:
            logger.info(
                "%s has no %s, which torch alone would read: it has more than %d shards. fullshard ckpt "
                "export --format dcp writes a directory that has one",
                target,
                METADATA,
                self.dcp_shards,
            )
        with suppress(OSError, CheckpointError):  # the save is complete
            self._warn_of_later_steps(mine.step)
        if (why := manifest.why_avoided) is not None:
            logger.warning("%s: older checkpoints than %s stay, and are loaded rather than it", why, target)
            self.good.pop(mine.step, None)
        else:
            best = None if self.plan is None else self.plan.run.best_result
            self.good[mine.step] = manifest.values.get(RESULTS)
            kept = {"keep": self.keep, "keep_every": self.keep_every}
            prune_checkpoints(self.place, **kept, step=mine.step, best=best, good=self.good)
        return path_or_url_of(target)


class _SavedStep(NamedTuple):
    files: CheckpointFiles
    manifest: Manifest

    def has_same_smallest_matrix(self, mine: Snapshot, *, group: Group) -> bool:
        """Returns whether it has the numbers of `mine`, judged by the smallest trained matrix. Collective.

        Returns True without such a matrix.
        """
        names = [n for n, one in mine.tensors.items() if n.startswith(MODEL_PREFIX) and one.numel()]
        names = [name for name in names if name in mine.finite] or names
        if not names:
            return True
        name = min(names, key=lambda one: (mine.tensors[one].ndim < 2, mine.tensors[one].numel(), one))
        own, saved = mine.tensors[name], torch.empty_like(mine.tensors[name])
        with raise_on_all_ranks(f"comparing with {self.files}", group=group):
            storage.CheckpointReader(self.files, self.manifest).read_tensors({name: saved})
        same = torch.equal(detached_local_tensor(saved), detached_local_tensor(own))
        return all_ranks_have(same, group=group)


def take_snapshot(state: Checkpointable) -> Snapshot:
    """Returns the state's step, values and tensors, not copied. Raises CheckpointError for unsavable ones."""
    tensors = state.tensors()
    for name, tensor in tensors.items():
        if problem := _unsavable_reason(tensor):
            raise CheckpointError(f"the tensor {name!r} cannot be saved.", got=problem)
    try:
        values = _VALUES.validate_python(state.values())
        json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(
            "the state's values cannot be saved.",
            got=error.errors()[0]["loc"] if isinstance(error, ValidationError) else str(error),
            why="they go into a JSON file: strings, finite numbers, booleans, null, lists and objects",
        ) from error
    has_finite = isinstance(state, StateRequiringFiniteTensors)
    finite = state.select_names_that_must_be_finite(tensors) if has_finite else ()
    return Snapshot(state.step, values, tensors, finite)


def _unsavable_reason(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}, not a tensor"
    # A subclass may read its numbers only when it is copied to the CPU.
    if tensor.is_meta and type(detached_local_tensor(tensor)) in (Tensor, nn.Parameter):
        return "a tensor on the meta device, which holds no numbers"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        return "a DTensor with a Partial placement, whose sum over ranks is still due"
    return None


def _check_same_values_and_sum_bytes(mine: Snapshot, own: Sequence[OwnShard], *, group: Group) -> int:
    """Returns the most bytes that all ranks write. Raises CheckpointError if their steps or values differ."""
    digest = hashlib.sha256(json.dumps(mine.values, sort_keys=True).encode()).hexdigest()
    sizes = [one.shard.nbytes for one in own]
    padding = ALIGNMENT * sum(size >= LARGE_BYTES for size in sizes)
    most = sum(sizes) + _ENVELOPE_BYTES * len(sizes) + padding  # in a data file and its table
    facts = all_gather_object((mine.step, digest, most), group=group)
    for other, (step, values, _) in enumerate(facts):
        if step != facts[0][0]:
            steps = f"rank 0 at {facts[0][0]}, rank {other} at {step}"
            raise CheckpointError("the ranks are not at the same step.", got=steps)
        if values != facts[0][1]:
            raise CheckpointError(
                "the ranks do not hold the same values.",
                got=f"rank {other} differs from rank 0",
                why="values are saved once for all ranks; what differs goes into a tensor named by rank",
            )
    return sum(most for _, _, most in facts)


def _check_same_model_as_saved(there: CheckpointFiles, manifest: Manifest, *, mine: Snapshot) -> None:
    """Raises CheckpointError if `there` holds another model. Logs that it exists, or which values changed."""
    model = {n: SavedTensor.from_tensor(t) for n, t in mine.tensors.items() if n.startswith(MODEL_PREFIX)}
    if model != manifest.model_tensors:
        other = {name for name, _ in model.items() ^ manifest.model_tensors.items()}
        raise CheckpointError(
            f"{there} exists, and holds another model.",
            got=f"{count_text(len(other), 'tensor')} that differ or are in one alone: {min(other)} …",
            why="a checkpoint is never overwritten",
            fix="another directory for this run",
        )
    changed = sorted(name for name in mine.values if manifest.values.get(name) != mine.values[name])
    if changed:
        logger.warning("%s exists and is kept, although these values changed: %s", there, ", ".join(changed))
    else:
        logger.info("%s exists already", there)
