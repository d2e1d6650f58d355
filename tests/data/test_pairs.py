"""Pairs for losses of preferences: from every form of record, whole, labelled on answers alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.dpo import preference_loss
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.data.build import build_data
from fullshard.data.packed import PackedData
from fullshard.errors import DataError, FullshardError, PlanError, SpecError
from fullshard.models.build import check_sequence_length, decoder_flops_per_token
from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import choose_loss
from fullshard.planner.search.parallel_degrees import iterate_tensor_degrees
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.data.samples import CHAT, END, decoded, plan_of, run_of, save_tokenizer, write_json_lines

SIZE = 128  # of a half


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def texts(i: int) -> tuple[str, str, str]:
    return f"the cat {i} sat", f" on a mat {i}", f" far away from the dog {i}"


def text_row(i: int) -> dict[str, Any]:
    return dict(zip(("prompt", "chosen", "rejected"), texts(i), strict=True))


def whole_text_row(i: int) -> dict[str, Any]:
    prompt, chosen, rejected = texts(i)
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}


def chat_row(i: int) -> dict[str, Any]:
    prompt, chosen, rejected = texts(i)
    earlier = [user("run"), answer("far"), user(prompt)]
    return {"prompt": earlier, "chosen": [answer(chosen)], "rejected": [answer(rejected)]}


def whole_chat_row(i: int) -> dict[str, Any]:
    row = chat_row(i)
    return {name: row["prompt"] + row[name] for name in ("chosen", "rejected")} | {"prompt": texts(i)[0]}


def axolotl_row(i: int) -> dict[str, Any]:
    row = chat_row(i)
    return {"messages": row["prompt"], "chosen": row["chosen"][0], "rejected": row["rejected"][0]}


def plain_answers_row(i: int) -> dict[str, Any]:
    return {"prompt": chat_row(i)["prompt"], "chosen": texts(i)[1], "rejected": texts(i)[2]}


def json_row(i: int) -> dict[str, Any]:
    return {name: json.dumps(value) for name, value in chat_row(i).items()}


def whole_json_row(i: int) -> dict[str, Any]:
    return {name: json.dumps(whole_chat_row(i)[name]) for name in ("chosen", "rejected")}


TEXT = {"records": "completion", "completion_field": "chosen"}
CHATS = {"records": "messages", "completion_field": "chosen"}
FORMS = {
    "text": (text_row, TEXT),
    "whole text": (whole_text_row, {"records": "completion", "prompt_field": "chosen"}),
    "chat": (chat_row, {**CHATS, "messages_field": "prompt"}),
    "whole chat": (whole_chat_row, {"records": "messages", "messages_field": "chosen"}),
    "axolotl": (axolotl_row, CHATS),
    "plain answers": (plain_answers_row, {**CHATS, "messages_field": "prompt"}),
    "JSON": (json_row, {**CHATS, "messages_field": "prompt"}),
    "whole JSON": (whole_json_row, {"records": "messages", "messages_field": "chosen"}),
}


def data_of(tmp_path: Path, form: str, *, count: int = 12, rows: Any = None, **data: object) -> PackedData:
    make, settings = FORMS[form]
    path = write_json_lines(tmp_path / "pairs.jsonl", rows or map(make, range(count)))
    own: dict[str, object] = {
        **{"source": "jsonl", "paths": [path], "rejected_field": "rejected", "train_on": "completion"},
        **{"tokenizer": save_tokenizer(tmp_path / "tokenizer", template=CHAT), "sequence_length": 2 * SIZE},
        **{"validation_fraction": 0.0, "processes": 1, **settings, **data},
    }
    found = build_data(run_of(tmp_path / "cache", **own))
    assert isinstance(found, PackedData)
    return found


def rows_of(
    data: PackedData, *, world: int = 1, microbatch: int = 4, step: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of the 12 rows of a step, by all ranks."""
    plan = plan_of(world, microbatch, 12 // (world * microbatch))
    batches = [list(data.microbatches(step, rank=rank, plan=plan)) for rank in range(world)]
    in_order = [batches[rank][turn] for turn in range(plan.accumulation) for rank in range(world)]
    return [pair for one in in_order for pair in zip(one["tokens"], one["labels"], strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_both_answers_behind_the_prompt_and_labels_on_answers(
    form: str, tmp_path: Path
) -> None:
    data, found = data_of(tmp_path, form), set[int]()
    path = str(tmp_path / "tokenizer")
    for tokens, labels in rows_of(data):
        halves, number = list(zip(tokens.view(2, -1), labels.view(2, -1), strict=True)), -1
        for (own, wanted), name in zip(halves, (1, 2), strict=True):
            text = decoded(path, own)
            number = int(text.split("the cat ")[1].split()[0])
            assert decoded(path, wanted[wanted != -100]).rstrip() == texts(number)[name] + END
            at = (wanted != -100).nonzero()[:, 0]
            assert torch.equal(wanted[at[:-1]], own[at[:-1] + 1])
            assert texts(number)[0] in decoded(path, own[: at[0] + 1])
        found.add(number)
    assert found == {*range(12)}


def test_pairs_stay_whole_on_any_ranks_and_are_held_out_whole(tmp_path: Path) -> None:
    data = data_of(tmp_path, "text", count=40, validation_fraction=0.2)
    assert (data.document_count, data.training_sequences) == (40, 32)
    assert "pairs.jsonl: 40 pairs in all, " in data.describe()
    expected = rows_of(data, step=2)
    for world, microbatch in ((1, 2), (2, 3), (3, 1)):
        found = rows_of(data, world=world, microbatch=microbatch, step=2)
        assert torch.equal(*(torch.stack([torch.stack(pair) for pair in one]) for one in (found, expected)))
    plan = plan_of(1, 12)
    late = next(iter(data.microbatches_at_row(31, rank=0, plan=plan)))["tokens"]
    steps = torch.stack([tokens for step in range(4) for tokens, _ in rows_of(data, step=step)])
    assert torch.equal(late, steps[31:43])
    (held,) = data.validation(rank=0, plan=plan_of(1, 8, validate_sequences=0))
    for tokens in (*steps, *held["tokens"]):
        prompts = {decoded(str(tmp_path / "tokenizer"), half).split(" sat")[0] for half in tokens.view(2, -1)}
        assert len(prompts) == 1


def test_a_pair_with_a_record_at_fault_is_left_out_whole(tmp_path: Path) -> None:
    rows = [chat_row(i) for i in range(12)]
    rows[3]["rejected"] = []
    rows[5]["rejected"] = [answer("")]
    rows[7] = {"prompt": rows[7]["prompt"], "chosen": rows[7]["chosen"]}
    rows[8]["rejected"] = rows[8]["chosen"]
    data = data_of(tmp_path, "chat", rows=rows, on_error="skip")
    assert (data.training_sequences, data.summary_values()["records left out"]) == (8, 4)
    with pytest.raises(DataError, match="not two different answers"):
        data_of(tmp_path, "chat", rows=rows)


@pytest.mark.parametrize("whole", [True, False])
def test_a_prompt_that_ends_with_the_chosen_answer_is_refused(whole: bool, tmp_path: Path) -> None:
    """UltraFeedback's `messages` are those of `chosen`."""
    row = chat_row(0)
    answers = {name: row["prompt"] + row[name] if whole else row[name] for name in ("chosen", "rejected")}
    with pytest.raises(DataError, match="'messages' ends with the answer of 'chosen'"):
        data_of(tmp_path, "axolotl", rows=[{"messages": row["prompt"] + row["chosen"], **answers}])


def test_answers_that_are_neither_messages_nor_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not two different answers"):
        data_of(tmp_path, "chat", rows=[{**chat_row(0), "chosen": 1, "rejected": 2}])


def test_a_pair_whose_halves_have_no_room_for_a_label_is_left_out(tmp_path: Path) -> None:
    rows = [text_row(i) for i in range(12)]
    rows[4]["prompt"] = "the cat " * SIZE
    data = data_of(tmp_path, "text", rows=rows)
    counts = (data.document_count, data.training_sequences, data.summary_values()["documents cut"])
    assert counts == (12, 11, 1)
    assert "1 pairs left out: an answer has no label" in data.describe()
    labels = torch.stack([wanted.view(2, -1) for _, wanted in rows_of(data)])
    assert (labels != -100).any(2).all()
    with pytest.raises(DataError, match="no pair has a label in both halves"):
        data_of(tmp_path, "text", rows=rows, sequence_length=4)


def test_of_a_few_pairs_one_is_held_out(tmp_path: Path) -> None:
    data = data_of(tmp_path, "text", count=3, validation_fraction=0.05)
    assert (data.training_sequences, data.summary_values()["validation sequences"]) == (2, 1)


def test_a_longer_document_loses_its_end(tmp_path: Path) -> None:
    data = data_of(tmp_path, "text", sequence_length=20)
    tokens, labels = rows_of(data)[0]
    whole = data_of(tmp_path, "text")
    uncut = [one for one, _ in rows_of(whole)]
    assert data.training_sequences == 12
    for half, wanted, place in zip(tokens.view(2, -1), labels.view(2, -1), (0, SIZE), strict=True):
        (same,) = [one for one in uncut if torch.equal(one[place : place + 10], half)]
        assert wanted[-1] == same[place + 10]
    assert data.summary_values()["documents cut"] > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_on": "all"}, 'needs train_on = "completion" or "assistant"'),
        ({"packing": "concat"}, "packing or set it"),
        ({"document_mask": True}, "leave out document_mask"),
        ({"sequence_length": 33}, "must be even"),
        ({"records": "text", "completion_field": "completion"}, "rejected_field is given, but it is for"),
    ],
)
def test_settings_that_do_not_go_with_pairs_are_refused(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FullshardError, match=message):
        data_of(tmp_path, "text", **changed)


def test_pairs_need_a_loss_that_compares_them(tmp_path: Path) -> None:
    settings = ["data.source=jsonl", "data.paths=['a']", "data.records=completion", "data.rejected_field=b"]
    run = Run.load(overrides=[*settings, "data.train_on=completion"])
    assert run.data.packing == "none"
    with torch.device("meta"), pytest.raises(SpecError, match="need a loss that compares them"):
        choose_loss(run, DecoderModel(run.decoder_config))
    with pytest.raises(SpecError, match="context_parallel must be 1"):
        run.with_overrides(["sharding.context_parallel=2"])


def pairs_run(*overrides: str) -> Run:
    settings = (
        "data.source=jsonl",
        "data.paths=['a']",
        "data.records=completion",
        "data.train_on=completion",
    )
    return Run.load(overrides=[*settings, "train.loss=examples.dpo:loss_with_adapters", *overrides])


def test_ranks_divide_the_halves_of_a_pair() -> None:
    run = pairs_run("data.rejected_field=b", "data.sequence_length=18", "sharding.tensor_parallel=2")
    with pytest.raises(PlanError, match=r"of 9 tokens cannot be divided over 2 ranks(?s:.*)16 or 20"):
        Plan.from_run(run, world_size=2)
    for length, degrees in ((18, []), (20, [2])):
        own = run.with_overrides(["sharding.tensor_parallel=auto", f"data.sequence_length={length}"])
        assert list(iterate_tensor_degrees(own, per_node=2)) == degrees


def test_the_flop_of_attention_are_those_of_halves() -> None:
    pairs = pairs_run("data.sequence_length=64", "data.rejected_field=b")
    with torch.device("meta"):
        model = DecoderModel(pairs.decoder_config)
    halves = pairs_run("data.sequence_length=32")
    assert decoder_flops_per_token(model, pairs) == decoder_flops_per_token(model, halves)


def test_a_pair_with_labels_in_one_half_does_not_count_in_the_loss_of_the_example() -> None:
    model = DecoderModel(Run.load(overrides=["model.layers=1"]).decoder_config)
    tokens = torch.arange(16).view(2, 8)
    labels = tokens.clone()
    labels[1, :4] = -100
    one = {"tokens": tokens[:1], "labels": labels[:1]}
    both = {"tokens": tokens, "labels": labels}
    expected, found = (preference_loss(model, batch, reference=model) for batch in (one, both))
    assert (found[0].item(), found[1].item()) == (expected[0].item(), 1)


def test_more_positions_are_suggested_for_halves() -> None:
    """A model of 8 positions takes pairs of 16 tokens."""
    run = pairs_run("data.rejected_field=b", "data.sequence_length=32")
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=8,
        max_position_embeddings=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with pytest.raises(
        SpecError, match=r"sequence_length = 16, or model.options.max_position_embeddings = 16"
    ):
        check_sequence_length(model, run)
