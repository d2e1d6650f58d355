"""Checks of a run's data: tokens, labels, duplicates, order."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.data.batches import TrainingData
from fullshard.data.build import build_data
from fullshard.data.tokenizer import TOKENIZER_FILE
from fullshard.distributed.agreement import ErrorCapture
from fullshard.errors import FullshardError
from fullshard.jobs.checks.model_trial import make_eager_fp32_cpu_run
from fullshard.jobs.evaluations import build_evaluations
from fullshard.models.build import count_vocabulary_rows
from fullshard.quantities import count_text
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from fullshard.spec.settings.data_section import IGNORED_LABEL
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.torch_private.tensors import tree_leaves

# A global batch of 12 can be shared out over 1, 2 and 3 ranks in microbatches of 2.
_ROWS, _MICROBATCH, _RANKS, _STEPS = 12, 2, (1, 2, 3), 8
_MOST_MASKED, _MOST_EMPTY_ROWS, _MOST_REPEATED = 0.95, 0.1, 0.05
_MOST_RANKS = 8
_TOKENIZING_SECONDS = 20.0


class _TokenizingTakesLong(Exception):
    """Raised to stop tokenizing data that is not in the cache."""


@dataclass(frozen=True)
class DataTrial:
    """The data of a run, read in small global batches.

    data: the data as the run has it
    run: the run with a global batch that 1, 2 and 3 ranks can share
    ranks: number of data ranks of the run, at most 8
    vocabulary: number of rows of the model's embedding; None if unknown
    """

    data: TrainingData
    run: Run
    ranks: int
    vocabulary: int | None

    def microbatches(self, step: int, *, ranks: int) -> Iterator[tuple[int, Any]]:
        """Yields (rank, microbatch) of one step on this number of ranks."""
        plan = Plan.from_run(self.run, world_size=ranks)
        for rank in range(ranks):
            for batch in self.data.microbatches(step, rank=rank, plan=plan):
                yield rank, batch

    def token_batches(self) -> list[dict[str, Tensor]]:
        """Returns the microbatches of the first steps; [] if they are not `tokens` and `labels`."""
        found = [batch for step in range(_STEPS) for _, batch in self.microbatches(step, ranks=1)]
        has_tokens = all(isinstance(b, Mapping) and isinstance(b.get("tokens"), Tensor) for b in found)
        return cast(list[dict[str, Tensor]], found) if has_tokens else []


def build_data_trial(plan: Plan) -> DataTrial | Finding:
    """Returns a trial of the run's data, or the finding that says why it has no data to try.

    Data that is not in the cache is tokenized for 20 s at most.
    """
    stop_when_late = _make_deadline()
    run, attempt = make_eager_fp32_cpu_run(plan.run, rows=_ROWS, microbatch=_MICROBATCH), ErrorCapture()
    with attempt:
        data = build_data(run, alive=stop_when_late)
        ranks = min(plan.data_parallel_degree, _MOST_RANKS)
        trial = DataTrial(data, run, ranks, count_vocabulary_rows(None, run))
        for _ in trial.microbatches(0, ranks=1):
            break
        return trial
    if isinstance(attempt.error, _TokenizingTakesLong):
        return Finding.skipped(
            f"tokenizing takes over {_TOKENIZING_SECONDS:g} s: fullshard data prepare, first"
        )
    error = attempt.error
    assert error is not None, "the block returns unless it raises"
    if isinstance(error, FullshardError):
        return Finding.from_error(error)
    return Finding.failure(
        f"reading it raises {type(error).__name__}: {error}", why="no step can be trained", fix=None
    )


def _make_deadline() -> Callable[[], None]:
    """Returns a function that raises _TokenizingTakesLong if it is called after 20 s."""
    deadline = time.monotonic() + _TOKENIZING_SECONDS

    def stop_when_late() -> None:
        if time.monotonic() > deadline:
            raise _TokenizingTakesLong

    return stop_when_late


def check_evaluations(trial: DataTrial) -> Finding:
    """Prepares the data, functions and tasks of [[evaluate]], and checks `checkpoint.keep_best`."""
    attempt, names = ErrorCapture(), ", ".join(one.name for one in trial.run.evaluations)
    with attempt:
        build_evaluations(trial.run, trial.data, alive=_make_deadline())
    if isinstance(attempt.error, _TokenizingTakesLong):
        return Finding.skipped(f"tokenizing takes over {_TOKENIZING_SECONDS:g} s")
    if isinstance(attempt.error, FullshardError):
        return Finding.from_error(attempt.error)
    attempt.raise_captured()
    return Finding.ok(f"evaluations: {names}") if names else Finding.skipped("the run has no evaluation")


def check_vocabulary_range(trial: DataTrial) -> Finding:
    """Compares the tokens and labels of the first steps with the model's tokenizer and embedding."""
    model, section = trial.run.model, trial.run.data
    are_bytes = section.tokenizer is None and section.token_makers == {"tokenizer"}
    if isinstance(model, HuggingFaceModel) and are_bytes:
        file = locate_config_file(model.hf).with_name(TOKENIZER_FILE)
        if file.is_file():
            return Finding.failure(
                f"the tokens are bytes, and the model has a tokenizer: {file}",
                why="its weights know other tokens",
                fix=f"data.tokenizer = {str(file.parent)!r}, with data.source and data.paths",
            )
    batches = trial.token_batches()
    if not batches or trial.vocabulary is None:
        return Finding.skipped(
            "batches are not tokens" if not batches else "the model's vocabulary is not known"
        )
    tensors = [one for batch in batches for one in (batch["tokens"], batch.get("labels")) if one is not None]
    valid = [one[one != IGNORED_LABEL] for one in tensors]
    largest, least = (
        int(f(torch.stack([f(one) for one in valid if one.numel()]))) for f in (torch.max, torch.min)
    )
    if largest >= trial.vocabulary or least < 0:
        return Finding.failure(
            f"tokens from {least} to {largest}, and a vocabulary of {trial.vocabulary}",
            why="the embedding has no row for them: an error on the CPU, and any values on a GPU",
            fix="the model's own tokenizer, or a larger vocabulary",
        )
    return Finding.ok(f"tokens from {least} to {largest} of {trial.vocabulary}")


def check_labels(trial: DataTrial) -> Finding:
    """Counts labels that are masked, rows without any label, and labels that are not the next token."""
    batches = [one for one in trial.token_batches() if isinstance(one.get("labels"), Tensor)]
    if not batches:
        return Finding.skipped("batches are not tokens with labels")
    tokens, labels = (torch.cat([one[name] for one in batches]) for name in ("tokens", "labels"))
    counted = labels != IGNORED_LABEL
    masked = 1 - float(counted.float().mean())
    empty = float((counted.flatten(1).sum(1) == 0).float().mean())
    if masked == 1:
        return Finding.failure(
            "no label of the first steps counts",
            why="every step would be skipped",
            fix='data.train_on = "all"',
        )
    if tokens.shape == labels.shape and tokens.ndim == 2:
        same = float((tokens == labels)[counted].float().mean())
        inner = counted[:, :-1]
        following = float((tokens[:, 1:] == labels[:, :-1])[inner].float().mean()) if inner.any() else 1.0
        if same > 0.5 > following:
            return Finding.failure(
                f"{same:.0%} of the labels are the tokens at their own places",
                why="the model learns to repeat its input; fullshard's loss does not shift labels",
                fix="labels that are the next tokens: labels[:, :-1] = tokens[:, 1:]",
            )
        if following < 0.5 and trial.run.data.source == "python":
            return Finding.warning(
                f"{following:.0%} of the labels are the next tokens",
                why="labels are usually the tokens shifted by one",
                fix="labels[:, :-1] = tokens[:, 1:], unless other labels are meant",
            )
    if masked > _MOST_MASKED or empty > _MOST_EMPTY_ROWS:
        return Finding.warning(
            f"{masked:.1%} of the labels are masked, and {empty:.1%} of the rows have none",
            why="their tokens cost time, and train nothing",
            fix='a longer data.sequence_length, data.packing = "best_fit", or another data.train_on',
        )
    return Finding.ok(f"{masked:.1%} of the labels are masked, {empty:.1%} of the rows have none")


def check_duplicates(trial: DataTrial) -> Finding:
    """Hashes rows of the first steps: ranks must not get the same, and few rows may repeat."""
    by_rank: dict[int, list[bytes]] = {}
    run = make_eager_fp32_cpu_run(trial.run, rows=_MICROBATCH * trial.ranks, microbatch=_MICROBATCH)
    own = DataTrial(trial.data, run, trial.ranks, trial.vocabulary)
    total = trial.data.training_sequences or 10**9
    steps = max(1, min(_STEPS, total // (_MICROBATCH * trial.ranks)))
    for step in range(steps):
        for rank, batch in own.microbatches(step, ranks=trial.ranks):
            by_rank.setdefault(rank, []).extend(row_digests(batch))
    rows = [digest for found in by_rank.values() for digest in found]
    shared = [rank for rank, found in by_rank.items() if rank and found == by_rank[0]]
    if shared:
        return Finding.failure(
            f"ranks 0 and {shared[0]} get the same rows in the first {count_text(steps, 'step')}",
            why="the step trains on fewer sequences than train.global_batch, and more ranks change nothing",
            fix="rows chosen by `rank` in microbatches(step, rank=..., plan=...)",
        )
    repeated = 1 - len(set(rows)) / max(1, len(rows))
    if repeated > _MOST_REPEATED:
        return Finding.warning(
            f"{repeated:.0%} of {len(rows)} rows in the first {count_text(steps, 'step')} are repeated",
            why="repeated rows are learnt by heart, and hide how well others are predicted",
            fix="data without duplicates, or microbatches that depend on `step`",
        )
    found = f"{len(rows)} rows in {count_text(steps, 'step')} on {count_text(trial.ranks, 'rank')}"
    return Finding.ok(f"{found}, {repeated:.1%} repeated")


def check_order(trial: DataTrial) -> Finding:
    """Compares the rows of a step on 1, 2 and 3 ranks, and those of a step that is read again."""
    first = _row_digests_of_step(trial, step=1, ranks=1)
    if _row_digests_of_step(trial, step=1, ranks=1) != first:
        return Finding.warning(
            "step 2 has other rows when it is read again",
            why="a resumed run, and one that rolls back, does not see the data of an undisturbed run",
            fix="rows that depend only on the seed and on `step`, not on what was read before",
        )
    others = [
        ranks
        for ranks in _RANKS[1:]
        if sorted(_row_digests_of_step(trial, step=1, ranks=ranks)) != sorted(first)
    ]
    if others:
        return Finding.warning(
            f"step 2 has other rows on {others[0]} ranks than on one",
            why="a run that resumes on other ranks skips some rows, and sees others twice",
            fix="the rows of all ranks together must be samples step × global_batch and following",
        )
    return Finding.ok("a step has the same rows on 1, 2 and 3 ranks, and when it is read again")


def _row_digests_of_step(trial: DataTrial, *, step: int, ranks: int) -> list[bytes]:
    return [digest for _, batch in trial.microbatches(step, ranks=ranks) for digest in row_digests(batch)]


def row_digests(batch: Any) -> list[bytes]:
    """Returns a digest of each row of a microbatch; of all its tensors if they have no common first dim."""
    tensors = [one for one in tree_leaves(batch) if isinstance(one, Tensor)]
    # How many ends of documents a batch has depends on its other rows.
    if isinstance(batch, Mapping):
        tensors = [one for name, one in batch.items() if isinstance(one, Tensor) and name != "document_ends"]
    if not tensors:
        return []
    if any(one.ndim == 0 or len(one) != len(tensors[0]) for one in tensors):
        return [_digest(tensors)]
    return [_digest([one[i] for one in tensors]) for i in range(len(tensors[0]))]


def _digest(tensors: list[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
