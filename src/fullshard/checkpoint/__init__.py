"""Checkpoints: sharded, verified, whole or absent, loadable at any number of ranks."""

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.digests import KeyFile
from fullshard.checkpoint.load import load
from fullshard.checkpoint.manifest import Manifest, SavedTensor, compare_names, read_manifest
from fullshard.checkpoint.nodes import NodeDisks
from fullshard.checkpoint.place import newest, place_of
from fullshard.checkpoint.protocol import Checkpointable
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
