"""Model families of transformers, tiny: those of `architectures_hf`, and more kinds of models and inputs.

`FAMILIES[name]` is the whole config.json. `batch_of_family(name, ...)` is a microbatch for the model:
`tokens` and `labels` for causal language models, else arguments of its own `forward`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.architectures_hf import (
    CONFIGS,
    IMAGE,
    IMAGE_SIZES,
    LENGTH,
    LLAMA,
    PATCH,
    TOKENS,
    TOWER,
    VOCABULARY,
    WIDTH,
    batch_of,
    config_of,
)

FRAMES, MELS, SAMPLES = 16, 8, 400
PATCHES = (IMAGE // PATCH) ** 2  # of one image
IMAGE_TOKEN = VOCABULARY - 1  # stands in the text for each part of the image

_LAYERS = 2
_TEXT = LLAMA | {"num_hidden_layers": _LAYERS}
_TOWER = {**TOWER, **IMAGE_SIZES, "num_hidden_layers": _LAYERS, "vision_use_head": False}
_QWEN_VISION = {
    "depth": _LAYERS,
    "embed_dim": WIDTH,
    "hidden_size": WIDTH,
    "num_heads": 4,
    "mlp_ratio": 2,
    "intermediate_size": 24,
    "out_hidden_size": WIDTH,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "fullatt_block_indexes": [1],
    "window_size": IMAGE,
}
_QWEN_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 38, "vision_start_token_id": 37}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
_SPEECH = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": _LAYERS,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "pad_token_id": 0,
    **dict.fromkeys(
        ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop"), 0.0
    ),
    "final_dropout": 0.0,
}
_STATE_SPACE = {
    **TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": _LAYERS,
    "state_size": 4,
    "conv_kernel": 2,
    "expand": 2,
    "tie_word_embeddings": False,
}
_MIXTURE = _TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2}

AUDIO: dict[str, dict[str, Any]] = {
    "whisper": config_of(
        "whisper",
        "WhisperForConditionalGeneration",
        TOKENS,
        d_model=WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        max_target_positions=32,
        decoder_start_token_id=1,
    ),
    "wav2vec2": config_of("wav2vec2", "Wav2Vec2ForCTC", _SPEECH),
    "hubert": config_of("hubert", "HubertForCTC", _SPEECH),
    "moonshine": config_of(
        "moonshine",
        "MoonshineForConditionalGeneration",
        _TEXT,
        encoder_num_hidden_layers=_LAYERS,
        decoder_num_hidden_layers=_LAYERS,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        decoder_start_token_id=1,
    ),
}
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "llava": config_of(
        "llava",
        "LlavaForConditionalGeneration",
        {},
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_TOWER},
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
    "qwen2_vl": config_of(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        _QWEN_TOKENS,
        text_config=_TEXT | {"rope_parameters": _ROPE},
        vision_config=_QWEN_VISION,
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": config_of(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        _QWEN_TOKENS,
        text_config=_TEXT | {"rope_parameters": _ROPE},
        vision_config=_QWEN_VISION,
        tie_word_embeddings=False,
    ),
    "mistral3": config_of(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {},
        text_config={"model_type": "mistral", **_TEXT},
        vision_config={"model_type": "pixtral", **_TOWER, "head_dim": 4},
        image_token_index=IMAGE_TOKEN,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    ),
    "paligemma": config_of(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {},
        text_config={"model_type": "gemma", **_TEXT, "head_dim": 4, "tie_word_embeddings": True},
        vision_config={"model_type": "siglip_vision_model", **_TOWER, "projection_dim": WIDTH},
        projection_dim=WIDTH,
        image_token_index=IMAGE_TOKEN,
    ),
    "gemma3_vision": config_of(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {},
        text_config={
            "model_type": "gemma3_text",
            **_TEXT,
            "head_dim": 4,
            "sliding_window": 4,
            "tie_word_embeddings": True,
        },
        vision_config={"model_type": "siglip_vision_model", **_TOWER},
        mm_tokens_per_image=PATCHES,
        image_token_index=IMAGE_TOKEN,
    ),
}
STATE_SPACE: dict[str, dict[str, Any]] = {
    "mamba": config_of("mamba", "MambaForCausalLM", _STATE_SPACE, time_step_rank=2),
    "mamba2": config_of(
        "mamba2", "Mamba2ForCausalLM", _STATE_SPACE, num_heads=4, head_dim=8, n_groups=1, chunk_size=4
    ),
    "falcon_mamba": config_of("falcon_mamba", "FalconMambaForCausalLM", _STATE_SPACE, time_step_rank=2),
    "jamba": config_of(
        "jamba",
        "JambaForCausalLM",
        _TEXT | {"num_hidden_layers": 4},
        num_experts=4,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_d_conv=2,
        mamba_expand=2,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    ),
    "recurrent_gemma": config_of(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        _TEXT | {"num_hidden_layers": 3},
        lru_width=WIDTH,
        attention_window_size=8,
        conv1d_width=2,
        tie_word_embeddings=True,
    ),
    "qwen3_next": config_of(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _TEXT,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_conv_kernel_dim=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
    ),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": config_of(
        "gpt_oss",
        "GptOssForCausalLM",
        _MIXTURE,
        head_dim=4,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek_v3": config_of(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _TEXT | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=12,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    "granitemoe": config_of("granitemoe", "GraniteMoeForCausalLM", _MIXTURE),
    "phimoe": config_of(
        "phimoe", "PhimoeForCausalLM", _MIXTURE, router_jitter_noise=0.0, input_jitter_noise=0.0
    ),
}
DECODERS: dict[str, dict[str, Any]] = {
    "cohere": config_of("cohere", "CohereForCausalLM", _TEXT, tie_word_embeddings=True),
    "granite": config_of("granite", "GraniteForCausalLM", _TEXT, logits_scaling=4.0),
    "stablelm": config_of("stablelm", "StableLmForCausalLM", _TEXT, partial_rotary_factor=0.5),
    "starcoder2": config_of(
        "starcoder2", "Starcoder2ForCausalLM", _TEXT, residual_dropout=0.0, embedding_dropout=0.0
    ),
    "glm4": config_of("glm4", "Glm4ForCausalLM", _TEXT, head_dim=4, partial_rotary_factor=0.5),
    "olmo3": config_of("olmo3", "Olmo3ForCausalLM", _TEXT, sliding_window=8),
}
ADDED = {**AUDIO, **VISION_LANGUAGE, **STATE_SPACE, **MIXTURES, **DECODERS}
FAMILIES: dict[str, dict[str, Any]] = {**CONFIGS, **ADDED}


def batch_of_family(name: str, seed: int, *, sequences: int = 2) -> dict[str, Tensor]:
    """A microbatch of `sequences` rows; with images, one of them in each row."""
    if name not in AUDIO and name not in VISION_LANGUAGE:
        return batch_of(name, seed, sequences=sequences)
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 36, (sequences, LENGTH), generator=random)
    if name == "whisper":
        return {"input_features": torch.randn((sequences, MELS, FRAMES), generator=random), "labels": tokens}
    if name in AUDIO:
        samples = SAMPLES * 8 if name == "moonshine" else SAMPLES
        return {"input_values": torch.randn((sequences, samples), generator=random), "labels": tokens}
    qwen = name.startswith("qwen")
    count = 1 if qwen or name == "mistral3" else PATCHES  # two by two patches are merged
    labels = tokens.clone()
    tokens[:, 1 : 1 + count] = IMAGE_TOKEN
    labels[:, 1 : 1 + count] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if qwen:
        rows = (sequences * PATCHES, 3 * 2 * PATCH * PATCH)
        grid = torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]] * sequences)
        batch |= {"pixel_values": torch.randn(rows, generator=random), "image_grid_thw": grid}
        return batch | {"mm_token_type_ids": (tokens == IMAGE_TOKEN).long()}
    batch["pixel_values"] = torch.randn((sequences, 3, IMAGE, IMAGE), generator=random)
    if name == "mistral3":
        batch["image_sizes"] = torch.tensor([[IMAGE, IMAGE]] * sequences)
    if name in ("paligemma", "gemma3_vision"):
        batch["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    return batch


class FamilyBatches:
    """The data of a run whose `data.options.name` is a family: rows that depend on the step and the rank."""

    def __init__(self, run: Run) -> None:
        self.name = run.data.options["name"]

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        for accumulated in range(plan.accumulation):
            number = (step * plan.accumulation + accumulated) * plan.world_size + rank
            yield batch_of_family(self.name, number, sequences=plan.microbatch)
