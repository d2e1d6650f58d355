"""Models of transformers, tiny, with weights: what comes from elsewhere, and what is to load there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.fakes.architectures_hf import CONFIGS, QUICK
from tests.fakes.families import FAMILIES, batch_of_family

# Every architecture; but for one of each kind, in the long suite.
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in CONFIGS]


def hugging_face(name: str, directory: Path, **options: Any) -> nn.Module:
    """A model of transformers with numbers of its own, and what its save_pretrained writes."""
    transformers = pytest.importorskip("transformers")
    config = FAMILIES[name]
    values = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(3)
    made = getattr(transformers, config["architectures"][0])
    model = made(transformers.AutoConfig.for_model(config["model_type"], **values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: none is what it is initialised to
            parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(directory, **options)
    return model


def arguments(name: str) -> dict[str, Tensor]:
    batch = batch_of_family(name, 5)
    given = {"input_ids": batch["tokens"]} if "tokens" in batch else batch
    return {
        key: value for key, value in given.items() if key != "labels" or name in ("t5", "bart", "whisper")
    }


def outcome(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        given = model(**arguments(name))
    return given.logits if hasattr(given, "logits") else given.logits_per_image


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
