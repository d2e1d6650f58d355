"""Over how many ranks a decoder's matmuls can be divided."""

from fullshard.errors import ShardError
from fullshard.spec.model_section import DecoderConfig


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

    In a mixture, the columns are those of the shared experts. All others are whole.
    """
    shares_kv_heads = config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
    width = config.shared_experts * config.expert_width if config.is_mixture else config.d_ff
    has_tokens = config.vocabulary > (ranks - 1) * -(-config.vocabulary // ranks)
    return config.heads % ranks == 0 and width % ranks == 0 and shares_kv_heads and has_tokens
