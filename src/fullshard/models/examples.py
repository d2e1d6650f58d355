"""Example batches without values (meta tensors), with which a transformers model is described."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.spec.run import Run

# Heads with one label per sequence or image.
_ONE_LABEL = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")


def example_meta_batch(model: nn.Module, run: Run, *, rows: int) -> dict[str, Tensor] | None:
    """Returns a batch of `rows` samples on the meta device, for `model(**batch)`; None if inputs are unknown.

    Token ids: `data.sequence_length` tokens, at most the model's positions. Images: the config's size.
    """
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    if not hasattr(config, "model_type"):
        return None
    batch: dict[str, Tensor] = {}
    if "pixel_values" in takes:
        shape = _find_image_shape(config)
        if shape is None:
            return None
        batch["pixel_values"] = torch.empty((rows, *shape), device="meta")
    if "input_ids" in takes:
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        length = min(run.data.sequence_length, longest or run.data.sequence_length)
        batch["input_ids"] = torch.empty((rows, length), dtype=torch.int64, device="meta")
    if not batch:
        return None
    if "labels" in takes:
        single = type(model).__name__.endswith(_ONE_LABEL) or "input_ids" not in batch
        shape = (rows,) if single else tuple(batch["input_ids"].shape)
        batch["labels"] = torch.empty(shape, dtype=torch.int64, device="meta")
    return batch


def _find_image_shape(config: Any) -> tuple[int, int, int] | None:
    """Returns (channels, height, width) of the model's images; None if unknown."""
    part = getattr(config, "vision_config", config)
    size, channels = getattr(part, "image_size", None), getattr(part, "num_channels", 3)
    if isinstance(size, int):
        return channels, size, size
    return (channels, *size) if isinstance(size, (list, tuple)) and len(size) == 2 else None
