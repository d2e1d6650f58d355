"""Python code beside a model, which is run only with `model.trust_remote_code`."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.spec.model_section import HuggingFaceModel

_AUTO_MAP = "auto_map"
# Config keys that name code: classes in files beside the config, and kernels in hub repositories.
_NAMES_CODE = {
    _AUTO_MAP,
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
}


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config, and the configs of its parts, without the values that name code."""
    return {key: _stripped(value) for key, value in config.items() if key not in _NAMES_CODE}


def code_beside(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the classes that a config takes from files beside it, keyed by auto class."""
    named = config.get(_AUTO_MAP)
    if not isinstance(named, Mapping):
        return {}
    return {str(k): v for k, v in cast(Mapping[Any, Any], named).items() if isinstance(v, str)}


def class_beside(reference: str, *, directory: Path, source: str) -> Any:
    """Runs the local file that `reference` (`file.Class`) names, and returns the class. Raises SpecError."""
    modules: Any = importlib.import_module("transformers.dynamic_module_utils")
    try:
        return modules.get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    except (OSError, ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise SpecError(
            f"{source}: the code beside it cannot be loaded.",
            got=f"{reference}: {(str(error).strip() or type(error).__name__).splitlines()[0]}",
        ) from error


def not_trusted(section: HuggingFaceModel, needed: str) -> SpecError:
    """Returns the error for a model that needs the class `needed` from a file beside it."""
    return SpecError(
        f"{section.source} comes with Python code of its own, which is not run.",
        got=f"auto_map names {needed}, and model.trust_remote_code = false",
        why="the code may do whatever you may do on this machine",
        fix="read the code, then model.trust_remote_code = true; "
        'or install it as a package, and model.python = "package.module:factory"',
    )


def _stripped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_code(cast(Mapping[str, Any], value))
    if isinstance(value, list):
        return [_stripped(one) for one in cast(list[Any], value)]
    return value
