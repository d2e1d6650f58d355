"""Names of settings in other trainers and in earlier versions, for the errors that name the right key."""

from pathlib import Path
from typing import Any

from fullshard.system.small_files import read_toml

# Key of an earlier version -> (its default, what replaces it).
REMOVED: dict[str, tuple[Any, str]] = {
    "checkpoint.export": (False, "fullshard ckpt export, after the run"),
    "checkpoint.storage": (
        "shared",
        "checkpoint.dir, a directory that all nodes share, or an object store (s3://bucket/run)",
    ),
    "data.attention_mask_field": ("attention_mask", "a column of that name: rename yours"),
    "data.chat_template_kwargs_field": ("chat_template_kwargs", "a column of that name: rename yours"),
    "data.labels_field": ("labels", "a column of that name: rename yours"),
    "data.loss_mask_field": ("loss_mask", "a column of that name: rename yours"),
    "data.tools_field": ("tools", "a column of that name: rename yours"),
    "fault_tolerance.collective_timeout_seconds": (600.0, "fault_tolerance.watchdog_timeout_seconds"),
    "log.sample_tokens": (160, "fullshard ckpt export --format hf, and generate of transformers"),
    "optimizer.momentum": (0.0, "optimizer.options = { momentum = … }"),
    "precision.buffer_dtype": (None, "nothing instead: buffers keep their dtype"),
    "precision.initial_loss_scale": (65536.0, "nothing instead: the scale begins at 65536"),
    "precision.loss_scale_window": (
        2000,
        "nothing instead: the scale doubles after 2000 steps without an overflow",
    ),
    "precision.output_dtype": (None, "train.loss, a function that casts the outputs"),
    "prefetch": (
        {"mode": "implicit", "forward": 1, "backward": 1},
        "nothing instead: FSDP2 gathers one unit ahead",
    ),
    "recompute.every": (None, "recompute.blocks, the number of blocks that recompute"),
    "sharding.context_method": ("gather", "nothing instead: ranks gather keys and values"),
    "sharding.reshard_after_forward": (
        None,
        'sharding.strategy = "hybrid_shard" with sharding.shard_degree = the ranks of a node',
    ),
    "sharding.units.policy": (
        "block",
        "sharding.units.names, or min_parameters, or neither for the repeated blocks",
    ),
}
# Removed settings that never changed numbers: a plan of an earlier version that sets one is used without it.
IGNORED = frozenset({"prefetch", "log.sample_tokens"})
_NAMES = read_toml(Path(__file__).with_suffix(".toml"))
FOREIGN_NAMES: dict[str, str] = {name: answer for answer, names in _NAMES.items() for name in names.split()}
