"""Private names of torch, and the check that the installed release has them."""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import UnsupportedTorchError

RELEASES = "2.11 to 2.15"  # tested: see bench/results


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch.

    path: dotted, from `torch` on; the last part may be an attribute that only instances of its class have
    purpose: what fullshard does with it
    is_optional: whether fullshard also works without it, because another release has another name
    """

    path: str
    purpose: str
    is_optional: bool = False

    def exists(self) -> bool:
        """Returns whether the installed torch has the name."""
        *owners, last = self.path.split(".")
        try:
            owner = _resolve(owners)
        except (ImportError, AttributeError):
            return False
        return hasattr(owner, last) or (
            inspect.isclass(owner) and last in set(_iterate_names_used_in_methods(owner))
        )


def torch_names(path_and_siblings: str, purpose: str, *, is_optional: bool = False) -> list[PrivateName]:
    """Returns private names of one owner and purpose: `torch.Tensor._version _base` are two."""
    first, *others = path_and_siblings.split()
    owner = first.rpartition(".")[0]
    return [PrivateName(one, purpose, is_optional) for one in (first, *(f"{owner}.{one}" for one in others))]


def require_names(*groups: list[PrivateName]) -> tuple[PrivateName, ...]:
    """Returns all names. Raises UnsupportedTorchError if the installed torch lacks one that is needed."""
    names = tuple(name for group in groups for name in group)
    for name in names:
        if not name.is_optional and not name.exists():
            raise UnsupportedTorchError(
                f"torch {torch.__version__} has no {name.path}, by which fullshard {name.purpose}: "
                f"torch {RELEASES} have it."
            )
    return names


def _resolve(parts: Sequence[str]) -> Any:
    """Returns the module, or the attribute of a module, with this dotted name."""
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(".".join(parts))


def _iterate_names_used_in_methods(cls: type) -> Iterator[str]:
    """Yields the names in the methods and annotations of a class, among them its instances' attributes."""
    for base in cls.__mro__:
        yield from vars(base).get("__annotations__", {})
        for member in vars(base).values():
            function: Any = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function := inspect.unwrap(function)):
                yield from function.__code__.co_names
