"""Known models as sizes of the reference decoder. Every figure is from the `config.json` of their repository.

Models that the reference decoder would only distort (another norm, activation, head size, or experts) are not
listed. They are planned from their own `config.json`, see `fullshard.spec.pretrained`.
"""

import difflib
import re

from fullshard.errors import SpecError
from fullshard.spec.model_section import DecoderConfig
from fullshard.spec.value import FrozenModel


class Preset(FrozenModel):
    """A model under a short name.

    repository: on huggingface.co; its config.json has these figures
    differs: parts of the model that the reference decoder leaves out; empty if both have the same tensors
    """

    name: str
    repository: str
    model: DecoderConfig
    differs: str = ""

    @property
    def source(self) -> str:
        return f"https://huggingface.co/{self.repository}/blob/main/config.json"


def find_preset(name: str) -> Preset | None:
    """Returns the preset of this name or repository, ignoring case; None if there is none.

    Raises SpecError, with the reason, for a well-known model that the reference decoder cannot express.
    """
    key = name.lower()
    for preset in PRESETS:
        if key in (preset.name, preset.repository.lower()):
            return preset
    for pattern, why in _NOT_EXPRESSED:
        if re.fullmatch(pattern, key.rpartition("/")[2]):
            raise SpecError(
                f"{name} is no preset.",
                why=f"the reference decoder cannot express it: {why}",
                fix="the path of its config.json, or its name where it is cached (needs fullshard[hf])",
            )
    return None


def nearest_presets(name: str) -> list[str]:
    """Returns preset names similar to `name`, or all names if none is similar."""
    names = [preset.name for preset in PRESETS]
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=3, cutoff=0.6)
    return near or names


def _llama(d_model: int, layers: int, *, heads: int, kv_heads: int, d_ff: int) -> DecoderConfig:
    return DecoderConfig(
        vocabulary=128256,
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        max_sequence=8192,
        rope_theta=500_000.0,
    )


def _longer(model: DecoderConfig, *, max_sequence: int = 131072, tied: bool = False) -> DecoderConfig:
    return model.model_copy(update={"max_sequence": max_sequence, "tied": tied})


def _llama2(d_model: int, layers: int, *, heads: int, kv_heads: int, d_ff: int) -> DecoderConfig:
    model = _llama(d_model, layers, heads=heads, kv_heads=kv_heads, d_ff=d_ff)
    return model.model_copy(update={"vocabulary": 32000, "max_sequence": 4096, "rope_theta": 10_000.0})


def _qwen(d_model: int, layers: int, *, heads: int, kv_heads: int, d_ff: int) -> DecoderConfig:
    model = _llama(d_model, layers, heads=heads, kv_heads=kv_heads, d_ff=d_ff)
    settings = {"vocabulary": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_sequence": 32768}
    return model.model_copy(update=settings)


def _wide_qwen(model: DecoderConfig, *, norm_eps: float) -> DecoderConfig:
    return model.model_copy(update={"vocabulary": 152064, "norm_eps": norm_eps, "max_sequence": 131072})


def _smollm2(d_model: int, layers: int, *, heads: int, kv_heads: int, d_ff: int) -> DecoderConfig:
    model = _llama(d_model, layers, heads=heads, kv_heads=kv_heads, d_ff=d_ff)
    return model.model_copy(update={"vocabulary": 49152, "rope_theta": 100_000.0, "tied": True})


QKV_BIASES = "the biases of its query, key and value are left out"
QK_NORMS = "the norms of its query and key are left out, and what they save for backward"
SCALED_POSITIONS = "its positions are not scaled to long sequences, which changes no size"
SOME_POSITIONS = "all blocks have rotary positions, where its every fourth has none"

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="llama2-7b",
        repository="meta-llama/Llama-2-7b-hf",
        model=_llama2(4096, 32, heads=32, kv_heads=32, d_ff=11008),
    ),
    Preset(
        name="llama2-13b",
        repository="meta-llama/Llama-2-13b-hf",
        model=_llama2(5120, 40, heads=40, kv_heads=40, d_ff=13824),
    ),
    Preset(
        name="llama2-70b",
        repository="meta-llama/Llama-2-70b-hf",
        model=_llama2(8192, 80, heads=64, kv_heads=8, d_ff=28672),
    ),
    Preset(
        name="llama3-8b",
        repository="meta-llama/Meta-Llama-3-8B",
        model=_llama(4096, 32, heads=32, kv_heads=8, d_ff=14336),
    ),
    Preset(
        name="llama3-70b",
        repository="meta-llama/Meta-Llama-3-70B",
        model=_llama(8192, 80, heads=64, kv_heads=8, d_ff=28672),
    ),
    Preset(
        name="llama3.1-8b",
        repository="meta-llama/Llama-3.1-8B",
        model=_longer(_llama(4096, 32, heads=32, kv_heads=8, d_ff=14336)),
        differs=SCALED_POSITIONS,
    ),
    Preset(
        name="llama3.1-70b",
        repository="meta-llama/Llama-3.1-70B",
        model=_longer(_llama(8192, 80, heads=64, kv_heads=8, d_ff=28672)),
        differs=SCALED_POSITIONS,
    ),
    Preset(
        name="llama3.1-405b",
        repository="meta-llama/Llama-3.1-405B",
        model=_longer(_llama(16384, 126, heads=128, kv_heads=8, d_ff=53248)),
        differs=SCALED_POSITIONS,
    ),
    Preset(
        name="llama3.2-1b",
        repository="meta-llama/Llama-3.2-1B",
        model=_longer(_llama(2048, 16, heads=32, kv_heads=8, d_ff=8192), tied=True),
        differs=SCALED_POSITIONS,
    ),
    Preset(
        name="llama3.2-3b",
        repository="meta-llama/Llama-3.2-3B",
        model=_longer(_llama(3072, 28, heads=24, kv_heads=8, d_ff=8192), tied=True),
        differs=SCALED_POSITIONS,
    ),
    Preset(
        name="mistral-7b",
        repository="mistralai/Mistral-7B-v0.3",
        model=_llama(4096, 32, heads=32, kv_heads=8, d_ff=14336).model_copy(
            update={"vocabulary": 32768, "max_sequence": 32768, "rope_theta": 1e6}
        ),
    ),
    Preset(
        name="tinyllama-1.1b",
        repository="TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        model=_longer(_llama2(2048, 22, heads=32, kv_heads=4, d_ff=5632), max_sequence=2048),
    ),
    Preset(
        name="qwen2.5-0.5b",
        repository="Qwen/Qwen2.5-0.5B",
        model=_longer(_qwen(896, 24, heads=14, kv_heads=2, d_ff=4864), max_sequence=32768, tied=True),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen2.5-1.5b",
        repository="Qwen/Qwen2.5-1.5B",
        model=_longer(_qwen(1536, 28, heads=12, kv_heads=2, d_ff=8960), tied=True),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen2.5-3b",
        repository="Qwen/Qwen2.5-3B",
        model=_longer(_qwen(2048, 36, heads=16, kv_heads=2, d_ff=11008), max_sequence=32768, tied=True),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen2.5-7b",
        repository="Qwen/Qwen2.5-7B",
        model=_wide_qwen(_qwen(3584, 28, heads=28, kv_heads=4, d_ff=18944), norm_eps=1e-6),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen2.5-14b",
        repository="Qwen/Qwen2.5-14B",
        model=_wide_qwen(_qwen(5120, 48, heads=40, kv_heads=8, d_ff=13824), norm_eps=1e-5),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen2.5-32b",
        repository="Qwen/Qwen2.5-32B",
        model=_wide_qwen(_qwen(5120, 64, heads=40, kv_heads=8, d_ff=27648), norm_eps=1e-5),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen2.5-72b",
        repository="Qwen/Qwen2.5-72B",
        model=_wide_qwen(_qwen(8192, 80, heads=64, kv_heads=8, d_ff=29568), norm_eps=1e-5),
        differs=QKV_BIASES,
    ),
    Preset(
        name="qwen3-1.7b",
        repository="Qwen/Qwen3-1.7B",
        model=_longer(_qwen(2048, 28, heads=16, kv_heads=8, d_ff=6144), max_sequence=40960, tied=True),
        differs=QK_NORMS,
    ),
    Preset(
        name="qwen3-8b",
        repository="Qwen/Qwen3-8B",
        model=_longer(_qwen(4096, 36, heads=32, kv_heads=8, d_ff=12288), max_sequence=40960),
        differs=QK_NORMS,
    ),
    Preset(
        name="qwen3-14b",
        repository="Qwen/Qwen3-14B",
        model=_longer(_qwen(5120, 40, heads=40, kv_heads=8, d_ff=17408), max_sequence=40960),
        differs=QK_NORMS,
    ),
    Preset(
        name="smollm2-135m",
        repository="HuggingFaceTB/SmolLM2-135M",
        model=_smollm2(576, 30, heads=9, kv_heads=3, d_ff=1536),
    ),
    Preset(
        name="smollm2-360m",
        repository="HuggingFaceTB/SmolLM2-360M",
        model=_smollm2(960, 32, heads=15, kv_heads=5, d_ff=2560),
    ),
    Preset(
        name="smollm2-1.7b",
        repository="HuggingFaceTB/SmolLM2-1.7B",
        model=_smollm2(2048, 24, heads=32, kv_heads=32, d_ff=8192).model_copy(
            update={"rope_theta": 130_000.0}
        ),
    ),
    Preset(
        name="smollm3-3b",
        repository="HuggingFaceTB/SmolLM3-3B",
        model=_llama(2048, 36, heads=16, kv_heads=4, d_ff=11008).model_copy(
            update={"rope_theta": 5e6, "norm_eps": 1e-6, "max_sequence": 65536, "tied": True}
        ),
        differs=SOME_POSITIONS,
    ),
)

_NOT_EXPRESSED = (
    (r"(distil)?gpt-?2(-.*)?", "learned positions, LayerNorm with biases, a GELU between two matrices"),
    (r"gpt-?oss.*|mixtral.*|deepseek-?v[23].*|qwen3-\d+b-a.*|llama-?4.*|olmoe.*", "a mixture of experts"),
    (r"gemma.*", "heads that are not d_model / heads wide, and GELU"),
    (r"qwen3-(0\.6b|4b|32b).*", "its heads are 128 wide, not d_model / heads"),
    (r"mistral-(nemo|small).*", "its heads are 128 wide, not d_model / heads"),
    (r"phi-?[1-4].*", "fused projections, or biases and LayerNorm"),
    (r"(pythia|gpt-?neo|gpt-?j|opt|bloom|falcon|mpt|olmo).*", "other norms, positions or biases"),
)
