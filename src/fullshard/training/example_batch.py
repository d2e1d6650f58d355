"""An example microbatch of a run, for `describe`, before any data exists."""

from typing import Any

import torch
from torch import nn

from fullshard.data.build import build_data
from fullshard.models.examples import example_batch
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loss import loss_of, model_loss


def example(run: Run, model: nn.Module, *, rows: int) -> Any:
    """Returns one microbatch of `rows` rows, or None for plain tokens and labels.

    `describe` makes those itself. For data from Python, returns the first microbatch of step 0, because only
    the user knows its shapes.
    """
    if run.data.source == "python":
        alone = run.train.model_copy(update={"microbatch": rows, "global_batch": rows})
        plan = Plan.from_run(run.model_copy(update={"train": alone}), world_size=1)
        return next(iter(build_data(run).microbatches(0, rank=0, plan=plan)))
    if loss_of(run, model) is model_loss:
        return example_batch(model, run, rows=rows)
    if not run.data.document_mask:
        return None
    keys = ("tokens", "labels", "positions", "documents")
    return {
        key: torch.empty((rows, run.data.sequence_length), dtype=torch.int64, device="meta") for key in keys
    }
