"""Tasks of lm-evaluation-harness, computed by a sharded model.

[Note: all requests on every rank] lm_eval can divide the documents of a task over ranks. Then few-shot
examples depend on the number of ranks, and a rank without documents ends the evaluation. So lm_eval runs on
each rank with all documents, as in a single process, and the requests are divided here: every rank computes
its share, in the same number of forwards, and gets the results of all ranks.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fullshard.data.tokenizer import locate_tokenizer_file
from fullshard.distributed.agreement import all_gather_object, rank, run_on_rank_zero, world_size
from fullshard.errors import MissingExtraError, SpecError, TrainError
from fullshard.spec.plan import Plan
from fullshard.spec.settings.data_section import DataSection
from fullshard.spec.settings.evaluate_section import Evaluation
from fullshard.system.dotted import import_quietly
from fullshard.system.small_files import ForeignErrorTranslator
from fullshard.training.generate import generate, most_positions

T = TypeVar("T")
Tokens = list[int]
_SEED = 1234  # of few-shot examples, as in lm_eval's own command
_NEW_TOKENS = 256  # of an answer whose task sets no number, as in lm_eval
_NEW_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def make_task_function(settings: Evaluation, section: DataSection) -> Callable[[nn.Module, Plan], Any]:
    """Loads the tasks of an evaluation, with their documents, and the tokenizer.

    Returns a function that evaluates a sharded model, with equal metrics on all ranks. Raises
    MissingExtraError without lm_eval or transformers, SpecError for a task or a tokenizer that cannot be
    loaded.
    """
    key = f"evaluate.{settings.name}.task"
    names = (settings.task or "").removeprefix("lm_eval:").split(",")
    try:
        evaluator, tasks = import_quietly("lm_eval.evaluator"), import_quietly("lm_eval.tasks")
        transformers = import_quietly("transformers")
    except ImportError as error:
        raise MissingExtraError("lm_eval", package="lm_eval", needed_for=key) from error
    assert section.tokenizer is not None, "a task without a tokenizer is refused by the spec"
    directory, what = locate_tokenizer_file(section.tokenizer).parent, f"{key} cannot be loaded."
    with ForeignErrorTranslator(lambda got: SpecError(what, got=got, fix="a name from lm-eval ls tasks")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
        # Building the index of lm_eval's own tasks, thousands of files, takes seconds.
        manager = tasks.TaskManager(include_defaults=not all(Path(name).is_file() for name in names))
        loaded = manager.load(names)

    def evaluate(model: nn.Module, plan: Plan) -> Mapping[str, float]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(_SEED)  # tasks may draw from any of them, and all ranks the same
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)
        lm, limit = ShardedLanguageModel(model, plan, tokenizer), settings.sequences or None
        found = evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=0, log_samples=False)
        metrics = {
            f"{task}.{key}".removesuffix(",none").replace(",", "@"): float(value)
            for task, values in found["results"].items()
            for key, value in values.items()
            if "," in key and isinstance(value, int | float)
        }
        return run_on_rank_zero(lambda: metrics, doing="sending the results of the harness")

    return evaluate


@dataclass(frozen=True)
class ShardedLanguageModel:
    """A sharded model with the methods of lm_eval.api.model.LM, and the results of `lm_eval --model hf`.

    All ranks call each method with the same requests, whose `args` are as in lm_eval, and get all results.
    See [Note: all requests on every rank].

    tokenizer: as transformers loads it
    """

    model: nn.Module
    plan: Plan
    tokenizer: Any
    rank: int = 0
    world_size: int = 1

    @property
    def longest(self) -> int:
        """Most tokens of a sequence: the model's positions; without a limit, `data.sequence_length`."""
        return most_positions(self.model)[1] or self._trained_length

    @property
    def _trained_length(self) -> int:
        return self.plan.run.data.row_length

    @property
    def prefix_token(self) -> int:
        """The token in front of a text without context: BOS, or EOS if the tokenizer has no BOS."""
        begin = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if begin is None else begin

    def encode(self, text: str) -> Tokens:
        """Returns the tokens of `text`, with special tokens unless it begins with `prefix_token`."""
        begins = text.startswith(self.tokenizer.decode(self.prefix_token))
        return self.tokenizer.encode(text, add_special_tokens=not begins)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns (log-probability, whether all tokens are the most probable ones) of each continuation."""
        return self._score([self._split(*request.args) for request in requests])

    def _split(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """Returns the tokens of both, encoded together; blanks between them belong to the second."""
        if context.strip():
            first = self.encode(context.rstrip())
            return first, self.encode(context + continuation)[len(first) :]
        own = self.tokenizer.encode(context + continuation, add_special_tokens=False)
        return (own[:1], own[1:]) if own[:1] == [self.prefix_token] else ([self.prefix_token], own)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-probability of each text, in windows of at most `data.sequence_length` tokens."""
        length, counts = min(self.longest, self._trained_length), list[int]()
        windows = list[tuple[Tokens, Tokens]]()
        for tokens in (self.encode(request.args[0]) for request in requests):
            starts = range(0, len(tokens), length)
            for at in starts:
                own = tokens[at : at + length]
                windows.append((tokens[at + len(own) - length - 1 : at] if at else [self.prefix_token], own))
            counts.append(len(starts))
        scores = iter(self._score(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the greedy answer to each prompt, cut at each of the texts in `until`.

        Raises TrainError for a task that samples answers, and as `generate` does.
        """
        numbers = dict[int, list[int]]()
        for number, (_, options) in enumerate(request.args for request in requests):
            if options.get("do_sample") or options.get("temperature"):
                got = f"generation_kwargs = {options}"
                raise TrainError("a task samples its answers; only greedy generation is supported.", got=got)
            most = next((options[key] for key in _NEW_TOKENS_KEYS if key in options), _NEW_TOKENS)
            numbers.setdefault(int(most), []).append(number)
        answers, end = dict[int, str](), self.tokenizer.eos_token_id
        for most, same in numbers.items():
            own = same[rank() :: world_size()]
            prompts = [self.encode(requests[one].args[0])[-max(self.longest - most, 1) :] for one in own]
            found = generate(self.model, prompts, plan=self.plan, max_new_tokens=most, end_token=end)
            for number, tokens in zip(own, found, strict=True):
                text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
                until = requests[number].args[1].get("until") or []
                for stop in [until] if isinstance(until, str) else until:
                    text = text.split(stop)[0] if stop else text
                answers[number] = text
        return _gather_in_order(answers)

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Scores continuations of contexts. Of both together, the last `longest` + 1 tokens are used."""
        if (most := max((len(own) for _, own in pairs), default=0)) > self.longest:
            got = f"{most} tokens, of at most {self.longest}"
            raise TrainError("a continuation does not fit into the model.", got=got)
        numbers = dict[tuple[int, ...], list[int]]()  # one-token answers to a context share their input
        for number, (context, own) in enumerate(pairs):
            numbers.setdefault(tuple((context + own)[-self.longest - 1 : -1]), []).append(number)
        inputs, scores, at = sorted(numbers, key=len, reverse=True), dict[int, tuple[float, bool]](), 0
        # The plan has memory for the logits of one loss chunk, or without chunks of one microbatch.
        chunk = self.plan.run.train.loss_chunk
        room = chunk if isinstance(chunk, int) and chunk else self.plan.microbatch * self._trained_length
        device = next(self.model.parameters()).device
        while at < len(inputs):
            longest = len(inputs[at])
            share = inputs[at : at + max(1, room // longest) * world_size()]
            rows = share[rank() :: world_size()]
            # All ranks gather units together, so a rank without rows computes another rank's.
            padded = [[*row, *[0] * (longest - len(row))] for row in rows or share[-1:]]
            output: Any = self.model(torch.tensor(padded, device=device))
            for row, logits in zip(rows, getattr(output, "logits", output), strict=False):
                for number in numbers[row]:
                    scores[number] = _score_end(logits[: len(row)], pairs[number][1])
            at += len(share)
        return _gather_in_order(scores)


def _score_end(logits: Tensor, continuation: Tokens) -> tuple[float, bool]:
    """Scores a continuation by the logits (length, vocabulary) of all tokens before its last one."""
    ends = torch.tensor(continuation, dtype=torch.int64, device=logits.device)
    own = logits[len(logits) - len(ends) :].float()
    total = own.log_softmax(-1).gather(-1, ends[:, None]).sum()
    return total.item(), bool((own.argmax(-1) == ends).all())


def _gather_in_order(own: Mapping[int, T]) -> list[T]:
    """Returns the results of all ranks by their numbers. Collective."""
    found = {number: one for part in all_gather_object(own) for number, one in part.items()}
    return [found[number] for number in range(len(found))]
