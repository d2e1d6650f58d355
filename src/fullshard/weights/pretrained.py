"""load_pretrained: loads the weights of a Hugging Face directory, and initialises tensors that it lacks."""

import logging
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import CheckpointError
from fullshard.offload.state import offloaded_of, offloaded_parameters, shards_for_loading
from fullshard.sharding.materialize import Initialise, initialise
from fullshard.spec.plan import Plan
from fullshard.weights.names import model_names
from fullshard.weights.read import LoadReport, read_pretrained

logger = logging.getLogger("fullshard")


def load_pretrained(
    model: nn.Module, directory: str | Path, *, plan: Plan | None = None, init: Initialise | None = None
) -> LoadReport:
    """Fills `model` with the weights of `directory` (or of one safetensors file). Collective.

    `model` is sharded (`shard(model, plan, values="unset")`) or plain. Every rank reads the data for its own
    shards. Tensors that the files lack are initialised as in `shard`, with `plan.run.run.seed` and `init`,
    and logged once. Without a plan, a plain model keeps its values for them, and a sharded model raises
    CheckpointError.

    Raises CheckpointError if there are no weights or they belong to another model; DamagedCheckpointError for
    incomplete files; MissingExtraError.
    """
    naming = partial(model_names, model)
    outside = offloaded_of(model)
    elsewhere = offloaded_parameters(outside) if outside is not None else set[Tensor]()
    loaded = read_pretrained(model, directory, naming=naming, wanted=lambda one: one not in elsewhere)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in loaded.missing if name in parameters]
    if plan is None and any(isinstance(parameters[name], DTensor) for name in missing):
        raise CheckpointError(
            f"{directory} does not hold all of the model.",
            got=", ".join(missing[:4]) + (", ..." if len(missing) > 4 else ""),
            fix="load_pretrained(..., plan=plan), which initialises them",
        )
    if plan is not None:
        initialise(model, [n for n in missing if parameters[n] not in elsewhere], plan=plan, init=init)
    for own in shards_for_loading(outside) if outside is not None and elsewhere else ():
        read_pretrained(model, directory, naming=naming, wanted=own.__contains__)
        if plan is not None:
            initialise(model, [name for name in missing if parameters[name] in own], plan=plan, init=init)
    if loaded.missing_message and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning("%s: %s", directory, loaded.missing_message)
    return loaded
