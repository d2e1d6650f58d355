"""Mapping from the tensors in a file (sources) to a model's tensors (targets), as boxes of elements to copy.

A Hugging Face file may contain three tensors where the model has one, or the reverse. Code that reads or
writes the bytes needs only the mapping, not the model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A copy of elements of one source tensor into a box (a rectangular slice) of a target tensor.

    Element i of the box (a multi-dimensional index) is element `begin` + sum(i · `strides`) of the source,
    which its file stores in row-major order.

    begin: offset of the box's first element in the source, in elements
    strides: source elements from one index to the next, for each dim of the box
    at: index of the box's first element in the target
    """

    source: str
    begin: int
    strides: tuple[int, ...]
    at: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Mapping from the tensors in a file (sources) to a model's tensors (targets).

    parts: for each target, copies into boxes that fill it without overlapping
    shapes: shape of each target
    surplus: sources that no target uses
    """

    parts: Mapping[str, tuple[BoxCopy, ...]]
    shapes: Mapping[str, Shape]
    surplus: tuple[str, ...] = ()

    @property
    def converted_targets(self) -> tuple[str, ...]:
        """Names of the targets that are joined from several boxes, or copied with other strides."""
        return tuple(
            name
            for name, parts in self.parts.items()
            if len(parts) != 1 or any(part.strides != row_major_strides(part.shape) for part in parts)
        )


# Maps the tensors of a file, given by name and shape, to the model's.
Naming = Callable[[Mapping[str, Shape]], WeightMap]


def row_major_strides(shape: Shape) -> tuple[int, ...]:
    """Returns the element strides of a contiguous tensor, one for each dim."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def map_unchanged_tensor(source: str, shape: Shape) -> tuple[BoxCopy, ...]:
    """Returns the parts of a target that is an unchanged copy of the tensor `source` with `shape`."""
    return (BoxCopy(source, begin=0, strides=row_major_strides(shape), at=(0,) * len(shape), shape=shape),)


def map_weights_by_name(
    wanted: Mapping[str, Shape], saved: Mapping[str, Shape], *, prefixes: tuple[str, ...]
) -> WeightMap:
    """Maps each tensor in a file to the model's tensor with an equal name; `surplus` are those without one.

    wanted, saved: shapes of the model's and of the file's tensors, by name
    prefixes: prefixes such as `model` that a name may lack, or have in addition
    """
    parts: dict[str, tuple[BoxCopy, ...]] = {}
    surplus: list[str] = []
    for source, shape in saved.items():
        ways = [source]
        for prefix in prefixes:
            ways += [source.removeprefix(f"{prefix}."), f"{prefix}.{source}"]
        name = next((way for way in ways if way in wanted and way not in parts), None)
        if name is None or (name != source and name in saved):
            surplus.append(source)
        else:
            parts[name] = map_unchanged_tensor(source, shape)
    shapes = {name: saved[one[0].source] for name, one in parts.items()}
    return WeightMap(parts=parts, shapes=shapes, surplus=tuple(surplus))
