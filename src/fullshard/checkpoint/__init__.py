"""Checkpoints: sharded, verified, whole or absent, loadable at any number of ranks."""

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.checkpointable import Checkpointable
from fullshard.checkpoint.digests import KeyFile
from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import newest, place_of
from fullshard.checkpoint.manifest import Manifest, SavedTensor, compare_names, read_manifest
from fullshard.checkpoint.per_node import NodeDisks
from fullshard.checkpoint.save import save

__all__ = [
    "BackgroundSaver",
    "Checkpointable",
    "KeyFile",
    "Manifest",
    "NodeDisks",
    "SavedTensor",
    "compare_names",
    "load",
    "newest",
    "place_of",
    "read_manifest",
    "save",
]
