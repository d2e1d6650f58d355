"""Seeds of random numbers: one decision for all ranks; and their states in checkpoints."""

import random
from typing import Any

import numpy as np
import torch

from fullshard.spec.plan import Plan
from fullshard.training.extra_state import (
    generator_states,
    saved_generator_states,
    seed_generators,
    set_generator_states,
)
from tests.training.runs import run_of


def draw() -> tuple[float, float, float]:
    return torch.rand([]).item(), random.random(), float(np.random.rand())


def draw_seeded() -> tuple[float, float, float]:
    seed_generators(Plan.from_run(run_of(), world_size=2))
    return draw()


def draw_after_resume_on_more_ranks() -> tuple[float, float, float]:
    """The checkpoint has the states of rank 0 alone."""
    seed_generators(Plan.from_run(run_of(), world_size=2))
    saved = {f"{name[:-1]}0": state for name, state in generator_states().items()}
    draw()
    read = {name: saved[name] for name in saved_generator_states(saved)}
    set_generator_states(read)
    return draw()


def test_random_numbers_of_the_host_are_the_same_on_all_ranks_also_on_more_than_were_saved(
    ranks: Any,
) -> None:
    drawn = ranks(2).run(draw_seeded)
    assert drawn[0] == drawn[1]
    assert ranks(2).run(draw_after_resume_on_more_ranks) == drawn
