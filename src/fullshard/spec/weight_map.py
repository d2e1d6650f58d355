"""How the tensors of one naming are made of those of another: boxes of elements that are copied.

A file of Hugging Face may hold three tensors where the model has one, or the other way round. What goes where
is a value: who reads (or writes) the bytes needs to know nothing of the model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a target, and the elements of one source that fill it.

    Element i of the box (an index into it, one number for each dim) is element `begin` + sum(i · `strides`)
    of the source as it lies in its file: row-major. The box begins at `at` in the target, and has `shape`.
    """

    source: str
    begin: int
    strides: tuple[int, ...]
    at: tuple[int, ...]
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """`parts`: of each target, boxes that fill it without overlapping. `shapes`: of the targets, as made.

    `surplus`: sources that no target takes. `converted`: targets that are not one source as it is.
    """

    parts: Mapping[str, tuple[Part, ...]]
    shapes: Mapping[str, Shape]
    surplus: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, parts in self.parts.items()
            if len(parts) != 1 or any(part.strides != row_major(part.shape) for part in parts)
        )


# What a model makes of the tensors of a file, which are given by name and shape.
Naming = Callable[[Mapping[str, Shape]], WeightMap]


def row_major(shape: Shape) -> tuple[int, ...]:
    """Elements from one index to the next, for each dim of a tensor that lies without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def whole(source: str, shape: Shape) -> tuple[Part, ...]:
    """A target that is the source `source`, of `shape`, as it is."""
    return (Part(source, begin=0, strides=row_major(shape), at=(0,) * len(shape), shape=shape),)


def by_name(
    wanted: Mapping[str, Shape], saved: Mapping[str, Shape], *, prefixes: tuple[str, ...]
) -> WeightMap:
    """Tensors of the same name; one whose name has a prefix (`model.`) too many, or lacks it, too."""
    parts: dict[str, tuple[Part, ...]] = {}
    surplus: list[str] = []
    for source, shape in saved.items():
        ways = [source]
        for prefix in prefixes:
            ways += [source.removeprefix(f"{prefix}.")] if source.startswith(f"{prefix}.") else []
            ways += [f"{prefix}.{source}"]
        name = next((way for way in ways if way in wanted and way not in parts), None)
        if name is None or (name != source and name in saved):
            surplus.append(source)
        else:
            parts[name] = whole(source, shape)
    shapes = {name: saved[one[0].source] for name, one in parts.items()}
    return WeightMap(parts=parts, shapes=shapes, surplus=tuple(surplus))
