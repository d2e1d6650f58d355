"""Any causal language model of transformers, from its config.json, without weights. Needs the extra `hf`."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import MissingExtraError, SpecError


def meta_model(config_path: str | Path) -> nn.Module:
    """The model that `config_path` (a config.json, or its directory) describes, without any weight.

    `next_token_loss` trains it: what it returns has `logits`. Code that a repository brings along is not run.
    Raises MissingExtraError without transformers, SpecError for a config that it knows no such model for.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("hf", package="transformers", needed_for=f"the model of {config_path}")
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(config_path), local_files_only=True)
        config.use_cache = False  # keys and values that only generating needs
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(
            f"{config_path}: transformers makes no causal language model of it.",
            got=str(error).strip().splitlines()[0],
        ) from error
    return model
