"""Sharded, verified checkpoints: each is complete or absent, and loads at any number of ranks."""

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import latest_checkpoint, location_of
from fullshard.checkpoint.manifest import (
    Checkpointable,
    Manifest,
    SavedTensor,
    check_same_tensors,
    read_manifest,
)
from fullshard.checkpoint.save import save

__all__ = [
    "BackgroundSaver",
    "Checkpointable",
    "Manifest",
    "SavedTensor",
    "check_same_tensors",
    "load",
    "latest_checkpoint",
    "location_of",
    "read_manifest",
    "save",
]
