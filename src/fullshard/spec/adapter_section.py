"""[adapter]: settings of low-rank fine-tuning (LoRA) of a frozen base model."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fullshard.spec.value import Count, Fraction, FrozenModel, Options, PositiveScalar

# LoraConfig options that need the whole base weights, which no rank ever has, or peft's own model around the
# layers, that import a module, or that have their own key.
_REFUSED = {
    "use_dora": "its magnitudes are norms of the whole base weights",
    "loftq_config": "it rewrites the base weights",
    "kasa_config": "it begins with singular vectors of the base weights",
    "alora_invocation_tokens": "its layers add nothing outside of peft's own model, which finds the tokens",
    "arrow_config": "its layers choose among several adapters, which a run does not have",
    "monteclora_config": "it adds a term to the loss, which only peft's own model computes",
    "use_bdlora": "its block-diagonal factors have initial values of their own",
    "trainable_token_indices": "it needs rows of the base weights; adapter.trained with the embedding",
    "megatron_config": "it imports a module, for layers of Megatron, which are not used here",
    "megatron_core": "it imports a module, for layers of Megatron, which are not used here",
    "r": "it is adapter.rank",
    "lora_alpha": "it is adapter.alpha",
    "lora_dropout": "it is adapter.dropout",
    "target_modules": "it is adapter.targets",
    "modules_to_save": "it is adapter.trained",
    "fan_in_fan_out": "it follows from the modules",
}


class AdapterSection(FrozenModel):
    """Settings of LoRA (Hu et al., arXiv:2106.09685) through peft (extra `hf`).

    A linear module W of `targets` computes W x + alpha / rank · B A x. A and B, of `rank` rows and columns,
    are trained; W is frozen.

    `rank`: 0 adds no adapter, and all parameters are trained
    `targets`: suffixes of module names (`q_proj`), or `all-linear`: every linear module of a block
    `trained`: suffixes of the names of modules that are also trained, in full (`lm_head`, `norm`)
    `base_dtype`: dtype of frozen parameters; `auto` is the dtype in the model's config, else fp32. Frozen
        parameters have no update whose precision matters, no gradient and no optimizer state.
    `save`: contents of checkpoints; with `adapters`, a run reads the base from the source in [model] when it
        starts
    `options`: other values of peft's LoraConfig, such as `use_rslora`, `bias`, `layers_to_transform`
    """

    rank: Count = 0
    alpha: PositiveScalar = 16.0
    dropout: Fraction = 0.0
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    trained: tuple[str, ...] = ()
    base_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    save: Literal["all", "adapters"] = "all"
    options: Options = Field(default_factory=dict[str, Any])

    @property
    def saves_only_adapters(self) -> bool:
        """True if checkpoints contain the adapters without the base model."""
        return self.rank > 0 and self.save == "adapters"

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key, why in _REFUSED.items():
            if key in self.options:
                raise ValueError(f"options.{key} cannot be set here: {why}")
        kind = self.options.get("init_lora_weights", True)
        if kind not in (True, "gaussian"):
            raise ValueError(
                f"options.init_lora_weights = {kind!r} needs the base's values; true or 'gaussian'"
            )
        if self.targets == ():
            raise ValueError('targets = ["q_proj", "v_proj"], or "all-linear"')
        return self
