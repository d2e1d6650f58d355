"""export_state: writes a checkpoint's model and optimizer in the layouts that other trainers resume from.

    dcp           a DCP directory, as torch's `get_state_dict` has it, with flattened and listed groups
    torchtitan    a DCP directory: the model at the top level, "optimizer" flattened, "train_state"
    accelerate    two DCP directories and scheduler.bin, as `Accelerator.save_state` writes them with FSDP2
    torch         one file of `torch.save`: what `state_dict()` of torch's objects returns

A layout consists of dicts of tensors whose memory is never touched, and so takes no room. Each stands for a
saved tensor, whose values are read when they are written.
"""

import logging
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fullshard.checkpoint.files import CheckpointFiles
from fullshard.checkpoint.load import call_with_newest_checkpoint
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import MODEL_PREFIX, OPTIMIZER_PREFIX, Manifest
from fullshard.checkpoint.storage import CheckpointReader, write_dcp_directory
from fullshard.errors import CheckpointError, SpecError
from fullshard.quantities import format_bytes
from fullshard.system.files import (
    check_disk_space,
    free_disk_bytes,
    make_durable_directory,
    os_errors_as_checkpoint_errors,
    write_new_file,
)
from fullshard.system.targets import check_not_checkpoint_or_run_record
from fullshard.torch_private.tensors import tree_leaves
from fullshard.weights.export import names_without_wrappers, tied_parameter_aliases
from fullshard.weights.tensor_source import Weights, select_model_tensors

StateFormat = Literal["dcp", "torchtitan", "accelerate", "torch"]
_MODEL, _OPTIMIZER, _SCHEDULER = "pytorch_model_fsdp_0", "optimizer_0", "scheduler.bin"  # of Accelerate
_LIKE_ADAMW = ("AdamW", "StochasticAdamW", "AdamW8bit", "MuonAdamW")  # their state is that of torch's AdamW
_OWN_STATE = ("SoapAdamW", "Adafactor")

logger = logging.getLogger("fullshard")


def export_state(
    checkpoint: CheckpointLocation, target: Path, *, form: StateFormat, optimizer: bool, weights: Weights
) -> None:
    """Writes the model of the newest checkpoint, and its optimizer if `optimizer`, for another trainer.

    Runs in a process without process groups. One whole tensor is in memory, and none with `form` "torch". The
    layouts hold the optimizer's state, its groups with the rates of the next step, and the position of the
    schedule. All names are the model's own.

    target: the file, which appears when complete and replaces an existing one, or a directory
    weights: "ema" writes the averages of the trained parameters, without an optimizer

    Raises CheckpointError, also for an optimizer whose state nothing else loads; SpecError for averages with
    an optimizer, and for a `target` in a checkpoint or an earlier export.
    """
    if optimizer and weights == "ema":
        raise SpecError("averages of weights have no optimizer state.", fix="the weights as trained")
    for part in ("", _MODEL, _OPTIMIZER):
        check_not_checkpoint_or_run_record(target / part)

    def write(files: CheckpointFiles, manifest: Manifest) -> None:
        if (packing := manifest.values.get("packed_weights")) is not None:
            raise CheckpointError(
                "a packed base cannot be exported in this format.",
                got=packing.get("format") if isinstance(packing, dict) else packing,
                why="no other trainer reads its bytes",
                fix="--format hf, which dequantises the base, or --format peft",
            )
        wanted = select_model_tensors(manifest, weights)
        kept = [name for name in manifest.tensors if optimizer and name.startswith(OPTIMIZER_PREFIX)]
        wanted |= {name: (name, manifest.tensors[name]) for name in kept}
        empty = {name: torch.empty(one.shape, dtype=one.torch_dtype) for name, (_, one) in wanted.items()}
        names = {empty[name]: saved for name, (saved, _) in wanted.items()}
        layout = _build_layout(manifest, empty, form=form, optimizer=optimizer)
        needed = sum(one.nbytes for one in tree_leaves(layout) if isinstance(one, Tensor))
        check_disk_space(target, needed_bytes=needed, available_bytes=free_disk_bytes(target))
        reader = CheckpointReader(files, manifest)
        for place, state in layout.items():
            is_file = form == "torch" or place == _SCHEDULER
            make_durable_directory((target / place).parent if is_file else target / place)
            write_one = _write_torch_file if is_file else write_dcp_directory
            write_one(target / place, state, names=names, reader=reader)
        logger.info("exported %s to %s (%s)", files, target, format_bytes(needed))

    with os_errors_as_checkpoint_errors(f"{target} cannot be written."):
        call_with_newest_checkpoint(checkpoint, write)


def _build_layout(
    manifest: Manifest, tensors: Mapping[str, Tensor], *, form: StateFormat, optimizer: bool
) -> dict[str, dict[str, Any]]:
    plain = names_without_wrappers(manifest.model_tensors)
    model: dict[str, Any] = {one: tensors[name] for name, one in plain.items()}
    model |= {alias: model[name] for alias, name in tied_parameter_aliases(manifest.values).items()}
    if not optimizer:
        layout = model if form == "torchtitan" else {"model": model}
        return {_MODEL if form == "accelerate" else "": layout}
    groups = _read_groups(manifest, plain, form=form)
    group_of = {name: one for one in groups for name in one["params"]}
    state: dict[Any, dict[str, Tensor]] = {name: {} for name in group_of}
    for name in [one for one in tensors if one.startswith(OPTIMIZER_PREFIX)]:
        owner, _, key = name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
        state[plain[MODEL_PREFIX + owner]][key] = tensors[name]
    example = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)]), lambda _: 1.0)
    schedule = example.state_dict() | {  # all entries of the installed torch
        "last_epoch": manifest.step,
        "_step_count": manifest.step + 1,
        "base_lrs": [one.get("initial_lr") for one in groups],
        "_last_lr": [one.get("lr") for one in groups],
        "lr_lambdas": [None] * len(groups),
    }
    listed = {"state": state, "param_groups": groups}
    if form == "accelerate":
        return {_MODEL: {"model": model}, _OPTIMIZER: {"optimizer": listed}, _SCHEDULER: schedule}
    if form == "torch":
        number = {name: at for at, name in enumerate(group_of)}
        listed["state"] = {number[name]: one for name, one in state.items()}
        for one in groups:
            one |= {"params": [number[name] for name in one["params"]], "param_names": one["params"]}
        flat = {}
    else:
        entries = [(name, key) for name, one in group_of.items() for key in one if key != "params"]
        flat = {f"param_groups.{name}.{key}": group_of[name][key] for name, key in entries}
    tokens, position = manifest.values.get("tokens", 0), {"lr_scheduler": schedule}
    if form == "torchtitan":
        position |= {"train_state": {"step": manifest.step, "ntokens_seen": tokens}}
        return {"": model | {"optimizer": {"state": state} | flat} | position}
    position |= {"step": manifest.step, "tokens": tokens}
    return {"": {"model": model, "optimizer": listed | flat} | position}


def _read_groups(manifest: Manifest, plain: Mapping[str, str], *, form: StateFormat) -> list[dict[str, Any]]:
    """Returns the optimizer's groups as torch has them, with names as "params". Raises CheckpointError."""
    saved, optimizer = manifest.values.get("parameter_groups"), manifest.values.get("optimizer")
    run = cast(dict[str, Any], manifest.values_with_run.get("run") or {})
    muon = run.get("optimizer", {}).get("muon", {}) if optimizer == "MuonAdamW" else {}
    why, fix = None, "the model without --optimizer"
    if optimizer in _OWN_STATE or muon.get("row_decay"):
        why = "no other optimizer has its state"
    elif optimizer == "MuonAdamW" and form in ("accelerate", "torch"):
        why = "torch has Muon and AdamW in two optimizers, and this format holds one"
        fix = f"--format dcp, from which torch loads two, or {fix}"
    elif optimizer == "MuonAdamW" and not muon:
        why = "its [optimizer.muon] is not recorded: a save without a plan"
    elif not isinstance(saved, list):
        why = "its groups are not recorded: an import, a save before a step, or one of an earlier version"
        fix = f"{fix}, or a checkpoint of a later step"
    if why is not None:
        raise CheckpointError(
            "the optimizer of this checkpoint cannot be exported.", got=optimizer, why=why, fix=fix
        )
    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0] if optimizer in _LIKE_ADAMW else {}
    groups: list[dict[str, Any]] = []
    for one in cast(list[dict[str, Any]], saved):
        entries = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
        kind = entries.pop("kind", "adamw")
        own = defaults | entries if kind == "adamw" else _as_torch_muon(entries, muon)
        groups.append(own | {"params": [plain[MODEL_PREFIX + name] for name in one["params"]]})
    return groups


def _as_torch_muon(entries: Mapping[str, Any], muon: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group of torch's Muon, whose coefficients are ours. `muon`: [optimizer.muon] of the run."""
    scale = {"rms": "match_rms_adamw", "original": "original"}[muon["scale"]]
    own = {"ns_steps": muon["steps"], "adjust_lr_fn": scale} | {k: muon[k] for k in ("momentum", "nesterov")}
    own |= {"foreach": False, "fused": False}  # which groups of torchtitan have, of any optimizer
    rates = {key: one for key, one in entries.items() if key in ("lr", "initial_lr", "weight_decay")}
    return torch.optim.Muon([torch.zeros(1, 1)]).param_groups[0] | own | rates


def _write_torch_file(
    target: Path, state: Mapping[str, Any], *, names: Mapping[Tensor, str], reader: CheckpointReader
) -> None:
    """Writes `state` without values, maps the file into memory, and reads the tensors `names` into it."""
    with write_new_file(target) as file:
        with torch.serialization.skip_data():
            torch.save(state, file)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, file.tell())  # a full disk kills a process that fills holes
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped = torch.load(file.name, mmap=True, weights_only=True)
        pairs = zip(tree_leaves(state), tree_leaves(mapped), strict=True)
        reader.read_tensors({names[one]: values for one, values in pairs if isinstance(one, Tensor)})
