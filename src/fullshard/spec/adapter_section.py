"""[adapter]: fine-tuning by low-rank matrices beside a frozen base."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fullshard.spec.value import Count, Fraction, FrozenModel, Options, PositiveScalar

# What needs values of the whole base, which no rank ever has, or stands elsewhere.
_REFUSED = {
    "use_dora": "its magnitudes are norms of the whole base weights",
    "loftq_config": "it rewrites the base weights",
    "r": "it is adapter.rank",
    "lora_alpha": "it is adapter.alpha",
    "lora_dropout": "it is adapter.dropout",
    "target_modules": "it is adapter.targets",
    "modules_to_save": "it is adapter.trained",
    "fan_in_fan_out": "it follows from the modules",
}


class AdapterSection(FrozenModel):
    """LoRA (Hu et al., arXiv:2106.09685) through peft (extra `hf`): a linear module W of `targets` computes
    W x + alpha / rank · B A x; A and B, of `rank` rows and columns, are trained, W is not. `rank` 0: nothing
    is added, and everything is trained.

    `targets`: ends of modules' names (`q_proj`), or `all-linear`: every linear module of a block. `trained`:
    ends of names of modules that are trained whole beside them (`lm_head`, `norm`).
    `base_dtype`: what frozen parameters are kept in; `auto` is what the model's config says, else fp32. They
    have no update to lose, and cost no gradient and no optimizer state.
    `save`: what checkpoints hold; without the base, a start reads that from where [model] says.
    `options`: other values of peft's LoraConfig, such as `use_rslora`, `bias`, `layers_to_transform`.
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
    def saved_alone(self) -> bool:
        """Whether checkpoints lack the base."""
        return self.rank > 0 and self.save == "adapters"

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
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
