"""Greedy generation of tokens by a sharded model.

[Note: generation in step] Each forward of a sharded model gathers its units on all ranks together. So all
ranks generate equally many batches and equally many tokens: a rank that has finished continues, and what it
generates then is dropped. Others do not wait for it to end.

[Note: gathered once] A unit that is resharded behind each forward is sent again for each token. If the whole
model fits into free memory, units stay gathered from the first forward to the end of the generation.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.distributed.agreement import all_gather_object, all_ranks_have, largest_over_ranks, world_size
from fullshard.errors import TrainError
from fullshard.models.build import text_config
from fullshard.models.decoder import DecoderModel
from fullshard.spec.plan import Plan
from fullshard.torch_private.fsdp import gathered_bytes, keep_gathered_after_forward
from fullshard.training.between_steps import evaluation_mode

_FREE_SHARE = 0.7  # of free memory that the gathered model may take; the rest is for caches and activations


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    plan: Plan,
    max_new_tokens: int,
    end_token: int | None = None,
    batch: int = 8,
) -> list[list[int]]:
    """Returns the tokens that follow each prompt, of which each is the most probable one. Collective.

    prompts: tokens of this rank's prompts. Ranks may have different prompts, of different lengths, or none.
    max_new_tokens: most tokens per prompt, equal on all ranks
    end_token: token after which an answer ends, and which is its last; None generates `max_new_tokens`
    batch: most prompts that are generated at once; only those of one length are, so none is padded

    The tokens are those of the unsharded model. A model of transformers generates by its own `generate`,
    with its cache of keys and values; any other model computes all logits for each token. Modes, units and
    random number generators are afterwards as before. Raises TrainError for a plan that divides matmuls or
    sequences over ranks, and for prompts that are empty or too long.

    >>> answers = fs.generate(model, [[1, 2, 3], [4]], plan=plan, max_new_tokens=5)
    >>> [len(answer) for answer in answers]
    [5, 5]
    """
    own_error = _find_error(model, prompts, plan=plan, max_new_tokens=max_new_tokens)
    if failed := next((error for error in all_gather_object(own_error) if error is not None), None):
        raise failed
    groups = _group_by_length(prompts, batch)
    device, answers = next(model.parameters()).device, dict[int, list[int]]()
    keeps = all_ranks_have(gathered_bytes(model) <= _FREE_SHARE * _free_bytes(device))
    with evaluation_mode(model), keep_gathered_after_forward(model) if keeps else nullcontext():
        for turn in range(int(largest_over_ranks([len(groups)])[0])):
            # See [Note: generation in step].
            numbers = groups[turn] if turn < len(groups) else []
            rows = [list(prompts[number]) for number in numbers] or [[0]]
            tokens = torch.tensor(rows, dtype=torch.int64, device=device)
            found = _generate_greedily(
                model, tokens, count=max_new_tokens, end_token=end_token, is_idle=not numbers
            )
            for number, row in zip(numbers, found.tolist(), strict=False):
                answers[number] = row[: row.index(end_token) + 1] if end_token in row else row
    return [answers[number] for number in range(len(prompts))]


def _find_error(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, plan: Plan, max_new_tokens: int
) -> TrainError | None:
    """Returns why this rank cannot generate, or None."""
    degrees = {"tensor_parallel": plan.tensor_parallel, "context_parallel": plan.context_parallel}
    if divided := [f"sharding.{name} = {degree}" for name, degree in degrees.items() if degree > 1]:
        return TrainError(
            "a model whose sequences are divided over ranks does not generate.",
            got=", ".join(divided),
            why="it computes whole sequences, of a length that its ranks divide",
            fix="an evaluation by its loss: paths, in place of call",
        )
    longest = max(map(len, prompts), default=1)
    shortest, (name, most) = min(map(len, prompts), default=1), most_positions(model)
    if shortest < 1 or (most is not None and longest + max_new_tokens > most):
        return TrainError(
            "the model cannot continue these prompts.",
            got=f"prompts of {shortest} to {longest} tokens, and {max_new_tokens} new ones",
            why=f"a prompt has a token, and prompt and answer fit into the model's {name} = {most}",
            fix="shorter prompts, or a smaller max_new_tokens",
        )
    return None


def most_positions(model: nn.Module) -> tuple[str, int | None]:
    """Returns (field of the model's config, most tokens of a sequence; None if there is no limit)."""
    name = "max_sequence" if isinstance(model, DecoderModel) else "max_position_embeddings"
    most = getattr(text_config(model) or getattr(model, "config", None), name, None)
    return name, most if isinstance(most, int) else None


def _group_by_length(prompts: Sequence[Sequence[int]], batch: int) -> list[list[int]]:
    """Returns the numbers of prompts in groups of one length, each of at most `batch` prompts."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return [
        numbers[at : at + batch] for numbers in by_length.values() for at in range(0, len(numbers), batch)
    ]


def _generate_greedily(
    model: nn.Module, tokens: Tensor, *, count: int, end_token: int | None, is_idle: bool
) -> Tensor:
    """Returns at most `count` new tokens (rows, new) for `tokens` (rows, length).

    is_idle: whether the tokens are of no prompt, so that only the other ranks decide when to end
    """
    own: Any = model
    if hasattr(getattr(own, "config", None), "model_type") and hasattr(own, "generate"):
        found = own.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            num_beams=1,
            eos_token_id=end_token,
            pad_token_id=end_token or 0,
            synced_gpus=world_size() > 1,
            stopping_criteria=[_stop_at_once] if is_idle else None,
        )
        return found[:, tokens.shape[1] :]
    length, device = tokens.shape[1], tokens.device
    ended = torch.full((len(tokens),), is_idle, dtype=torch.bool, device=device)
    for _ in range(count):
        output = own(tokens)
        following = getattr(output, "logits", output)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
        ended |= following[:, 0] == end_token if end_token is not None else False
        if end_token is not None and all_ranks_have(bool(ended.all())):
            break
    return tokens[:, length:]


def _stop_at_once(tokens: Tensor, _scores: Any, **_: Any) -> Tensor:  # signature: transformers' criteria
    return tokens.new_ones(len(tokens), dtype=torch.bool)


def _free_bytes(device: torch.device) -> float:
    """Returns the free memory of this rank: of its device, or its share of the host's."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return 0.0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
