"""load_pretrained: reads the weights of a Hugging Face directory directly into a model's shards.

Each rank reads only the bytes of its own rows and converts them to its dtype. No whole tensor exists
anywhere.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import rank, run_on_all_ranks, run_on_rank_zero
from fullshard.distributed.tensors import detached_local_tensor, shard_offsets
from fullshard.errors import CheckpointError
from fullshard.models.adapters import set_magnitudes
from fullshard.models.packed_weights import PackedWeight, find_packed_weights, pack_rows, shapes_of_matrices
from fullshard.offload.state import (
    find_offloaded_state,
    find_parameters_with_offloaded_values,
    iterate_parameters_to_load,
)
from fullshard.parallel.materialize import Initialise, initialise_parameters
from fullshard.parallel.unit_events import reshard_unsharded_units
from fullshard.quantities import count_text, join_names
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.spec.weight_map import Shape, WeightMap
from fullshard.weights.files import ComputedTensor, PretrainedFiles, copy_from_files, iterate_copies
from fullshard.weights.low_bit import open_weights
from fullshard.weights.names import map_file_tensors_to_model
from fullshard.weights.tensor_source import ADDED

logger = logging.getLogger("fullshard")

# Parts of names that come from wrappers: compile, DDP, recompute, FSDP1, and peft.
_WRAPPER_PARTS = (
    "._orig_mod.",
    ".module.",
    "._checkpoint_wrapped_module.",
    "._fsdp_wrapped_module.",
    ".base_model.model.",
    ".base_layer.",
    ADDED,
)
_PACKED_ELEMENTS = 1 << 22  # of a weight that is packed, in memory at a time
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class LoadReport:
    """Result of loading weights.

    directory: directory or file that they were read from
    tensors: number of the model's tensors that the files have
    missing: names of parameters and buffers that the files do not have
    surplus: names of tensors in the files that the model does not have
    tied: (alias, name) of tensors with several names, which are filled once
    converted: names of tensors that are not an unchanged copy of one tensor in the files
    dtypes: number of tensors per conversion, such as "bfloat16 → float32", or "low-bit codes → float32"
    read_bytes: bytes that this rank read, except for offloaded parameters
    seconds: time that this rank took, except for offloaded parameters
    """

    directory: str
    tensors: int
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    converted: tuple[str, ...]
    dtypes: Mapping[str, int]
    read_bytes: int
    seconds: float

    def describe(self) -> str:
        """Returns one line about the tensors read, and one for each kind of difference from the model."""
        read, turned = count_text(self.tensors, "tensor"), [f"{n} {kind}" for kind, n in self.dtypes.items()]
        lines = [f"{read} from {self.directory}" + (f": {', '.join(turned)}" if turned else "")]
        for names, what in (
            (self.converted, "of them put together as the model has them"),
            (self.surplus, "in the files that the model does not have"),
        ):
            lines += [f"{len(names)} {what}: {join_names(names)}"] if names else []
        lines += [self.missing_tensors_message] if self.missing_tensors_message else []
        return "\n".join(lines)

    @property
    def missing_tensors_message(self) -> str | None:
        """A line about the tensors that the files lack, except adapters of peft; None if none is missing."""
        missing = [name for name in self.missing if ADDED not in name]
        if not missing:
            return None
        return f"{len(missing)} that the files do not have, initialised: {join_names(missing)}"


def load_pretrained(
    model: nn.Module, directory: str | Path, *, plan: Plan | None = None, init: Initialise | None = None
) -> LoadReport:
    """Fills `model` with the weights of `directory` (or of one safetensors file). Collective.

    `model` is sharded (`shard(model, plan, init="none")`) or plain. Every rank reads the data for its own
    shards. Tensors that the files lack are initialised as in `shard`, with `plan.run.run.seed` and `init`,
    and logged once. Without a plan, a plain model keeps its values for these tensors, and a sharded model
    raises CheckpointError.

    Raises CheckpointError if there are no weights, if they belong to another model or are in a quantised
    format that is not read, and for missing tensors if `model.weights` is "require" or they are frozen beside
    adapters; DamagedCheckpointError for incomplete files; MissingExtraError.

    >>> with torch.device("meta"):
    ...     model = fs.DecoderModel(run.decoder_config)
    >>> model = fs.shard(model, plan, init="none")
    >>> fs.load_pretrained(model, "model.safetensors", plan=plan).missing
    ()
    """
    if rank() == 0 and (adapters := [one.name for one in Path(directory).glob("adapter_*")]):
        logger.warning("%s of %s are not read: they adapt its weights", join_names(adapters), directory)
    outside = find_offloaded_state(model)
    elsewhere = find_parameters_with_offloaded_values(outside) if outside is not None else set[Tensor]()
    loaded = fill_selected_tensors(model, directory, wanted=lambda one: one not in elsewhere)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in loaded.missing if name in parameters]
    if plan is None and any(isinstance(parameters[name], DTensor) for name in missing):
        raise CheckpointError(
            f"{directory} does not hold all of the model.",
            got=join_names(missing),
            fix="load_pretrained(..., plan=plan), which initialises them",
        )
    if plan is not None:
        _check_needed_were_read(loaded, parameters, run=plan.run)
        names = [name for name in missing if parameters[name] not in elsewhere]
        initialise_parameters(model, names, plan=plan, init=init)
    set_magnitudes(model, missing)
    for own in iterate_parameters_to_load(outside) if outside is not None and elsewhere else ():
        fill_selected_tensors(model, directory, wanted=own.__contains__)
        if plan is not None:
            names = [name for name in missing if parameters[name] in own]
            initialise_parameters(model, names, plan=plan, init=init)
    if loaded.missing_tensors_message and rank() == 0:
        logger.warning("%s", loaded.describe())
    return loaded


def _check_needed_were_read(loaded: LoadReport, parameters: Mapping[str, nn.Parameter], *, run: Run) -> None:
    """Raises CheckpointError for missing tensors that are required, or frozen beside adapters.

    A frozen parameter that was initialised here would be lost: adapters are exported without it, and the base
    model lacks it.
    """
    missing = [name for name in loaded.missing if ADDED not in name]
    if isinstance(run.model, HuggingFaceModel) and run.model.weights == "require":
        why, fix = 'model.weights = "require"', 'model.weights = "auto", which initialises them'
    else:
        missing = [name for name in missing if name in parameters and not parameters[name].requires_grad]
        if not run.adapter.rank or not missing:
            return
        why = "beside adapters they are frozen, and would keep their initial values"
        fix = "adapter.trained with their modules"
    if missing:
        surplus = f"; instead it has {join_names(loaded.surplus)}" if loaded.surplus else ""
        raise CheckpointError(
            f"{loaded.directory} lacks {count_text(len(missing), 'tensor')} of the model.",
            got=f"{count_text(loaded.tensors, 'tensor')} read, without {join_names(missing)}{surplus}",
            why=why,
            fix=fix,
        )


def fill_selected_tensors(
    model: nn.Module, directory: str | Path, *, wanted: Callable[[Tensor], bool] = lambda _tensor: True
) -> LoadReport:
    """Fills those parameters and buffers of `model` for which `wanted` returns True. Collective.

    Tensors that the files lack are unchanged, and are reported as missing, which is not an error here.
    Otherwise raises like `load_pretrained`.
    """
    began = time.perf_counter()
    path = Path(directory)
    files = run_on_rank_zero(lambda: open_weights(path), doing=f"reading {path}")
    reading = run_on_all_ranks(lambda: _assign_file_tensors(model, files), doing=f"reading {path}")
    run_on_rank_zero(lambda: reading.check_tied_tensors(wanted), doing=f"reading {path}")
    read_bytes = run_on_all_ranks(lambda: reading.fill_tensors(wanted), doing=f"reading {path}")
    return LoadReport(
        directory=str(path),
        tensors=len(reading.filled),
        missing=reading.missing,
        surplus=reading.map.surplus,
        tied=reading.tied,
        converted=reading.map.converted_targets,
        dtypes=reading.count_dtype_conversions(),
        read_bytes=read_bytes,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _TensorAssignments:
    """Assignment of file tensors to model tensors.

    map: parts of the file tensors for each model tensor
    filled: tensors to fill; one with several names is listed by the name that the files have
    missing, tied: see `LoadReport`
    packed: the tensors of the model whose rows are packed
    """

    files: PretrainedFiles
    map: WeightMap
    filled: Mapping[str, Tensor]
    missing: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    packed: Mapping[str, PackedWeight]

    def fill_tensors(self, wanted: Callable[[Tensor], bool]) -> int:
        """Fills the tensors for which `wanted` returns True. Returns the bytes that this rank read."""
        filled = {name: tensor for name, tensor in self.filled.items() if wanted(tensor)}
        packed = [name for name in filled if name in self.packed]
        shards = {n: detached_local_tensor(one) for n, one in filled.items() if n not in self.packed}
        moves = (
            move
            for name, shard in shards.items()
            for move in iterate_copies(shard, self.map.parts[name], offsets=shard_offsets(filled[name]))
        )
        return copy_from_files(moves, self.files) + sum(map(self._pack_own_rows, packed))

    def _pack_own_rows(self, name: str) -> int:
        """Reads and packs this rank's rows of a packed weight, some at a time. Returns the bytes read."""
        weight, shard = self.packed[name], detached_local_tensor(self.filled[name])
        offsets, columns, read_bytes = shard_offsets(self.filled[name]), weight.shape[-1], 0
        sizes, most = shard.shape[:-1], _PACKED_ELEMENTS // columns
        steps = [max(1, most // max(1, math.prod(sizes[dim + 1 :]))) for dim in range(len(sizes))]
        for begin in product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
            target = shard[tuple(slice(at, at + step) for at, step in zip(begin, steps, strict=True))]
            rows = torch.empty((*target.shape[:-1], columns), device=shard.device)
            place = tuple(map(sum, zip(offsets, (*begin, 0), strict=True)))
            moves = iterate_copies(rows, self.map.parts[name], offsets=place)
            read_bytes += copy_from_files(moves, self.files)
            target.copy_(pack_rows(rows.view(-1, columns), weight).view(target.shape))
        return read_bytes

    def check_tied_tensors(self, wanted: Callable[[Tensor], bool]) -> None:
        """Raises CheckpointError if the files have different values for a wanted tensor of several names.

        Reads tensors that the files have twice. Loading one value would drop the other.
        """
        for alias, name in self.tied:
            if not wanted(self.filled[name]):
                continue
            parts = [self.map.parts.get(one, ()) for one in (alias, name)]
            sources = [part[0].source for part in parts if len(part) == 1]
            if len(set(sources)) == 2 and not self.files.have_equal_bytes(*sources):
                raise CheckpointError(
                    f"{self.files.directory} has different values for {alias} and {name}.",
                    got="a model that ties them",
                    why="one of them would be dropped",
                    fix="model.options = {tie_word_embeddings = false}, or files with one of them",
                )

    def count_dtype_conversions(self) -> Mapping[str, int]:
        """Returns the number of tensors per conversion of dtype, such as "bfloat16 → float32"."""
        sources = {name: self.files.tensors[self.map.parts[name][0].source] for name in self.filled}
        computed = {name for name, source in sources.items() if isinstance(source, ComputedTensor)}
        dtypes = {name: "low-bit codes" if name in computed else one.dtype for name, one in sources.items()}
        pairs = (
            (dtypes[name], self.packed[name].form if name in self.packed else tensor.dtype)
            for name, tensor in self.filled.items()
        )
        return Counter(f"{old} → {new}".replace("torch.", "") for old, new in pairs if old != new)


def _assign_file_tensors(model: nn.Module, files: PretrainedFiles) -> _TensorAssignments:
    reshard_unsharded_units(model)
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    found = map_file_tensors_to_model(model, {name: tensor.shape for name, tensor in files.tensors.items()})
    _check_same_naming_scheme(tensors, found, path=files.directory)
    packed = find_packed_weights(model)
    _check_shapes_match(shapes_of_matrices(tensors, packed), found, path=files.directory)
    names: dict[int, list[str]] = {}  # a tied parameter is one tensor with several names
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    filled, missing, tied = dict[str, Tensor](), list[str](), list[tuple[str, str]]()
    for own in names.values():
        name = next((one for one in own if one in found.parts), None)
        if name is None:
            missing.append(own[0])
            continue
        filled[name] = tensors[name]
        tied += [(alias, name) for alias in own if alias != name]
    reading = _TensorAssignments(files, found, filled, tuple(missing), tuple(tied), packed)
    _check_tensors_are_loadable(reading)
    return reading


def _check_tensors_are_loadable(reading: _TensorAssignments) -> None:
    for name, tensor in reading.filled.items():
        if tensor.is_meta:
            raise CheckpointError(
                "the model has no memory to read weights into.",
                got=f"{name} on the meta device",
                fix='shard(model, plan, init="none") before; '
                'or model.to_empty(device="cpu"), for a plain one',
            )
        dtype = reading.files.tensors[reading.map.parts[name][0].source].dtype
        is_code = dtype in _FLOAT8 or not (dtype.is_floating_point or dtype.is_complex)
        is_cast = tensor.is_floating_point() and dtype != tensor.dtype
        if is_code and (is_cast or name in reading.packed):
            raise CheckpointError(
                f"{reading.files.directory} holds quantised weights.",
                got=f"{name} is {str(dtype).removeprefix('torch.')}",
                why="they are codes, whose values depend on scales beside them",
                fix="the model's directory in bfloat16 or float32",
            )


def _check_same_naming_scheme(tensors: Mapping[str, Tensor], found: WeightMap, *, path: Path) -> None:
    """Raises CheckpointError if no tensor was found, or if a wrapper's part of the names hides some."""
    wrapped = [name for name in found.surplus if any(part in f".{name}" for part in _WRAPPER_PARTS)]
    lacking = any(name not in found.parts and ADDED not in name for name in tensors)
    if (wrapped and lacking) or not found.parts:
        raise CheckpointError(
            f"{path} has other names for its tensors than the model.",
            got=join_names(wrapped or found.surplus) or "no tensors",
            why=f"the model has {join_names(list(tensors))}",
            fix="the weights saved from the model itself, without wrappers (model._orig_mod, model.module)"
            if wrapped
            else 'the weights of this model, or model.weights = "none", which initialises',
        )


def _check_shapes_match(shapes: Mapping[str, Shape], found: WeightMap, *, path: Path) -> None:
    other = [
        f"{name} is {list(found.shapes[name])} there and {list(shape)} here"
        for name, shape in shapes.items()
        if name in found.parts and found.shapes[name] != shape
    ]
    if other:
        raise CheckpointError(
            f"{path} holds another model: {count_text(len(other), 'tensor')} of another shape.",
            got=join_names(other),
            fix='the config.json that stands beside the weights; or weights = "none", to start without',
        )
