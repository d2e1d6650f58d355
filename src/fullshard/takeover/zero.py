"""DeepSpeed's checkpoints: ZeRO-1, ZeRO-2, ZeRO-3, BF16_Optimizer, and the universal form.

[Note: layouts] Each rank keeps flat vectors of fp32 master weights, of `exp_avg` and of `exp_avg_sq`.

ZeRO-1, ZeRO-2, BF16_Optimizer: one vector for each parameter group, padded and cut into equal parts. A
parameter may lie in several parts.

    group 0:  [ embed.weight | up.weight | down.we ][ ight | head.weight | padding ]
                             rank 0                              rank 1

ZeRO-3: each parameter is cut into equal parts, of which the last is padded. A rank's vector has its parts of
the parameters of a sub-group. A parameter group lists the numbers of its sub-groups.

    sub-group 0:  [ embed.weight 1/2 | up.weight 1/2 ][ embed.weight 2/2, padding | up.weight 2/2, padding ]
                                 rank 0                                     rank 1

Universal: one file for each parameter and kind of vector, without ranks.

[Note: order of parameters] `param_shapes` has the order of the flat vectors. With round_robin_gradients,
`param_slice_mappings` has another (DeepSpeed 0.19.8), and with it the universal form. So the mappings are not
used, and master weights are compared with the weights of the model's file when they are read.
"""

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import join_names
from fullshard.system.small_files import VALUE_BYTES, read_text
from fullshard.takeover.optimizer_state import (
    check_optimizer,
    count_steps,
    make_group,
    other_optimizer_error,
    split_steps,
    state_tensors,
)
from fullshard.takeover.rank_files import Tensors, cut_vector, split_vectors
from fullshard.takeover.source import (
    ForeignCheckpoint,
    ForeignGroup,
    ForeignOptimizer,
    LazyTensor,
    read_trainer_files,
)
from fullshard.takeover.stand_ins import read_torch_file

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_UNIVERSAL = "zero"
_MASTER = "fp32"
_PARALLEL = ("layer_", "expert_", "expp_rank_")  # begin the files of pipeline stages and of experts
_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

_Groups = Sequence[Mapping[str, Sequence[int]]]
"""{parameter: shape} of each flat vector, in the order of the vector."""


class _Opened(NamedTuple):
    """The optimizer's part of a checkpoint. Among the moments of `state` are the master weights."""

    state: ForeignOptimizer
    format: str
    files: Sequence[Path]
    notes: tuple[str, ...] = ()


def recognises(path: Path) -> bool:
    """Returns whether `path` is a checkpoint of DeepSpeed, or a directory with the file `latest`."""
    directory = _find_checkpoint(path)
    return directory.is_dir() and any(_MODEL_FILE.fullmatch(one.name) for one in directory.iterdir())


def open_source(path: Path) -> ForeignCheckpoint:
    """Opens a checkpoint of DeepSpeed. Its tensors are joined from mapped files when they are read.

    Raises CheckpointError for parts of tensor, pipeline or expert parallelism, and for files that do not
    belong together; DamagedCheckpointError for missing and damaged files.
    """
    directory = _find_checkpoint(path)
    _check_is_not_parallel(directory)
    files = _find_rank_files(directory, _MODEL_FILE)
    models = [_read_rank_file(one) for one in files]
    model = models[0]
    is_universal = (directory / _UNIVERSAL).is_dir()
    opened = _open_universal(directory, model) if is_universal else _open_ranks(directory, models)
    state = opened.state
    _check_optimizer_of_settings(model.get("ds_config") or {})
    steps = {(int(one["global_steps"]), int(one["skipped_steps"])) for one in models}
    if len(steps) > 1 or len(set(state.updates.values())) > 1:
        counts = {f"{count:.0f} updates": name for name, count in state.updates.items()}
        every = [f"{step} global_steps, {skipped} skipped" for step, skipped in sorted(steps)]
        got = join_names([*every, *(f"{count} of {name}" for count, name in counts.items())])
        raise CheckpointError(f"{directory} mixes several steps.", got=got, fix="the files of one step")
    ((step, skipped),) = steps
    samples = int(model.get("global_samples", 0))
    settings, _ = read_trainer_files(directory.parent)
    settings |= {"train.global_batch": samples // step} if step and samples and samples % step == 0 else {}
    moments = {n: {k: v for k, v in one.items() if k != _MASTER} for n, one in state.moments.items()}
    return ForeignCheckpoint(
        replace(state, moments=moments, updates={}),
        _join_weights(models, {n: one[_MASTER] for n, one in state.moments.items()}),
        count_steps(state.updates, step, skipped=skipped),
        format=opened.format,
        files=(*files, *opened.files),
        skipped_steps=skipped,
        settings=settings,
        config=json.dumps(model["ds_config"]) if model.get("ds_config") else None,
        version=model.get("ds_version"),
        notes=(*([f"{samples} samples were trained on"] if samples else []), *opened.notes),
    )


def _check_optimizer_of_settings(settings: Mapping[str, Any]) -> None:
    """Raises CheckpointError if DeepSpeed's settings name an optimizer that fullshard does not have."""
    own: Mapping[str, Any] = settings.get("optimizer") or {}
    kind, values = str(own.get("type", "adamw")).lower(), dict(own.get("params") or {})
    if kind not in ("adam", "adamw", "sgd", "muon"):
        raise other_optimizer_error([f"optimizer.type = {own['type']}"])
    if kind == "adamw":  # whose class ignores it
        values.pop("adam_w_mode", None)
    check_optimizer(values)


def _find_checkpoint(path: Path) -> Path:
    """Returns `path`, or the directory in it that its file `latest` names."""
    for file in (path / "latest", path / "latest_universal"):
        if file.is_file():
            tag = read_text(file, most_bytes=VALUE_BYTES).strip()
            if tag in ("", "..") or Path(tag).name != tag:
                raise DamagedCheckpointError(f"{file} names no directory beside it.", got=tag)
            return path / tag
    return path


def _check_is_not_parallel(directory: Path) -> None:
    """Raises CheckpointError if the directory has files of tensor, pipeline or expert parallel parts."""
    for path in sorted(directory.iterdir()):
        match = _MODEL_FILE.fullmatch(path.name) or _OPTIMIZER_FILE.fullmatch(path.name)
        if path.name.startswith(_PARALLEL) or (match is not None and int(match[2]) > 0):
            what = f"{directory} has parts of tensor, pipeline or expert parallelism."
            fix = "a checkpoint of a run whose ranks share no layers and no experts"
            raise CheckpointError(what, got=path.name, why="these parts are not joined here", fix=fix)


def _find_rank_files(directory: Path, name: re.Pattern[str], *, ranks: int | None = None) -> list[Path]:
    """Returns the files with this `name` in the order of ranks, one of each rank.

    ranks: number of ranks; None for as many as files

    Raises DamagedCheckpointError if a rank has none or two, or if there are more.
    """
    matches = [match for one in directory.iterdir() if (match := name.fullmatch(one.name)) is not None]
    found = sorted((int(match[1] or 0), directory / match[0]) for match in matches)
    counts = Counter(rank for rank, _ in found)
    expected = range(ranks or len(found) or 1)
    first = expected[: len(found) + 1]  # of which one lacks a file, if more are expected than found
    if wrong := [rank for rank in sorted({*counts, *first}) if counts[rank] != (rank in expected)]:
        kind = "model" if name is _MODEL_FILE else "optimizer"
        what = f"{directory} does not have one {kind} file per rank."
        got = f"{counts[wrong[0]]} of rank {wrong[0]}; {len(found)} files"
        fix = "the files of all ranks of one checkpoint in the directory"
        raise DamagedCheckpointError(what, got=got, why="each rank wrote a file with its own parts", fix=fix)
    return [path for _, path in found]


def _read_rank_file(path: Path) -> Any:
    """Returns the content of a file. Raises CheckpointError if it was saved under the name of another."""
    content = read_torch_file(path, classes=_CLASSES)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:  # torch.save names its records after the file
            saved_as = archive.namelist()[0].partition("/")[0] + path.suffix
        if saved_as != path.name and (_OPTIMIZER_FILE.fullmatch(saved_as) or _MODEL_FILE.fullmatch(saved_as)):
            raise CheckpointError(f"{path} is not its own file.", got=f"saved as {saved_as}", fix="that name")
    return content


def _open_ranks(directory: Path, models: Sequence[Mapping[str, Any]]) -> _Opened:
    """Opens the optimizer files of all ranks."""
    if models[0].get("optimizer") is not None:
        fix = "one more checkpoint with zero_optimization.stage = 1"
        raise CheckpointError(f"{directory} was written without ZeRO.", fix=fix)
    files = _find_rank_files(directory, _OPTIMIZER_FILE)
    states = [_read_rank_file(path)["optimizer_state_dict"] for path in files]
    stage = states[0].get("zero_stage", 1)  # BF16_Optimizer has none, and the layout of ZeRO-1
    stage = int(getattr(stage, "args", [stage])[0])
    counts = states[0]["partition_count"]
    ranks = int(counts if isinstance(counts, int) else max(counts))
    files = _find_rank_files(directory, _OPTIMIZER_FILE, ranks=ranks)
    _find_rank_files(directory, _MODEL_FILE, ranks=ranks if stage == 3 else 1)
    optimizers = [one["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for one in states]
    masters = [one["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for one in states]
    if isinstance(optimizers[0], list):
        raise CheckpointError(f"{directory} is an elastic checkpoint.", fix="elastic_checkpoint = false")
    vectors, updates = _read_vectors(files, masters=masters, optimizers=optimizers)
    groups: _Groups = models[0]["param_shapes"]
    tensors: dict[str, Tensors] = {}
    for number, shapes in enumerate(groups):
        own = [one[number] for one in vectors]
        if stage == 3:
            size = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
            sizes = {one.shape[0] for vector in own for one in vector.values()}
            if sizes != {size}:
                got = f"vectors of {sizes} elements, not {size}"
                raise DamagedCheckpointError(f"the files do not hold all of {', '.join(shapes)}.", got=got)
            begin = 0
            for name, shape in shapes.items():
                part = -(-math.prod(shape) // ranks)
                cut = [{k: cut_vector(v, begin, length=part) for k, v in one.items()} for one in own]
                tensors |= split_vectors({name: shape}, [0], vectors=cut)
                begin += part
        else:
            paddings = states[0].get("param_alignment_paddings")
            padding = paddings[number] if paddings else [0] * len(shapes)
            tensors |= split_vectors(shapes, padding, vectors=own)
    scale = (getattr(states[0].get("loss_scaler"), "state", None) or {}).get("cur_scale", 1)
    notes = (f"the loss scale was {scale:g}; the fp32 weights are taken",) if scale != 1 else ()
    name = f"DeepSpeed ZeRO-{stage}" if "zero_stage" in states[0] else "DeepSpeed BF16_Optimizer"
    state = ForeignOptimizer(tensors, updates, _make_groups(groups, optimizers[0]))
    return _Opened(state, format=name, files=files, notes=notes)


def _read_vectors(
    files: Sequence[Path], *, masters: Sequence[Sequence[Tensor]], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[list[list[Tensors]], dict[str, float]]:
    """Returns ({`fp32`, `exp_avg`, …: vector} of each rank and group, {vector: its count of updates})."""
    table: dict[str, Tensors] = {}
    for path, own, optimizer in zip(files, masters, optimizers, strict=True):
        steps = {number: one.get("step") for one in optimizer["param_groups"] for number in one["params"]}
        for number, master in enumerate(own):
            state = {"step": steps[number]} | optimizer["state"].get(number, {}) | {_MASTER: master}
            table[f"group {number} of {path.name}"] = state_tensors(state)
    vectors, updates = split_steps(table)
    rest = iter(vectors.values())
    return [[next(rest) for _ in own] for own in masters], updates


def _open_universal(directory: Path, model: Mapping[str, Any]) -> _Opened:
    """Opens `zero/NAME/*.pt` and `zero/optimizer_state.pt`."""
    file = directory / _UNIVERSAL / "optimizer_state.pt"
    files = sorted((directory / _UNIVERSAL).glob("*/*.pt"))
    states: dict[str, dict[str, Any]] = {}
    for path in files:
        content = read_torch_file(path)
        value = content["param"].reshape(-1) if isinstance(content, dict) else content  # flat after ZeRO-3
        states.setdefault(path.parent.name, {})[path.stem] = value
    groups: _Groups = model["param_shapes"]
    tensors, updates = split_steps({name: state_tensors(state) for name, state in states.items()})
    moments: dict[str, Tensors] = {}  # frozen and shared parameters have a directory there too
    for shapes in groups:
        for name, shape in shapes.items():
            state = {_MASTER: LazyTensor.from_tensor(torch.empty(0)), **tensors.get(name, {})}
            moments |= split_vectors({name: shape}, [0], vectors=[state])
    own = _make_groups(groups, read_torch_file(file, classes=_CLASSES))
    state = ForeignOptimizer(moments, updates, own)
    return _Opened(state, format="DeepSpeed universal", files=[*files, file])


def _make_groups(groups: _Groups, optimizer: Mapping[str, Any]) -> tuple[ForeignGroup, ...]:
    """Returns parameter groups, which list the numbers of their flat vectors."""
    entries = optimizer["param_groups"]
    return tuple(make_group([name for i in one["params"] for name in groups[i]], one) for one in entries)


def _join_weights(models: Sequence[Mapping[str, Any]], masters: Tensors) -> Tensors:
    """Returns master weights, buffers, frozen parameters, and the further names of shared parameters."""
    model, module = models[0], models[0]["module"]
    weights = dict(masters)
    for name, one in masters.items():
        if (weight := module.get(name)) is not None and tuple(weight.shape) == one.shape:
            error = CheckpointError(
                f"{name} differs between the model's file and the optimizer's files.",
                why="files of several steps or ranks are mixed, or its place in the flat vectors is another",
                fix="all files of one checkpoint; with round_robin_gradients, not its universal form",
            )
            weights[name] = one.check_equal_when_read(LazyTensor.from_tensor(weight), error)
    frozen = model.get("frozen_param_shapes") or {}
    shared: Mapping[str, str] = model.get("shared_params") or {}
    for name in sorted(module.keys() - weights.keys() - shared.keys()):
        shape = tuple(frozen.get(name, module[name].shape))
        if module[name].shape == shape:
            weights[name] = LazyTensor.from_tensor(module[name])
        else:  # ZeRO-3 keeps parts of frozen parameters in the models' files, and an empty tensor here
            parts = [{_MASTER: LazyTensor.from_tensor(one["frozen_param_fragments"][name])} for one in models]
            weights[name] = split_vectors({name: shape}, [0], vectors=parts)[name][_MASTER]
    return weights | {alias: weights[name] for alias, name in shared.items()}
