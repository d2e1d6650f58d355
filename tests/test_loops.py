"""The code of docs/loops-*.md runs as written, on two ranks, and resumes where it was interrupted."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

DOCS = Path(__file__).parents[1] / "docs"
# One recompute mode: each is traced by itself.
CPU = ["run.device=cpu", "precision.mode=fp32", "recompute.mode=none"]


def names_of(page: str) -> dict[str, Any]:
    """Returns the names that the page's Python blocks define."""
    blocks: list[str] = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {"__name__": page}
    exec(compile("\n".join(blocks), page, "exec"), names)  # the pages are ours
    return names


def run_pytorch(directory: str, steps: int) -> list[float]:
    return names_of("loops-pytorch.md")["train"](directory, steps, CPU)


def run_fabric(directory: str, steps: int) -> list[float]:
    return names_of("loops-fabric.md")["train"](directory, steps, 2, CPU)


class Counting(Dataset):
    """Rows that count upwards, some labels left out."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (i + torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": torch.where(torch.arange(16) < i % 5, -100, tokens)}


def run_trainer(directory: str, steps: int) -> list[float]:
    from transformers import LlamaConfig, TrainingArguments

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    args = TrainingArguments(
        output_dir=directory,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=2,
        save_steps=3,
        save_total_limit=3,
        use_cpu=True,
        report_to="none",
    )
    # An interrupted run: the schedule is that of all 6 steps, and the newest checkpoint is that of step 3.
    resume = steps == 6 and any(Path(directory).glob("step-*"))
    names = names_of("loops-trainer.md")
    if steps == 6:
        return names["main"](config, Counting(), args, resume)
    with names["fs"].process_group("cpu") as ranks:
        trainer = names["ShardedTrainer"](config, args, Counting(), ranks=ranks)
        losses = []
        for step in names["fs"].train(trainer.state, trainer.plan, loss=names["own_loss"]):
            losses.append(step.loss)
            if step.index == steps:
                trainer.save()
                return losses
    raise AssertionError("the run has more steps than that")


@pytest.mark.parametrize(
    "loop",
    [
        run_pytorch,
        pytest.param(run_trainer, marks=pytest.mark.long),
        pytest.param(run_fabric, marks=pytest.mark.long),
    ],
)
def test_interrupted_loop_resumes_exactly(loop: Any, ranks: Any, tmp_path: Path) -> None:
    if loop is run_fabric:
        pytest.importorskip("lightning_fabric")
    whole = ranks(2).run(loop, str(tmp_path / "whole"), 6)
    first = ranks(2).run(loop, str(tmp_path / "parts"), 3)
    second = ranks(2).run(loop, str(tmp_path / "parts"), 6)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert whole[0][-1] < whole[0][0], "it learns"


def run_context_parallel(degree: int) -> list[float]:
    return names_of("context-parallel.md")["train"](3, [*CPU, f"sharding.context_parallel={degree}"])


def test_loop_of_context_parallelism_has_losses_of_whole_sequences(ranks: Any) -> None:
    whole = ranks(2).run(run_context_parallel, 1)[0]
    assert ranks(2).run(run_context_parallel, 2) == [pytest.approx(whole, rel=1e-5)] * 2


def test_every_page_on_loops_is_run() -> None:
    tested = {"loops-pytorch.md", "loops-trainer.md", "loops-fabric.md"}
    assert {path.name for path in DOCS.glob("loops-*.md")} == tested
