"""Presets: the sizes of known models, as settings of the reference decoder, from `presets.toml`.

Models that the reference decoder cannot represent (another norm, activation, head size, or experts) are not
listed. They are planned from their own `config.json`, see `fullshard.spec.pretrained`.
"""

import difflib
import re
from functools import cache
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.spec.value import FrozenModel
from fullshard.system.toml_file import read_toml

QKV_BIASES = "the biases of its query, key and value are left out"
QK_NORMS = "the norms of its query and key are left out, and what they save for backward"
SCALED_POSITIONS = "its positions are not scaled to long sequences, which changes no size"
SOME_POSITIONS = "all blocks have rotary positions, although every fourth block of the model has none"
DIFFERENCES = {
    "qkv_biases": QKV_BIASES,
    "qk_norms": QK_NORMS,
    "scaled_positions": SCALED_POSITIONS,
    "some_positions": SOME_POSITIONS,
}

_NOT_EXPRESSED = (
    (r"(distil)?gpt-?2(-.*)?", "learned positions, LayerNorm with biases, a GELU between two matrices"),
    (r"gpt-?oss.*|mixtral.*|deepseek-?v[23].*|qwen3-\d+b-a.*|llama-?4.*|olmoe.*", "a mixture of experts"),
    (r"gemma.*", "heads that are not d_model / heads wide, and GELU"),
    (r"qwen3-(0\.6b|4b|32b).*", "its heads are 128 wide, not d_model / heads"),
    (r"mistral-(nemo|small).*", "its heads are 128 wide, not d_model / heads"),
    (r"phi-?[1-4].*", "fused projections, or biases and LayerNorm"),
    (r"(pythia|gpt-?neo|gpt-?j|opt|bloom|falcon|mpt|olmo).*", "other norms, positions or biases"),
)


class ModelPreset(FrozenModel):
    """A known model with its sizes as a reference decoder.

    repository: name on huggingface.co, where its config.json has these sizes
    differs: parts of the model that the reference decoder leaves out; empty if both have the same tensors
    """

    name: str
    repository: str
    model: DecoderConfig
    differs: str = ""


@cache
def read_presets() -> tuple[ModelPreset, ...]:
    """Reads all presets of `presets.toml`."""
    tables = read_toml(Path(__file__).with_name("presets.toml"))
    found: list[ModelPreset] = []
    for family in tables.values():
        models = {name: family.pop(name) for name in [*family] if isinstance(family[name], dict)}
        differs = DIFFERENCES.get(family.pop("differs", ""), "")
        for name, sizes in models.items():
            repository = sizes.pop("repository")
            model = DecoderConfig.parse({**family, **sizes}, source=f"presets.toml, {name}")
            found.append(ModelPreset(name=name, repository=repository, model=model, differs=differs))
    return tuple(found)


def preset_or_none(name: str) -> ModelPreset | None:
    """Returns the preset of this name or repository, ignoring case; None if no preset has it.

    Raises SpecError, with the reason, for a well-known model that the reference decoder cannot express.
    """
    key = name.lower()
    for preset in read_presets():
        if key in (preset.name, preset.repository.lower()):
            return preset
    for pattern, why in _NOT_EXPRESSED:
        if re.fullmatch(pattern, key.rpartition("/")[2]):
            raise SpecError(
                f"{name} is not a preset.",
                why=f"the reference decoder cannot express it: {why}",
                fix="the path of its config.json, or its name where it is cached (needs fullshard[hf])",
            )
    return None


def similar_preset_names(name: str) -> list[str]:
    """Returns preset names similar to `name`, or all names if none is similar."""
    names = [preset.name for preset in read_presets()]
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=3, cutoff=0.6)
    return near or names
