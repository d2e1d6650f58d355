"""[model]: the reference decoder by its sizes, a Hugging Face model, or any Python module; its division."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from fullshard.errors import PlanError, ShardError
from fullshard.spec import value

MOST_LAYERS = 2_048  # the deepest models ever trained have about a thousand layers


class DecoderConfig(value.FrozenModel):
    """Sizes of the reference decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    The defaults are a model that is small enough to learn in two minutes on two cores. Instead of sizes, the
    section may have `hf` (a transformers model) or `python` (any module): docs/models.md.

    `experts`: number of experts in each feed-forward layer (a mixture of experts); 0 is one dense layer
    `experts_per_token`: number of experts that each token goes to
    `expert_d_ff`: inner width of one expert; 0 is `d_ff`
    `shared_experts`: number of further experts that every token goes to
    `balance_loss`: factor of the loss that balances the tokens among the experts of each layer, sequence by
        sequence; 0 for none
    `balance_bias_rate`: change per step of the bias by which DeepSeek-V3 balances experts without a loss
        (0.001 there); 0 for none
    """

    vocabulary: value.PositiveCount = 256
    d_model: value.PositiveCount = 320
    layers: Annotated[int, value.NUMBER, Field(gt=0, le=MOST_LAYERS)] = 4
    heads: value.PositiveCount = 4
    kv_heads: value.PositiveCount = 2
    d_ff: value.PositiveCount = 960
    max_sequence: value.PositiveCount = 2048
    rope_theta: value.PositiveScalar = 10_000.0
    norm_eps: value.PositiveScalar = 1e-5
    tied: bool = False
    experts: value.Parts = 0
    experts_per_token: value.PositiveCount = 2
    expert_d_ff: value.Count = 0
    shared_experts: value.Count = 0
    balance_loss: value.NonNegativeScalar = 0.0
    balance_bias_rate: value.NonNegativeScalar = 0.0

    @property
    def is_mixture(self) -> bool:
        """True if the feed-forward layers have experts."""
        return self.experts > 0

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_d_ff or self.d_ff

    @property
    def inactive_parameters(self) -> int:
        """Number of parameters of experts that a token does not go to."""
        each = 3 * self.d_model * self.expert_width
        return self.layers * (self.experts - self.experts_per_token) * each if self.is_mixture else 0

    @model_validator(mode="after")
    def _check_experts_and_shapes(self) -> Self:
        if self.is_mixture and self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token} is over experts = {self.experts}")
        settings = ("shared_experts", "expert_d_ff", "balance_loss", "balance_bias_rate")
        given = [name for name in settings if getattr(self, name)]
        if given and not self.is_mixture:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])} needs experts = <number of experts>")
        if self.d_model % self.heads:
            raise ValueError(f"heads = {self.heads} must divide d_model = {self.d_model}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if (self.d_model // self.heads) % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.d_model // self.heads}")
        return self


class HuggingFaceModel(value.FrozenModel):
    """Settings of a model of the library transformers (extra `hf`).

    `hf`: a name in this machine's cache, a directory, or a config.json
    `weights`: `auto` reads the weights beside the config, if any, and reports it; `require` fails without
        them; `none` initialises
    `architecture`: a class of transformers; `auto` is the one that the config names, else a causal language
        model
    `attention`: the kernel, by its transformers name (`sdpa`, `eager`, `flex_attention`, …); `auto` is
        transformers' own choice, `sdpa` if the model supports it
    `trust_remote_code`: true runs the Python code that comes with the model (`auto_map` in its config.json),
        which has your permissions on this machine; false refuses a model that cannot be built without it
    `options`: replace values of the config (`num_hidden_layers = 2`)
    """

    hf: value.PathText
    weights: Literal["auto", "require", "none"] = "auto"
    architecture: str = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False
    options: value.Options = Field(default_factory=dict[str, Any])

    @property
    def setting_text(self) -> str:
        """The setting `hf` and its value, for messages."""
        return f"hf = {self.hf!r}"


class PythonModel(value.FrozenModel):
    """Settings of any `nn.Module`, which a function of the user creates.

    `python`: `package.module:factory`, which is called with `options`. Tensors that it creates with
        `torch.empty` (parameters) take no memory.
    """

    python: str
    options: value.Options = Field(default_factory=dict[str, Any])

    @property
    def setting_text(self) -> str:
        """The setting `python` and its value, for messages."""
        return f"python = {self.python!r}"


def _model_section_class_name(data: Any) -> str:
    if isinstance(data, value.FrozenModel):
        return type(data).__name__
    keys: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    named = {"hf": "HuggingFaceModel", "python": "PythonModel"}
    return next((kind for key, kind in named.items() if key in keys), "DecoderConfig")


ModelSection = Annotated[
    Annotated[DecoderConfig, Tag("DecoderConfig")]
    | Annotated[HuggingFaceModel, Tag("HuggingFaceModel")]
    | Annotated[PythonModel, Tag("PythonModel")],
    Discriminator(_model_section_class_name),
]


def check_decoder_can_be_split(config: DecoderConfig, ranks: int) -> None:
    """Raises ShardError unless `ranks` ranks can compute whole heads, and equal shares of the columns."""
    if can_decoder_be_split(config, ranks):
        return
    possible = [n for n in range(1, config.heads + 1) if can_decoder_be_split(config, n)]
    nearest = min(possible, key=lambda n: (abs(n - ranks), n))
    raise ShardError(
        f"the decoder's matmuls cannot be divided over {ranks} ranks.",
        got=f"sharding.tensor_parallel = {ranks}; model.heads = {config.heads}, model.kv_heads = "
        f"{config.kv_heads}, model.d_ff = {config.d_ff}, model.shared_experts = {config.shared_experts}, "
        f"model.vocabulary = {config.vocabulary}",
        why="each rank computes whole heads, and an equal share of the columns of the feed-forward",
        fix=f"sharding.tensor_parallel = {nearest}"
        + (f", or another of {possible}" if len(possible) > 2 else ""),
    )


def can_decoder_be_split(config: DecoderConfig, ranks: int) -> bool:
    """Returns whether `ranks` divides heads and d_ff; kv heads may be fewer, and then divide `ranks`.

    Every rank must also get a part of the vocabulary. In a mixture, `ranks` divides the width of the shared
    experts in place of d_ff; all other experts are whole.
    """
    shares_kv_heads = config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
    width = config.shared_experts * config.expert_width if config.is_mixture else config.d_ff
    has_tokens = config.vocabulary > (ranks - 1) * -(-config.vocabulary // ranks)
    return config.heads % ranks == 0 and width % ranks == 0 and shares_kv_heads and has_tokens


def expert_shard_dim(shape: tuple[int, ...], shard_degree: int, *, keeps_rows: bool = False) -> int:
    """Returns the dim in which FSDP2 shards stacked experts (experts, ...) over `shard_degree` ranks.

    With fewer experts than ranks, shards of dim 0 would leave ranks without any. So it is the first dim that
    the ranks divide evenly, which FSDP2 requires of all dims except the first, or else dim 0.

    keeps_rows: whether the last dim of three stays whole, as packed rows do
    """
    dims = enumerate(shape[:2] if keeps_rows else shape)
    return next((dim for dim, size in dims if size % shard_degree == 0), 0)


def indivisible_experts_error(experts: int, *, ranks: int, key: str) -> PlanError:
    """Returns the error for a number of experts that `ranks` ranks cannot divide evenly."""
    if not experts:
        return PlanError(
            "the model has no experts to divide over ranks.",
            got=f"sharding.expert_parallel = {ranks}, {key} = 0",
            fix="sharding.expert_parallel = 1, or a mixture of experts",
        )
    divisors = [ranks for ranks in range(1, experts + 1) if experts % ranks == 0]
    return PlanError(
        f"{experts} experts cannot be divided over {ranks} ranks.",
        got=f"sharding.expert_parallel = {ranks}, {key} = {experts}",
        why="each rank has equally many experts",
        fix=f"sharding.expert_parallel = one of {divisors}",
    )
