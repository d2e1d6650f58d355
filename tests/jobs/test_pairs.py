"""Runs on pairs: `fullshard train` with DPO against the model without its adapters, resumed exactly."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import write_json_lines
from tests.jobs.test_evaluations import lines_of, resume_run, train_run

SETTINGS = (
    *("data.source=jsonl", "data.records=completion", "data.completion_field=chosen"),
    *("data.rejected_field=rejected", "data.train_on=completion", "data.sequence_length=64"),
    *("adapter.rank=2", "train.loss=examples.dpo:loss_with_adapters", "train.global_batch=12"),
    *("data.validation_fraction=0.2", "train.validate_every=2", "train.validate_sequences=7"),
    *("optimizer.learning_rate=1e-2", "schedule.kind=constant", "schedule.warmup_steps=0"),
)


def test_a_run_on_pairs_resumes_exactly_on_other_ranks(ranks: Any, tmp_path: Path) -> None:
    rows = ({"prompt": f"{i} is ", "chosen": "even" * (i % 3 + 1), "rejected": "odd"} for i in range(50))
    data = (f"data.paths=['{write_json_lines(tmp_path / 'pairs.jsonl', rows)}']", f"data.cache={tmp_path}")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed, _ = ranks(2).run(train_run, str(whole), *SETTINGS, *data, "train.steps=4", "train.microbatch=2")
    assert "pairs.jsonl: 50 pairs in all, " in printed
    ranks(1).run(train_run, str(parts), *SETTINGS, *data, "train.steps=2", "train.microbatch=4")
    ranks(3).run(resume_run, str(parts), *SETTINGS, *data, "train.steps=4", "train.microbatch=1")
    expected, found = lines_of(whole), lines_of(parts)
    assert expected[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert expected[-1]["loss"] < 0.69
    for name in ("loss", "validation_loss"):
        figures = [[one[name] for one in lines if name in one] for lines in (expected, found)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)
