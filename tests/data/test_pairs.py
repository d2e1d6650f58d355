"""Pairs for losses of preferences: from every form of record, whole, labelled on answers alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.data.build import build_data
from fullshard.data.packed import PackedData
from fullshard.errors import DataError, FullshardError, SpecError
from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import choose_loss
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


TEXT = {"records": "completion", "completion_field": "chosen"}
CHATS = {"records": "messages", "completion_field": "chosen"}
FORMS = {
    "text": (text_row, TEXT),
    "whole text": (whole_text_row, {"records": "completion", "prompt_field": "chosen"}),
    "chat": (chat_row, {**CHATS, "messages_field": "prompt"}),
    "whole chat": (whole_chat_row, {"records": "messages", "messages_field": "chosen"}),
    "axolotl": (axolotl_row, CHATS),
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
        ({"train_on": "all"}, 'needs train_on = "completion"'),
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
