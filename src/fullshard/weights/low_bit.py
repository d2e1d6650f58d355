"""Weights in low-bit formats of Hugging Face, as the tensors of their values: fp8, MXFP4, packed integers.

[Note: one formula] In all of these formats the files hold codes, scales and perhaps zero points, and

    weight[r, c] = (code[r, c] - zero[i, j]) * scale[i, j]

with i = r // rows of a block, and j = c // columns of a block, or the group of column c (act order). It is
computed in fp32 and rounded once. For scales of 16 bits, these are the bits of a product in 16 bits, as
compressed-tensors, GPTQModel and AutoAWQ compute it, since codes minus zero points are exact in 16 bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.pretrained import CONFIG_NAME, read_config
from fullshard.weights.files import (
    ComputedTensor,
    FileTensor,
    PretrainedFiles,
    open_pretrained_files,
    read_range,
)

# Layouts of codes that are read, by method.
_LAYOUTS = {
    "fp8": (),
    "mxfp8": (),
    "mxfp4": (),
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("gemm",),
    "compressed-tensors": ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "dense"),
}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_FP4, *(-value for value in _FP4))
_E8M0 = tuple(2.0 ** (code - 127) for code in range(256))
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
_PLAIN_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Ends of names: of codes -> of their scales, zero points and groups of columns, of which the first is taken.
_BESIDE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    ".qweight": ((".scales",), (".qzeros",), (".g_idx",)),  # GPTQ and AWQ
    ".weight_packed": ((".weight_scale",), (".weight_zero_point",), (".weight_g_idx",)),  # compressed-tensors
    "_blocks": (("_scales",), (), ()),  # MXFP4
    ".weight": ((".weight_scale_inv", ".weight_scale", ".qscale_weight"), (".weight_zero_point",), ()),
    "": (("_scale_inv", "_scale"), (), ()),  # stacks of experts
}
_WITHOUT_USE = (".weight_shape", ".input_scale", ".input_zero_point", ".activation_scale", ".qscale_act")


@dataclass(frozen=True)
class Quantization:
    """Quantisation of the weights of a model, from its config.json.

    layouts: names of the layouts of codes, in lower case
    bits: numbers of bits of codes, of any module
    blocks: (rows, columns) of blocks of a weight that share a scale, of any module
    dtype: of the model
    """

    method: str
    layouts: frozenset[str]
    bits: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    dtype: torch.dtype


def read_quantization(config: Path) -> Quantization | None:
    """Returns the quantisation of the weights beside a config.json; None if it names none.

    Raises CheckpointError for a method, a layout or a number of bits that is not read; SpecError for a file
    that holds no JSON object.
    """
    values = read_config(config)
    places = [values, _mapping(values.get("text_config"))]
    settings = next((one for place in places if (one := _mapping(place.get("quantization_config")))), None)
    if settings is None:
        return None
    groups = [_mapping(one) for one in _mapping(settings.get("config_groups")).values()]
    weights = [settings, *(_mapping(group.get("weights")) for group in groups)]
    layouts = [settings.get(key) for key in ("checkpoint_format", "version", "format")]
    layouts += [group.get("format") for group in (_mapping(settings.get("sparsity_config")), *groups)]
    sizes = [one.get(key) for one in weights for key in ("weight_block_size", "block_structure")]
    sizes += [[1, one.get("group_size")] for one in weights]
    pairs = [tuple(cast(list[Any], size)) for size in sizes if isinstance(size, list)]
    bits = [one.get(key) for one in weights for key in ("bits", "num_bits")]
    dtypes = [str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)]
    named = {"float16": torch.float16, "float32": torch.float32}
    found = Quantization(
        method=str(settings.get("quant_method")),
        layouts=frozenset(str(one).lower() for one in layouts if one) - {"mixed-precision"},
        bits=tuple(one for one in bits if isinstance(one, int)),
        blocks=tuple(p for p in pairs if len(p) == 2 and all(isinstance(n, int) and n > 0 for n in p)),
        dtype=named.get("".join(dtypes[:1]), torch.bfloat16),
    )
    unread = sorted(found.layouts.difference(_LAYOUTS.get(found.method, found.layouts)))
    readable = (4,) if found.method == "awq" else (2, 4, 8)
    unread += [f"{one} bits" for one in found.bits if one not in readable]
    if unread or found.method not in _LAYOUTS:
        fix = 'the model from before it was quantised, or model.weights = "none", which initialises'
        if found.method == "bitsandbytes":
            fix += "; or transformers' from_pretrained(...).dequantize(), saved by save_pretrained"
        raise CheckpointError(
            f"{config.parent} holds weights in a quantised format that is not read.",
            got=f"quantization_config: {', '.join([found.method, *unread])}",
            why=f"these are read: {', '.join(_LAYOUTS)}",
            fix=fix,
        )
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class _StoredMatrices:
    """Codes, zero points or scales of a weight, as they are in a file.

    shape: (matrices, rows, columns) of words
    is_transposed: whether columns of words belong to rows of the weight
    shifts: position of each value that a word packs, in bits; empty if a word is a value
    packs_rows: whether a word packs values of several rows of the weight, instead of columns
    values: value of each code of a word
    addend: added to each word
    """

    tensor: FileTensor
    shape: tuple[int, int, int]
    is_transposed: bool = False
    shifts: tuple[int, ...] = ()
    packs_rows: bool = False
    values: tuple[float, ...] = ()
    addend: int = 0

    @property
    def unpacked_shape(self) -> tuple[int, int]:
        """Rows and columns of the values of a matrix, with those that fill up words."""
        rows, columns = self.shape[:0:-1] if self.is_transposed else self.shape[1:]
        per_word = len(self.shifts) or 1
        return (rows * per_word, columns) if self.packs_rows else (rows, columns * per_word)

    def read(self, directory: Path, matrix: int, *, rows: range) -> tuple[Tensor, int]:
        """Returns the values of `rows` of the weight in fp32, and the number of bytes read for them."""
        count, *inner = self.shape
        per_word = len(self.shifts) if self.packs_rows else 1
        begin, end = rows.start // per_word, -(-rows.stop // per_word)
        first = self.tensor.begin + matrix % count * math.prod(inner) * self.tensor.dtype.itemsize
        stored = replace(self.tensor, begin=first, shape=tuple(inner))
        read = read_range(directory, stored, dim=int(self.is_transposed), begin=begin, end=end)
        words = read.T if self.is_transposed else read
        if not self.shifts:
            return words.float(), read.nbytes
        dim = 1 if self.packs_rows else 2  # of the values of a word
        shifts = torch.tensor(self.shifts, dtype=words.dtype).view(-1, *[1] * (2 - dim))
        mask = (1 << words.itemsize * 8 // len(self.shifts)) - 1
        codes = ((words + self.addend).unsqueeze(dim) >> shifts & mask).flatten(dim - 1, dim)
        codes = codes[rows.start - begin * per_word :][: len(rows)]
        return torch.tensor(self.values, dtype=torch.float32)[codes.int()], read.nbytes


@dataclass(frozen=True)
class LowBitTensor(ComputedTensor):
    """A weight whose values are computed from codes in the files, see [Note: one formula].

    block: rows and columns of the weight that share a scale
    groups: tensor with the column of the scale for each column of the weight; None for blocks of columns
    """

    codes: _StoredMatrices
    scales: _StoredMatrices
    zeros: _StoredMatrices | None
    block: tuple[int, int]
    groups: FileTensor | None

    def read_rows(self, directory: Path, rows: range) -> tuple[Tensor, int]:
        """Returns `rows` of all matrices, one below the other, and the number of bytes read for them."""
        found = torch.empty(len(rows), self.shape[-1], dtype=self.dtype)
        groups, read_bytes = self._read_groups(directory)
        row, height = rows.start, self.block[0]
        while row < rows.stop:
            matrix, inside = divmod(row, self.shape[-2])
            part = range(inside, min(self.shape[-2], inside + rows.stop - row))
            blocks = range(part.start // height, -(-part.stop // height))
            at = (torch.arange(part.start, part.stop) // height - blocks.start).unsqueeze(1)
            values, code_bytes = self.codes.read(directory, matrix, rows=part)
            scales, scale_bytes = self.scales.read(directory, matrix, rows=blocks)
            values = values[:, : self.shape[-1]]
            if self.zeros is not None:
                zeros, zero_bytes = self.zeros.read(directory, matrix, rows=blocks)
                values -= zeros[at, groups]
                read_bytes += zero_bytes
            values *= scales[at, groups]
            found[row - rows.start :][: len(part)] = values
            read_bytes += code_bytes + scale_bytes
            row += len(part)
        return found, read_bytes

    def _read_groups(self, directory: Path) -> tuple[Tensor, int]:
        """Returns the column of the scale for each column of the weight, and the number of bytes read."""
        if self.groups is None:
            return torch.arange(self.shape[-1]) // self.block[1], 0
        groups = read_range(directory, self.groups, dim=0, begin=0, end=self.shape[-1])
        most = self.scales.unpacked_shape[1]
        if groups.min() < 0 or groups.max() >= most:
            raise DamagedCheckpointError(
                f"{directory / self.groups.file} holds columns without a scale.",
                got=f"groups {int(groups.min())} to {int(groups.max())}, and {most} scales in a row",
                fix="get it again",
            )
        return groups, groups.nbytes


def open_weights(path: Path) -> PretrainedFiles:
    """Opens weights as `open_pretrained_files` does, with low-bit weights as the tensors of their values.

    The config.json beside them says how they are quantised. Raises CheckpointError also for a method that is
    not read, and for codes that do not fit to their scales.
    """
    files = open_pretrained_files(path)
    config = files.directory / CONFIG_NAME
    quantization = read_quantization(config) if config.is_file() else None
    if quantization is None:
        return files
    stored = {name: one for name, one in files.tensors.items() if isinstance(one, FileTensor)}
    computed, hidden = dict[str, LowBitTensor](), set[str]()
    endings = ("_blocks",) if quantization.method == "mxfp4" else (".qweight", ".weight_packed")
    for name, codes in stored.items():
        ending = next(one for one in (*endings, ".weight", "") if name.endswith(one))
        stem = name.removesuffix(ending)
        beside = [next((stem + one for one in ends if stem + one in stored), "") for ends in _BESIDE[ending]]
        if ending not in endings and not (codes.dtype in _PLAIN_CODES and beside[0]):
            continue
        parts = [stored.get(one) for one in beside]
        size, columns = stored.get(f"{stem}.weight_shape"), None
        if size is not None and size.shape in ((2,), (3,)):
            columns = int(read_range(files.directory, size, dim=0, begin=0, end=size.shape[0])[-1])
        words = _code_words(codes, ending, columns=columns, quantization=quantization)
        made = words and _make_low_bit_tensor(words, parts, columns=columns, quantization=quantization)
        if made is None:
            held = ", ".join(f"{list(one.shape)} {one.dtype}" for one in (codes, *parts) if one is not None)
            raise CheckpointError(
                f"{files.directory} holds codes that do not fit to their scales.",
                got=f"{name} and what belongs to it: {held.replace('torch.', '')}",
                why=f"quantization_config: {quantization.method}",
                fix="the files and the config.json as they were published",
            )
        computed[f"{stem}.weight" if "weight" in ending else stem] = made
        hidden |= {name, *beside, *(stem + one for one in _WITHOUT_USE)}
    return replace(files, tensors={n: one for n, one in stored.items() if n not in hidden} | computed)


def _make_low_bit_tensor(
    words: _StoredMatrices,
    parts: Sequence[FileTensor | None],
    *,
    columns: int | None,
    quantization: Quantization,
) -> LowBitTensor | None:
    """Returns the weight with these codes, scales, zero points and groups; None if they do not fit together.

    columns: of the weight, if the files have them
    """
    scales, zeros, groups = parts
    if scales is None:
        return None
    rows, columns = words.unpacked_shape[0], columns or words.unpacked_shape[1]
    scale_words, zero_words = replace(_words(scales), is_transposed=words.is_transposed), None
    if scales.dtype == torch.uint8:
        scale_words = replace(scale_words, shifts=(0,), values=_E8M0)
    if zeros is not None:
        zero_words = _words(zeros)
        if words.shifts and zeros.dtype == torch.int32:
            # GPTQ's first format subtracted 1 from each zero point, by a subtraction from whole words.
            is_first = quantization.method == "gptq" and "gptq_v2" not in quantization.layouts
            addend = sum(1 << shift for shift in words.shifts) if is_first else 0
            packing = replace(words, packs_rows=True, addend=addend)
            zero_words = replace(packing, tensor=zeros, shape=zero_words.shape)
    grid, per_word = scale_words.unpacked_shape, len(words.shifts) or 1
    filled = (-(-grid[0] // per_word) * per_word, grid[1])  # with values that fill up the last words
    sizes = [*quantization.blocks]
    if all(grid) and rows % grid[0] == 0 == columns % grid[1]:
        sizes.append((rows // grid[0], columns // grid[1]))
    blocks = [size for size in sizes if (-(-rows // size[0]), -(-columns // size[1])) == grid]
    if groups is not None:
        blocks = [(1, columns)] if (grid[0], groups.shape) == (rows, (columns,)) else []
    codes = words.tensor
    is_readable = (
        (codes.dtype in (torch.int32, torch.uint8) if words.shifts else codes.dtype.itemsize == 1)
        and (scales.dtype.is_floating_point or scales.dtype == torch.uint8)
        and scale_words.shape[0] in (1, words.shape[0])
        and (zero_words is None or zero_words.unpacked_shape in (grid, filled))
        and (zero_words is None or zero_words.shape[0] == scale_words.shape[0])
    )
    if not blocks or not is_readable:
        return None
    is_16_bit = scales.dtype.itemsize == 2 and not quantization.method.endswith(("fp8", "fp4"))
    dtype = scales.dtype if is_16_bit else quantization.dtype
    shape = (*words.shape[: len(codes.shape) > 2], rows, columns)
    return LowBitTensor(shape, dtype, words, scale_words, zero_words, blocks[0], groups)


def _code_words(
    codes: FileTensor, ending: str, *, columns: int | None, quantization: Quantization
) -> _StoredMatrices | None:
    """Returns how codes are stored; None for a shape that codes do not have."""
    words = _words(codes)
    if len(codes.shape) < 2 or ending in ("", ".weight"):
        return None if len(codes.shape) < 2 else words
    if ending == "_blocks":
        # (experts, outputs, blocks, bytes), with two values in a byte. The model has inputs before outputs.
        shape = (*codes.shape[:2], math.prod(codes.shape[2:]))
        return replace(words, shape=shape, is_transposed=True, shifts=(0, 4), packs_rows=True, values=_E2M1)
    wide, size = quantization.bits, codes.shape[-1]
    bits = next((one for one in wide if columns is None or -(-columns * one // 32) == size), None)
    if bits is None:
        return None
    count, shifts = 1 << bits, tuple(range(0, 32, bits))
    if ending == ".weight_packed":
        return replace(words, shifts=shifts, values=tuple(range(-count // 2, count // 2)))
    words = replace(words, is_transposed=True, shifts=shifts, values=tuple(range(count)))
    # AWQ packs outputs, in the order of its kernels.
    return replace(words, shifts=_AWQ_SHIFTS, packs_rows=True) if quantization.method == "awq" else words


def _words(tensor: FileTensor) -> _StoredMatrices:
    """Returns the words of `tensor` as matrices. A single dim is that of rows."""
    rows, columns = (*tensor.shape, 1, 1)[:2] if len(tensor.shape) < 2 else tensor.shape[-2:]
    return _StoredMatrices(tensor, (math.prod(tensor.shape[:-2]), rows, columns))
