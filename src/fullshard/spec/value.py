"""FrozenModel, the pydantic base class of all values in `spec`, and types of its fields."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fullshard.errors import SpecError
from fullshard.system.files import write_file_or_stream
from fullshard.system.small_files import VALUE_BYTES, check_nesting_depth, read_bytes

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def _reject_impossible_path(text: str) -> str:
    """Returns `text`. Raises ValueError (or its subclass UnicodeEncodeError) if no file has such a path."""
    names = text.encode(errors="surrogateescape").split(b"/")
    if "\0" in text or sum(map(len, names)) + len(names) > 4096 or max(map(len, names)) > 255:
        raise ValueError("no file has such a path: a name has 255 bytes at most, a path 4095, and none a NUL")
    return text


def _validate_options_depth(options: dict[str, Any]) -> dict[str, Any]:
    check_nesting_depth(options, most_per_level=10_000)
    return options


def _reject_boolean(value: Any) -> Any:
    """Returns `value`. Raises ValueError for a boolean, which pydantic would accept as a number."""
    if isinstance(value, bool):
        raise ValueError(f"it is a number, not {str(value).lower()}")
    return value


# Part of the type of every number that a person writes.
NUMBER = BeforeValidator(_reject_boolean)
# Sums and products of a few of them are finite.
NonNegativeFloat = Annotated[float, NUMBER, Field(ge=0, le=1e100)]
PositiveFloat = Annotated[float, NUMBER, Field(gt=0, le=1e100)]
Fraction = Annotated[float, NUMBER, Field(ge=0, lt=1)]
# Integers of 64 bits, as files and tensors have them.
NonNegativeInt = Annotated[int, NUMBER, Field(ge=0, le=2**63 - 1)]
PositiveInt = Annotated[int, NUMBER, Field(gt=0, le=2**63 - 1)]
# Predicted figures, which fit into a float.
Large = Annotated[int, Field(ge=0, le=10**100)]
# Counts of a run's settings. The product of two of them fits into 64 bits.
Count = Annotated[int, NUMBER, Field(ge=0, le=10**9)]
PositiveCount = Annotated[int, NUMBER, Field(gt=0, le=10**9)]
# A number of steps, or a fraction of a run's steps, which is a number once their number is known.
Steps = Count | Annotated[float, NUMBER, Field(gt=0, lt=1)]
# Numbers of parts of a model that are made or visited one by one: experts, heads, labels, repeated blocks.
# The largest mixtures have some thousand experts in a layer.
MOST_PARTS = 65_536
Parts = Annotated[int, NUMBER, Field(ge=0, le=MOST_PARTS)]
# Number of processes on one machine.
Processes = Annotated[int, NUMBER, Field(ge=0, le=4096)]
# Numbers that are used in fp32.
NonNegativeScalar = Annotated[float, NUMBER, Field(ge=0, le=1e30)]
PositiveScalar = Annotated[float, NUMBER, Field(gt=0, le=1e30)]
# The product of two is less than the longest wait of a timer or a collective.
Seconds = Annotated[float, NUMBER, Field(ge=0, le=10**7)]
PathText = Annotated[str, AfterValidator(_reject_impossible_path)]
# Options of a function or class outside fullshard, which checks them itself.
Options = Annotated[dict[str, Any], AfterValidator(_validate_options_depth)]
_SHOWN = 120
_LIST_ERRORS = ("tuple_type", "list_type")
_QUOTED = re.compile(r"'([^']*)'")


class FrozenModel(BaseModel):
    """A pydantic model that is immutable and rejects unknown fields."""

    foreign: ClassVar[
        Mapping[str, str]
    ] = {}  # name in other tools, or removed dotted key -> the key, for errors

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, data: Mapping[str, Any], *, source: str, overridden: Sequence[str] = ()) -> Self:
        """Returns a value with the fields `data`. Raises SpecError, which names the invalid field.

        source: name of the file that contains the data, for the message
        overridden: keys (`train.steps`) whose values come from `--set` instead
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise _spec_error_from_validation(cls, error, source=source, overridden=overridden) from None

    @classmethod
    def read_json(
        cls, path: str | Path, *, what: str, ignores_unknown: bool = False, fix: str | None = None
    ) -> Self:
        """Reads a value from a JSON file. Raises SpecError: "<path> is not <what>" ("a saved plan").

        ignores_unknown: leaves out keys that an earlier version wrote and this one does not have
        """
        try:
            data = read_bytes(path, most_bytes=VALUE_BYTES)
            return cls.model_validate_json(data, extra="ignore" if ignores_unknown else None)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            got = f"{place}: {first['msg']}" if place else first["msg"]
            raise SpecError(f"{path} is not {what}.", got=got, fix=fix) from error
        except OSError as error:
            raise SpecError(f"{path} is not {what}.", got=error.strerror) from error

    def write_json(self, path: str | Path, *, indent: int | None = None) -> None:
        """Writes the value as JSON: replaces a file atomically, or writes into a pipe. Raises OSError."""
        write_file_or_stream(Path(path), self.model_dump_json(indent=indent) + "\n")


_Section = type[FrozenModel]


def field_descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Returns the first sentence about each field in the docstring of `section`, by field name."""
    found: dict[str, str] = {}
    pattern = r"^([a-z_`]+(?:, [a-z_`]+)*): (.+(?:\n {4}.+)*)"
    entries = re.findall(pattern, getdoc(section) or "", re.MULTILINE)
    for names, text in entries:
        sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".")
        found |= dict.fromkeys(names.replace("`", "").split(", "), sentence)
    return found


def _spec_error_from_validation(
    cls: _Section, error: ValidationError, *, source: str, overridden: Sequence[str]
) -> SpecError:
    # An unknown key comes first: it may be a misspelled required key.
    errors = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first, name = errors[0], _location_key(cls, errors[0]["loc"])
    same = [one for one in errors if _location_key(cls, one["loc"]) == name]  # one for each branch of a union
    source = "--set" if any(f"{name}.".startswith(f"{key}.") for key in overridden) else source
    more = f" (and {len(errors) - len(same)} more)" if len(errors) > len(same) else ""
    if first["type"] == "extra_forbidden":
        unknown = [[str(part) for part in one["loc"]] for one in errors if one["type"] == first["type"]]
        other = _union_branch_key_error(cls, unknown, source=source)
        return other or _unknown_key_error(cls, unknown[0], source=source, more=more)
    if first["type"] == "missing":
        return SpecError(f"{source}: {name} is missing{more}.", fix=f"set {name}")
    reason, fix = " or: ".join(map(_reason_text, same)), None
    names = [name for one in same for name in _accepted_names(one)]
    if all(map(_accepted_names, same)):
        reason, fix = f"it is one of {', '.join(names)}", similar_names_text(str(first["input"]), names)
    elif names:  # names, or another value
        others = (_reason_text(one) for one in same if not _accepted_names(one))
        reason = " or ".join((f"it is {', '.join(names)}", *(text.removeprefix("it is ") for text in others)))
    if first["type"] in _LIST_ERRORS and isinstance(first["input"], str):
        fix = f'["{first["input"]}"]'
    if first["type"] == "finite_number":
        fix = "a number that is neither inf nor nan"
    where = f"--set {name}" if source == "--set" else f"{source}: {name or 'the combination of settings'}"
    return SpecError(
        f"{where} is not valid{more}.",
        got=_shortened_repr(first["input"]) if name else None,  # the whole input adds nothing to the reason
        why=reason,
        fix=fix,
    )


def _accepted_names(error: "ErrorDetails") -> list[str]:
    """Returns the names that would have been valid; none if the value is not chosen from names."""
    if error["type"] == "literal_error":
        return _QUOTED.findall(error["ctx"]["expected"])  # type: ignore[reportTypedDictNotRequiredAccess]
    return ["true", "false"] if error["type"] in ("bool_parsing", "bool_type") else []


def _reason_text(error: "ErrorDetails") -> str:
    """Returns why pydantic rejects a value, without its terms for types."""
    if error["type"] in ("int_parsing", "int_type", "int_from_float"):
        return "it is an integer"
    if error["type"] in ("float_parsing", "float_type"):
        return "it is a number"
    if error["type"] in _LIST_ERRORS:
        return "it is a list"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    comparison = error["type"].startswith(("greater_than", "less_than"))
    return message.replace("Input should be", "it is") if comparison else message


def _shortened_repr(value: object) -> str:
    """Returns `repr(value)`, shortened to a readable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or levels
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def similar_names_text(text: str, names: Sequence[str]) -> str | None:
    """Returns the names that contain `text`, else similar names, joined by "or"; None if no name is close."""
    key = text.lower()
    near = [name for name in names if key and key in name.lower()]
    return " or ".join(near or difflib.get_close_matches(key, names, n=3, cutoff=0.5)) or None


def _location_key(cls: _Section, location: Sequence[str | int]) -> str:
    """Returns the dotted key of a pydantic error location: `train.steps` for `("train", "steps", "int")`."""
    return ".".join(_keys_and_section(cls, location)[0])


def _keys_and_section(cls: _Section, location: Sequence[str | int]) -> tuple[list[str], _Section]:
    """Returns (keys of a pydantic error location, the section that contains the last key).

    In a union, pydantic adds the branch to the location: for sections, the class name between the keys.
    """
    section, inner, parts = cls, [cls], list[str]()
    for part in location:
        if isinstance(part, str) and not inner:
            break  # below a plain value: the branch of a union
        branch = next((model for model in inner if model.__name__ == part), None)
        if branch is not None:
            section, inner = branch, [branch]
            continue
        parts.append(str(part))
        if isinstance(part, str):
            section = inner[0]
            field = section.model_fields.get(part)
            inner = list_section_types(field.annotation) if field else inner
    return parts, section


def _unknown_key_error(cls: _Section, location: Sequence[str], *, source: str, more: str) -> SpecError:
    [*path, key], section = _keys_and_section(cls, location)
    known = list(section.model_fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if (elsewhere := cls.foreign.get(".".join([*path, key])) or suggested_keys_text(cls, key)) is not None:
        fix = elsewhere
    elif near:
        fix = ".".join([*path, near[0]])
    else:
        fix = f"one of {', '.join(known)}"
    where = f"[{'.'.join(path)}]" if path else "the file"
    name = ".".join([*path, key])
    return SpecError(f"{source}: unknown key {name!r}{more}.", got=f"{key} in {where}", fix=fix)


def _union_branch_key_error(cls: _Section, locations: list[list[str]], *, source: str) -> SpecError | None:
    """Returns the error for keys that only another type in the union of sections has; None if none has."""
    paths = [_keys_and_section(cls, location) for location in locations]
    ([*path, key], section), kinds = paths[0], [cls]
    for part in path:
        fields = (kind.model_fields.get(part) for kind in kinds)
        kinds = [kind for field in fields if field for kind in list_section_types(field.annotation)]
    others = [kind for kind in kinds if key in kind.model_fields]
    if not others:
        return None
    deciding = [".".join([*path, one]) for one, field in section.model_fields.items() if field.is_required()]
    wanted = [".".join([*path, one]) for one, f in others[0].model_fields.items() if f.is_required()]
    keys = [".".join(names) for names, where in paths if where is section]
    if not deciding:
        fix = f"{' and '.join(wanted)}, or leave out {', '.join(keys)}"
        return SpecError(f"{source}: {keys[0]} needs {' and '.join(wanted)}.", got=", ".join(keys), fix=fix)
    return SpecError(
        f"{source}: {keys[0]} does not go with {' and '.join(deciding)}.",
        got=", ".join([*keys, *deciding]),
        why=f"beside {' and '.join(deciding)} there may be {', '.join(section.model_fields)}",
        fix=f"leave out {' and '.join(deciding)}, or {', '.join(keys)}",
    )


def suggested_keys_text(cls: _Section, name: str) -> str | None:
    """Returns the key that other tools call `name`, and the keys that end in it, as text; None if none."""
    key = name.lower().replace("-", "_")
    found = [cls.foreign[key]] if key in cls.foreign else []
    found += [one for one in iterate_dotted_field_names(cls) if one == key or one.endswith(f".{key}")]
    return " or ".join(found) or None


def iterate_dotted_field_names(cls: _Section, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every key of a section. For a union of sections, the first is used."""
    for name, field in cls.model_fields.items():
        inner = list_section_types(field.annotation)
        if inner and not field.is_required() and not isinstance(field.default, tuple):
            yield from iterate_dotted_field_names(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def list_section_types(annotation: Any) -> list[_Section]:
    """Returns the FrozenModel types in a field's annotation: `A | tuple[B, ...]` -> [A, B]."""
    if isinstance(annotation, type) and issubclass(annotation, FrozenModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in list_section_types(inner)]
