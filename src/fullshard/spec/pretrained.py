"""Known models: presets, from `presets.toml`, and the `config.json` files of Hugging Face on this machine.

Presets are reference decoders, or models of transformers whose config.json is in `presets/`.
"""

import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.spec.settings.model_section import MOST_LAYERS, DecoderConfig, HuggingFaceModel
from fullshard.spec.value import MOST_PARTS, FrozenModel
from fullshard.system.small_files import VALUE_BYTES, iterate_integers, parse_json, read_bytes, read_toml


class ModelPreset(FrozenModel):
    """A known model: its sizes as a reference decoder, or its config.json in this package.

    repository: name on huggingface.co, where its config.json has these sizes
    differs: parts of the model that the reference decoder leaves out; empty if both have the same tensors
    """

    name: str
    repository: str
    model: DecoderConfig | HuggingFaceModel
    differs: str = ""


@cache
def read_presets() -> tuple[ModelPreset, ...]:
    here = Path(__file__).parent
    tables = read_toml(here / "presets.toml")
    found: list[ModelPreset] = []
    for family in tables.values():
        models = {name: family.pop(name) for name in [*family] if isinstance(family[name], dict)}
        differs = family.pop("differs", "")
        for name, sizes in models.items():
            repository = sizes.pop("repository")
            if "hf" in sizes:
                model = HuggingFaceModel(hf=str(here / "presets" / sizes["hf"]))
            else:
                model = DecoderConfig.parse({**family, **sizes}, source=f"presets.toml, {name}")
            found.append(ModelPreset(name=name, repository=repository, model=model, differs=differs))
    return tuple(found)


def preset_or_none(name: str) -> ModelPreset | None:
    """Returns the preset of this name or repository, ignoring case; None if no preset has it."""
    key = name.lower()
    return next((one for one in read_presets() if key in (one.name, one.repository.lower())), None)


def similar_preset_names(name: str) -> list[str]:
    """Returns preset names similar to `name`, or all names if none is similar."""
    names = [preset.name for preset in read_presets()]
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=3, cutoff=0.6)
    return near or names


CONFIG_NAME = "config.json"
_REVISION_BYTES = 4096
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
# The largest integers of configs of transformers, by their names: of blocks (num_hidden_layers, n_layer,
# decoder_layers, depths), of other parts (num_local_experts, n_head, num_labels), of positions, for which
# tables are made. All others are sizes of tensors, ids, or numbers such as rope_theta.
_MOST_BY_NAME = (
    (re.compile(r"(.*_)?(layers?|depths?|blocks)"), MOST_LAYERS),
    (re.compile(r".*(experts?|heads?|labels|groups?|stages|codebooks|languages).*"), MOST_PARTS),
    (re.compile(r".*(positions?|position_embeddings|_ctx|length|window)"), 1 << 30),
)


def find_cached_config(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the config.json of repository `name` in the Hugging Face cache, or None if it is not cached.

    The path is `models--org--name/snapshots/<revision>/config.json` below HF_HUB_CACHE, else HF_HOME/hub,
    else huggingface/hub in XDG_CACHE_HOME or ~/.cache. The revision is `main`, else the one fetched last.
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    if not _REPOSITORY.fullmatch(name):
        return None
    repository = _hub_cache_directory(environment) / f"models--{name.replace('/', '--')}"
    if not os.path.isdir(repository):
        return None
    found = [path for path in repository.glob(f"snapshots/*/{CONFIG_NAME}") if path.is_file()]
    main = repository / "refs" / "main"
    if main.is_file():
        revision = read_bytes(main, most_bytes=_REVISION_BYTES).strip()
        found = [path for path in found if os.fsencode(path.parent.name) == revision] or found
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def locate_config_file(source: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of a config.json on this machine. Raises SpecError if it is missing; never downloads.

    source: a file, a directory that contains a config.json, or a repository in the Hugging Face cache
    """
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        if not (path / CONFIG_NAME).is_file():
            raise SpecError(f"{source} is a directory without a {CONFIG_NAME}.", fix="the model's directory")
        return path / CONFIG_NAME
    cached = find_cached_config(source, environment)
    if cached is not None:
        return cached
    if path.suffix == ".json" or source.startswith((".", "/", "~")):
        raise SpecError(f"{source} cannot be read.", got="no such file")
    raise SpecError(
        f"{source!r} is not on this machine.",
        got=f"no file, no directory, and nothing of that name in {_hub_cache_directory(environment)}",
        why="a run fetches nothing: every rank would, and a gated model asks for a login",
        fix=f"hf download {source}   (after hf auth login, if it is gated), or the path of a directory",
    )


def _hub_cache_directory(environment: Mapping[str, str]) -> Path:
    if environment.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(environment["HF_HUB_CACHE"]))
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(environment.get("HF_HOME") or cache), "hub")


def read_config(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`. Raises SpecError for anything else."""
    try:
        data = parse_json(read_bytes(path, most_bytes=VALUE_BYTES))
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror) from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON.", got=str(error)) from error
    if not isinstance(data, dict):
        raise SpecError(f"{path} holds no JSON object.", got=type(data).__name__)
    return cast(dict[str, Any], data)


def check_config_limits(config: Mapping[str, Any], *, source: str) -> None:
    """Raises SpecError for integers of more than 64 bits, and for more blocks or parts than models have."""
    for keys, value in iterate_integers(config):
        key = ".".join(keys)
        limits = (most for name, most in _MOST_BY_NAME if keys and name.fullmatch(keys[-1]))
        most = next(limits, 2**63 - 1)
        if abs(value) > most:
            digits = f"{value:,}" if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
            raise SpecError(f"{source}: {key} is too large.", got=digits, why=f"at most {most:,}")
