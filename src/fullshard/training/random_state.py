"""The generators of random numbers that a model draws from: their seeds, and their states in checkpoints.

[Note: one decision for all ranks] Models draw on the host which blocks to run (layer drop): from torch's CPU
generator, Python's or NumPy's. These have the same seed on all ranks, because ranks that run different blocks
gather different weights together (see `distributed/unit_order.py`). A GPU's generator, for dropout, has its
own seed for each part of a batch. On CPU ranks, dropout draws from the CPU generator, so all ranks use the
same masks, for different rows.
"""

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fullshard.distributed.agreement import rank
from fullshard.spec.plan import Plan


def seed_generators(plan: Plan) -> None:
    """Seeds all generators of this rank. See [Note: one decision for all ranks]."""
    seed = plan.run.run.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed + plan.data_rank(rank()))


def generator_states() -> dict[str, Tensor]:
    """Returns the states of this rank's generators, by their names in checkpoints."""
    states = {"cpu": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{kind}.{rank()}": state for kind, state in states.items()}


def saved_generator_states(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns tensors to read the states from a checkpoint into that holds tensors by the names `saved`.

    A rank that had no states when the checkpoint was written takes those of rank 0, except the GPU's.
    """
    found: dict[str, Tensor] = {}
    for name, own in generator_states().items():
        _, kind, _ = name.split(".")
        for key in (name, *([] if kind == "cuda" else [f"rng.{kind}.0"])):
            if key in saved and tuple(saved[key].shape) == tuple(own.shape):
                found[key] = own
                break
    return found


def set_generator_states(received: Mapping[str, Tensor]) -> None:
    """Sets the generators to the states that `saved_generator_states` named, once they are read."""
    setters = {
        "cpu": torch.set_rng_state,
        "cuda": torch.cuda.set_rng_state,
        "python": _set_python_state,
        "numpy": _set_numpy_state,
    }
    for name, state in received.items():
        if name.startswith("rng."):
            setters[name.split(".")[1]](state)


# fp64 holds the words of 32 bits exactly, and the normal number that the generator has in stock, if any.
def _python_state() -> Tensor:
    _, words, normal = random.getstate()
    return torch.tensor([*words, normal is not None, normal or 0.0], dtype=torch.float64)


def _set_python_state(state: Tensor) -> None:
    *words, has_normal, normal = state.tolist()
    random.setstate((3, tuple(map(int, words)), normal if has_normal else None))


def _numpy_state() -> Tensor:
    _, words, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return torch.tensor([*words.tolist(), *rest], dtype=torch.float64)


def _set_numpy_state(state: Tensor) -> None:
    *words, position, has_normal, normal = state.tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_normal), normal))
