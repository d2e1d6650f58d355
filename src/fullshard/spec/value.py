"""What every value of this room is: frozen, strict about its fields, readable from and writable to JSON."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from fullshard.errors import SpecError


class Value(BaseModel):
    """A frozen value. Unknown fields are errors that name the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, data: Mapping[str, Any], *, source: str) -> Self:
        """A value from plain data. Raises SpecError that names `source`, the field and what it may be."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise _spec_error(cls, error, source=source) from None


def _spec_error(cls: type[BaseModel], error: ValidationError, *, source: str) -> SpecError:
    # An unknown key comes first: it may be a needed one, misspelled.
    errors = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first, name = errors[0], _name(cls, errors[0]["loc"])
    same = [one for one in errors if _name(cls, one["loc"]) == name]  # each branch of a union says its own
    more = f" (and {len(errors) - len(same)} more)" if len(errors) > len(same) else ""
    if first["type"] == "extra_forbidden":
        return _unknown_key(cls, [str(part) for part in first["loc"]], source=source, more=more)
    if first["type"] == "missing":
        return SpecError(f"{source}: {name} is missing{more}.", fix=f"set {name}")
    reason = " or: ".join(
        one["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list") for one in same
    )
    return SpecError(
        f"{source}: {name or 'the whole'} is not valid{more}.",
        got=repr(first["input"]) if name else None,  # the whole says no more than the reason
        why=reason,
    )


def _name(cls: type[BaseModel], location: Sequence[str | int]) -> str:
    """`("train", "steps", "int")` -> `train.steps`; pydantic adds the branch of a union."""
    section: type[BaseModel] | None = cls
    parts: list[str] = []
    for part in location:
        if isinstance(part, str) and section is None:
            break
        parts.append(str(part))
        field = section.model_fields.get(part) if section and isinstance(part, str) else None
        section = _model_of(field.annotation) if field else section
    return ".".join(parts)


def _unknown_key(cls: type[BaseModel], location: Sequence[str], *, source: str, more: str) -> SpecError:
    *path, key = location
    section = cls
    for part in path:
        field = section.model_fields.get(part)
        section = (field and _model_of(field.annotation)) or section  # an index leads no further down
    known = list(section.model_fields)
    elsewhere = [name for name in _keys(cls) if name.endswith(f".{key}")]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if elsewhere:
        fix = " or ".join(elsewhere)
    elif near:
        fix = ".".join([*path, near[0]])
    else:
        fix = f"one of {', '.join(known)}"
    where = f"[{'.'.join(path)}]" if path else "the file"
    return SpecError(f"{source}: unknown key {'.'.join(location)!r}{more}.", got=f"{key} in {where}", fix=fix)


def _keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of every key that stands in a section."""
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """`Section` and `tuple[Section, ...]` -> Section; what holds no model -> None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_of(inner))), None)
