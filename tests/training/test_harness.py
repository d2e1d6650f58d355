"""Tasks of lm-evaluation-harness: scores and answers of sharded models are those of unsharded ones."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import SpecError, TrainError
from fullshard.models.build import build_model
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.evaluate import metrics_of_function
from fullshard.training.harness import ShardedLanguageModel, make_task_function
from fullshard.training.shard import shard
from tests.data.samples import save_metaspace_tokenizer, save_tokenizer, write_json_lines
from tests.training.test_generate import continue_unsharded

POSITIONS = 64
TEXT = "the cat sat on a mat and saw the dog run far away from the cat and the dog"


def requests_of(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


# Answers of one and of several tokens, no context, a blank at its end, a text that is too long.
CHOICES = requests_of(
    *(("the cat sat", one) for one in (" on", " dog", " on a mat")),
    *(("", "the dog"), ("the dog ", "run"), (f"{TEXT} {TEXT} {TEXT} {TEXT}", " far away")),
    ("dog", " run"),
)
ROLLING = requests_of((TEXT,), ("the",), (f"{TEXT} {TEXT}",))
UNTIL = requests_of(
    *((text, {"until": ["a"], "max_gen_toks": 6}) for text in ("the cat", f"{TEXT} {TEXT} {TEXT}", "dog")),
    ("the cat", {"until": [], "max_gen_toks": 3}),
)


def run_of(directory: str, *settings: str) -> Run:
    return Run.load(
        overrides=[
            *("sharding.strategy=full_shard", "precision.mode=fp32", "data.sequence_length=8"),
            *("train.microbatch=2", "train.global_batch=12", f"data.tokenizer={directory}", *settings),
        ]
    )


def decoder_run(directory: str) -> Run:
    sizes = ("model.layers=2", "model.d_model=16", "model.heads=2", "model.d_ff=24", "model.vocabulary=300")
    return run_of(directory, *sizes, f"model.max_sequence={POSITIONS}")


def plain_and_sharded(run: Run) -> tuple[nn.Module, ShardedLanguageModel]:
    """A model, and the same sharded, as lm_eval gets it."""
    from transformers import AutoTokenizer

    plan = Plan.from_run(run, world_size=dist.get_world_size())
    plain = materialize(build_model(run), seed=run.run.seed).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.data.tokenizer)
    return plain, ShardedLanguageModel(shard(build_model(run), plan), plan, tokenizer)


@torch.no_grad()
def score_unsharded(plain: nn.Module, context: list[int], own: list[int]) -> tuple[float, bool]:
    row = torch.tensor((context + own)[-POSITIONS - 1 :])
    logits = plain(row[None, :-1])[0, -len(own) :]
    total = logits.log_softmax(-1)[range(len(own)), row[-len(own) :]].sum()
    return total.item(), bool((logits.argmax(-1) == row[-len(own) :]).all())


def results_and_expected(directory: str) -> list[tuple[Any, Any]]:
    """(result of the sharded decoder, of the unsharded one) of scores, texts and answers."""
    plain, model = plain_and_sharded(decoder_run(directory))
    encode, end = model.tokenizer.encode, model.tokenizer.eos_token_id
    pairs = [(encode(a.rstrip()) or [end], encode(a + b)) for a, b in (request.args for request in CHOICES)]
    pairs = [(a, whole[len(a) if a != [end] else 0 :]) for a, whole in pairs]
    texts = [(([end], encode(request.args[0]))) for request in ROLLING[1:2]]
    answers = list[str]()
    for text, options in (request.args for request in UNTIL):
        most = options["max_gen_toks"]
        tokens = continue_unsharded(plain, encode(text)[-(POSITIONS - most) :], most)
        answers.append(model.tokenizer.decode(tokens, skip_special_tokens=True))
    stop = max(answers, key=len)[1:2]
    assert stop
    stopped = requests_of(*((text, {**options, "until": stop}) for text, options in (r.args for r in UNTIL)))
    return [
        (model.loglikelihood(CHOICES), [score_unsharded(plain, *pair) for pair in pairs]),
        (model.loglikelihood_rolling(ROLLING[1:2]), [score_unsharded(plain, *pair)[0] for pair in texts]),
        (model.generate_until(stopped), [one.split(stop)[0] for one in answers]),
    ]


@pytest.mark.parametrize("count", [2, 3])
def test_scores_and_answers_are_those_of_the_unsharded_model(ranks: Any, tmp_path: Path, count: int) -> None:
    first, *others = ranks(count).run(results_and_expected, save_tokenizer(tmp_path))
    (scores, expected), (rolling, texts), (answers, own) = first
    assert scores == [(pytest.approx(total, abs=1e-4), is_greedy) for total, is_greedy in expected]
    assert rolling == pytest.approx(texts, abs=1e-4)
    assert answers == own
    assert all(one[0] == two[0] for other in others for one, two in zip(other, first, strict=True))


def llama_run(directory: str) -> Run:
    return run_of(directory, f"model.hf={directory}")


def save_llama(directory: Path) -> nn.Module:
    """Saves a config of a model with 64 positions, and returns the model that its sharded ones begin with."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    own = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": POSITIONS}
    LlamaConfig(**sizes, **heads, **own).save_pretrained(directory)
    run = llama_run(save_metaspace_tokenizer(directory))
    return materialize(build_model(run), seed=run.run.seed).eval()


def results_of_requests(directory: str) -> tuple[Any, ...]:
    _, model = plain_and_sharded(llama_run(directory))
    return model.loglikelihood(CHOICES), model.loglikelihood_rolling(ROLLING), model.generate_until(UNTIL)


def test_results_are_those_of_lm_evals_own_model(ranks: Any, tmp_path: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    plain, kwargs = save_llama(tmp_path), {"device": "cpu", "batch_size": 1, "tokenizer": str(tmp_path)}
    whole = huggingface.HFLM(pretrained=plain, **kwargs)
    windows = huggingface.HFLM(pretrained=plain, max_length=8, **kwargs)
    expected, rolling = whole.loglikelihood(CHOICES), windows.loglikelihood_rolling(ROLLING)
    for scores, *others in ranks(3).run(results_of_requests, str(tmp_path)):
        assert scores == [(pytest.approx(total, abs=1e-3), is_greedy) for total, is_greedy in expected]
        assert others == [pytest.approx(rolling, abs=1e-3), whole.generate_until(UNTIL)]


def save_tasks(directory: Path, *, documents: int) -> str:
    """Three tasks over one local file, of each kind of request. Returns the setting `task`."""
    words = TEXT.split()
    rows = (
        {"text": " ".join(words[i : i + 9 - i]), "end": words[i], "label": i % 2} for i in range(documents)
    )
    file = write_json_lines(directory / "rows.jsonl", rows)
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}}, "test_split": "test"}
    common |= {"doc_to_text": "{{text}}", "num_fewshot": 1, "fewshot_split": "test"}
    generated = {"generation_kwargs": {"until": ["e"], "max_gen_toks": 4}, "doc_to_target": "{{end}}"}
    choice = {"doc_to_choice": [" cat", " dog"], "doc_to_target": "label"}
    kinds = {
        "choice": {"output_type": "multiple_choice", **choice, "metric_list": [{"metric": "acc"}]},
        "answer": {"output_type": "generate_until", **generated, "metric_list": [{"metric": "exact_match"}]},
        "text": {
            **{"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "num_fewshot": 0},
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }
    for name, own in kinds.items():
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))
    return "lm_eval:" + ",".join(str(directory / f"{name}.yaml") for name in kinds)


METRICS = [
    ("choice", "acc"),
    ("answer", "exact_match"),
    ("text", "word_perplexity"),
    ("text", "bits_per_byte"),
]


def metrics_of_tasks(directory: str, task: str, documents: int) -> list[dict[str, float]]:
    """The metrics of two evaluations by one function."""
    evaluate = f'evaluate=[{{name="tasks", task="{task}", sequences={documents}}}]'
    run = llama_run(directory).with_overrides([evaluate, f"data.sequence_length={POSITIONS}"])
    _, model = plain_and_sharded(run)
    function = make_task_function(run.evaluate[0], run.data)
    return [metrics_of_function(function, model.model, plan=model.plan, name="tasks") for _ in range(2)]


def test_metrics_are_equal_on_any_number_of_ranks_and_those_of_lm_eval(ranks: Any, tmp_path: Path) -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator")
    tasks, huggingface = import_module("lm_eval.tasks"), import_module("lm_eval.models.huggingface")
    plain, task = save_llama(tmp_path), save_tasks(tmp_path, documents=5)
    own = metrics_of_tasks, str(tmp_path), task, 2
    first, *others = [one for count in (1, 3) for metrics in ranks(count).run(*own) for one in metrics]
    assert all(one == pytest.approx(first) for one in others)
    model = huggingface.HFLM(pretrained=plain, tokenizer=str(tmp_path), device="cpu")
    names, manager = task.removeprefix("lm_eval:").split(","), tasks.TaskManager(include_defaults=False)
    expected = evaluator.simple_evaluate(model, tasks=names, task_manager=manager, limit=2, bootstrap_iters=0)
    assert first == pytest.approx(
        {f"{name}.{metric}": expected["results"][name][f"{metric},none"] for name, metric in METRICS},
        rel=1e-3,
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("lm_eval:DIRECTORY/choice.yaml", "rows.jsonl"),
        pytest.param("lm_eval:helaswag", "helaswag", marks=pytest.mark.long),
    ],
)
def test_a_task_that_cannot_be_loaded_is_refused(task: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    save_tasks(tmp_path, documents=1)
    (tmp_path / "rows.jsonl").unlink()
    task = task.replace("DIRECTORY", str(tmp_path))
    run = run_of(save_tokenizer(tmp_path), f'evaluate=[{{name="a", task="{task}"}}]')
    with pytest.raises(SpecError, match=message):
        make_task_function(run.evaluate[0], run.data)


def errors_of_requests(directory: str) -> list[str]:
    _, model = plain_and_sharded(decoder_run(directory))
    long, found = " the" * (POSITIONS + 1), list[str]()
    for method, request in (
        (model.generate_until, ("the", {"do_sample": True})),
        (model.loglikelihood, ("the", long)),
    ):
        with pytest.raises(TrainError) as raised:
            method(requests_of(request))
        found.append(str(raised.value))
    return found


def test_what_cannot_be_computed_is_refused_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    for sampled, long in ranks(2).run(errors_of_requests, save_tokenizer(tmp_path)):
        assert "only greedy generation" in sampled
        assert f"tokens, of at most {POSITIONS}" in long
