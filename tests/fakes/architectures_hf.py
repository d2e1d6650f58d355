"""Models of transformers as people bring them, tiny: their config.json, and what they train on.

`CONFIGS[name]` is the whole config.json. `batch_of(name, ...)` is a microbatch for the model's own `forward`:
`tokens` and `labels` for causal language models, else the model's own arguments.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH, WIDTH, LAYERS = 41, 12, 16, 3
IMAGE, PATCH, CLASSES = 8, 4, 3

TOWER = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
IMAGE_SIZES = {"image_size": IMAGE, "patch_size": PATCH}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **TOWER,
    **TOKENS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
_NO_DROPOUT_PROB = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**TOWER, **TOKENS, **_NO_DROPOUT_PROB, "max_position_embeddings": 32, "type_vocab_size": 2}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VIT = {
    **TOWER,
    **IMAGE_SIZES,
    **_NO_DROPOUT_PROB,
    "id2label": {str(i): f"class {i}" for i in range(CLASSES)},
    "label2id": {f"class {i}": i for i in range(CLASSES)},
}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def config_of(kind: str, architecture: str, sizes: dict[str, Any], **own: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], **sizes, **own}


CONFIGS: dict[str, dict[str, Any]] = {
    # Decoders.
    "llama": config_of("llama", "LlamaForCausalLM", LLAMA),
    "smollm3": config_of(
        "smollm3", "SmolLM3ForCausalLM", LLAMA, tie_word_embeddings=True, no_rope_layer_interval=2
    ),
    "qwen2": config_of("qwen2", "Qwen2ForCausalLM", LLAMA, tie_word_embeddings=True),
    "qwen3": config_of("qwen3", "Qwen3ForCausalLM", {**LLAMA, "pad_token_id": VOCABULARY - 1}, head_dim=8),
    "gemma2": config_of(
        "gemma2", "Gemma2ForCausalLM", LLAMA, head_dim=8, sliding_window=4, tie_word_embeddings=True
    ),
    "gemma3": config_of(
        "gemma3_text",
        "Gemma3ForCausalLM",
        LLAMA,
        head_dim=8,
        sliding_window=4,
        sliding_window_pattern=2,
        tie_word_embeddings=True,
    ),
    "mistral": config_of("mistral", "MistralForCausalLM", LLAMA, sliding_window=8),
    "gpt2": config_of(
        "gpt2",
        "GPT2LMHeadModel",
        {},
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": config_of("gpt_neox", "GPTNeoXForCausalLM", {**LLAMA, **_NO_DROPOUT}, rotary_pct=0.5),
    "phi": config_of(
        "phi", "PhiForCausalLM", LLAMA, partial_rotary_factor=0.5, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "phi3": config_of("phi3", "Phi3ForCausalLM", LLAMA, resid_pdrop=0.0, embd_pdrop=0.0),
    "olmo": config_of("olmo", "OlmoForCausalLM", LLAMA),
    "olmo2": config_of("olmo2", "Olmo2ForCausalLM", LLAMA),
    "falcon": config_of(
        "falcon",
        "FalconForCausalLM",
        {**LLAMA, **_NO_DROPOUT},
        multi_query=True,
        new_decoder_architecture=False,
        alibi=False,
        tie_word_embeddings=True,
    ),
    "bloom": config_of(
        "bloom",
        "BloomForCausalLM",
        {**LLAMA, **_NO_DROPOUT},
        n_layer=LAYERS,
        n_head=4,
        tie_word_embeddings=True,
    ),
    "opt": config_of(
        "opt",
        "OPTForCausalLM",
        LLAMA,
        ffn_dim=24,
        word_embed_proj_dim=WIDTH,
        dropout=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=True,
    ),
    # Mixtures of experts.
    "mixtral": config_of("mixtral", "MixtralForCausalLM", LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": config_of(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LLAMA,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        decoder_sparse_step=1,
    ),
    "olmoe": config_of("olmoe", "OlmoeForCausalLM", LLAMA, num_experts=4, num_experts_per_tok=2),
    # Encoder-decoders.
    "t5": config_of("t5", "T5ForConditionalGeneration", _T5, tie_word_embeddings=True),
    "bart": config_of(
        "bart",
        "BartForConditionalGeneration",
        TOKENS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dropout=0.0,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    ),
    # Encoders.
    "bert": config_of("bert", "BertForMaskedLM", _BERT),
    "roberta": config_of("roberta", "RobertaForMaskedLM", _BERT),
    "distilbert": config_of(
        "distilbert",
        "DistilBertForMaskedLM",
        {},
        vocab_size=VOCABULARY,
        dim=WIDTH,
        hidden_dim=24,
        n_layers=LAYERS,
        n_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
    ),
    "vit": config_of("vit", "ViTForImageClassification", _VIT),
    "deit": config_of("deit", "DeiTForImageClassification", _VIT),
    "clip": {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 8,
        "text_config": {**TOWER, **TOKENS, "max_position_embeddings": LENGTH},
        "vision_config": {**TOWER, **IMAGE_SIZES},
    },
}

ENCODER_DECODERS = ("t5", "bart")
MASKED = ("bert", "roberta", "distilbert")
IMAGES = ("vit", "deit")
CONTRASTIVE = ("clip",)
MIXTURES = ("mixtral", "qwen3_moe", "olmoe")
CAUSAL = tuple(n for n in CONFIGS if n not in (*ENCODER_DECODERS, *MASKED, *IMAGES, *CONTRASTIVE))
QUICK = ("llama", "mixtral", "t5")  # one of each kind, for the quick suite


def write_config(name: str, directory: Path) -> Path:
    """`directory`/config.json, as a repository of Hugging Face has it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return path


def batch_of(name: str, seed: int, *, sequences: int = 2) -> dict[str, Tensor]:
    """A microbatch; some labels are -100, and not as many in each row."""
    random = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(3, VOCABULARY, (sequences, LENGTH), generator=random)

    ignored = torch.rand((sequences, LENGTH), generator=random) < 0.2
    labels = tokens().masked_fill(ignored, -100)
    if name in ENCODER_DECODERS or name in MASKED:
        return {"input_ids": tokens(), "labels": labels}
    images = torch.rand((sequences, 3, IMAGE, IMAGE), generator=random)
    if name in IMAGES:
        return {"pixel_values": images, "labels": torch.randint(0, CLASSES, (sequences,), generator=random)}
    if name in CONTRASTIVE:
        return {"input_ids": tokens(), "pixel_values": images}
    return {"tokens": tokens(), "labels": labels}
