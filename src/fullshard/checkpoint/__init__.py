"""Checkpoints: sharded, whole or absent, loadable at any number of ranks; and a safetensors export."""

from fullshard.checkpoint.export import export
from fullshard.checkpoint.load import load
from fullshard.checkpoint.manifest import Manifest, SavedTensor, compare_names, newest, read_manifest
from fullshard.checkpoint.protocol import Checkpointable
from fullshard.checkpoint.save import save

__all__ = [
    "Checkpointable",
    "Manifest",
    "SavedTensor",
    "compare_names",
    "export",
    "load",
    "newest",
    "read_manifest",
    "save",
]
