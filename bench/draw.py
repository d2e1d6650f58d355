"""Draws settings at random from the cross of models and mechanisms, for bench/runs.py.

python bench/draw.py RANKS COUNT SEED [chunked | shared | axes | large] > SETTINGS.toml

With `chunked`, the logits of each setting are computed in chunks of a random number of rows. With `shared`,
two or more ranks share each matmul, and some share sequences as well. With `axes`, ranks share sequences or
divide the experts of a mixture, and some share matmuls as well. `large` are `axes` of models and sequences in
which computing takes most of a step on a CPU; in the other models the host's launches do.
"""

import random
import sys

MODELS = {
    "small": "d_model=128 layers=3 d_ff=384 vocabulary=1024",
    "deep": "d_model=96 layers=11 d_ff=256 vocabulary=512",
    "vocabulary": "d_model=128 layers=4 d_ff=320 vocabulary=8192",
    "tied": "d_model=160 layers=6 d_ff=448 vocabulary=2048 tied=true",
    "wide": "d_model=320 layers=4 d_ff=960 vocabulary=256",
    "uneven": "d_model=120 layers=5 d_ff=383 vocabulary=1021",
}
LARGE_MODELS = {
    "narrow": "d_model=384 layers=4 d_ff=1024 vocabulary=2048",
    "deep": "d_model=320 layers=8 d_ff=896 vocabulary=1024",
    "vocabulary": "d_model=384 layers=2 d_ff=1024 vocabulary=16384",
    "tied": "d_model=512 layers=3 d_ff=1408 vocabulary=8192 tied=true",
    "wide": "d_model=768 layers=2 d_ff=2048 vocabulary=4096",
    "uneven": "d_model=360 layers=3 d_ff=1021 vocabulary=5003",
}
STRATEGIES = {
    "no_shard": [],
    "zero1": [],
    "shard_grad_op": [],
    "full_shard": [],
    "hybrid_shard": ["sharding.shard_degree=2"],
    "hybrid_shard_zero2": ["sharding.shard_degree=2"],
}


def setting(draw: random.Random, ranks: int, *, large: bool) -> tuple[str, list[str]]:
    models = LARGE_MODELS if large else MODELS
    model = draw.choice(list(models))
    strategy = draw.choice([name for name in STRATEGIES if not STRATEGIES[name] or ranks == 4])
    precision = draw.choice(["fp32", "fp32", "bf16", "bf16_reduce", "bf16_pure"])
    recompute = draw.choice(["none", "full", "selective"])
    microbatch, accumulation = draw.choice([1, 2, 3, 5]), draw.choice([1, 1, 2, 3])
    sequence = draw.choice([64, 128, 256] if large else [32, 64, 128])
    name = f"{model} {strategy} {precision} {recompute} {microbatch}x{accumulation}x{sequence}"
    return name, [
        *(f"model.{one}" for one in models[model].split()),
        f"sharding.strategy={strategy}",
        *STRATEGIES[strategy],
        f"precision.mode={precision}",
        f"recompute.mode={recompute}",
        f"train.microbatch={microbatch}",
        f"train.global_batch={microbatch * accumulation * ranks}",
        f"data.sequence_length={sequence}",
    ]


def with_chunked_logits(draw: random.Random, name: str, overrides: list[str]) -> tuple[str, list[str]]:
    rows = draw.choice([8, 16, 32])
    return f"{name} chunk {rows}", [*overrides, f"train.loss_chunk={rows}"]


def with_shared_matmuls(
    draw: random.Random, name: str, overrides: list[str], *, ranks: int
) -> tuple[str, list[str]]:
    tensor = draw.choice([one for one in (2, 4) if ranks % one == 0])
    context = draw.choice([1, 1, 2]) if ranks >= 2 * tensor else 1
    heads, kv_heads = draw.choice([(8, 8), (4, 2), (8, 1)])
    data = dict(one.split("=", 1) for one in overrides)
    batch = int(data["train.global_batch"]) // (tensor * context)
    own = {
        "model.heads": heads,
        "model.kv_heads": kv_heads,
        "sharding.tensor_parallel": tensor,
        "sharding.context_parallel": context,
        "train.global_batch": batch,
        "train.loss_chunk": draw.choice([0, 16]),
    }
    own |= {"model.d_ff": 384} if "uneven" in name else {}
    name = (
        f"{name} tensor {tensor} context {context} heads {heads}/{kv_heads} chunk {own['train.loss_chunk']}"
    )
    return name, [*overrides, *(f"{key}={value}" for key, value in own.items())]


def with_all_axes(
    draw: random.Random, name: str, overrides: list[str], *, ranks: int, scale: int
) -> tuple[str, list[str]]:
    axes = [
        (tensor, context, expert)
        for tensor in (1, 2, 4)
        for context in (1, 2, 4)
        for expert in (1, 2, 4)
        if ranks % (tensor * context) == 0 and ranks % expert == 0 and context * expert > 1
    ]
    tensor, context, expert = draw.choice(axes)
    heads, kv_heads = draw.choice([(8, 8), (4, 4)])
    data = dict(one.split("=", 1) for one in overrides)
    own = {
        "model.heads": heads,
        "model.kv_heads": kv_heads,
        "sharding.tensor_parallel": tensor,
        "sharding.context_parallel": context,
        "sharding.expert_parallel": expert,
        "train.global_batch": int(data["train.global_batch"]) // (tensor * context),
        "train.loss_chunk": draw.choice([0, 16]) * scale**2,
    }
    if "uneven" in name:  # its width and vocabulary remain odd
        own |= {"model.d_ff": 384, "model.heads": 4, "model.kv_heads": 4}
    mixture = expert > 1 or draw.random() < 0.3
    if mixture:
        own |= {
            "model.experts": 8,
            "model.expert_d_ff": draw.choice([64, 128]) * scale,
            "model.shared_experts": draw.choice([0, 1]),
            "model.balance_loss": draw.choice([0, 0.01]),
        }
    name += f" tensor {tensor} context {context} expert {expert}"
    name += f" of {own['model.experts']}, {own['model.shared_experts']} shared" if mixture else ""
    return f"{name} chunk {own['train.loss_chunk']}", [*overrides, *(f"{k}={v}" for k, v in own.items())]


def main(ranks: int, count: int, seed: int, *, form: str) -> None:
    draw = random.Random(seed)
    drawn: dict[str, list[str]] = {}
    while len(drawn) < count:
        one = setting(draw, ranks, large=form == "large")
        if form in ("shared", "axes", "large") and "hybrid" in one[0]:
            continue
        if form == "chunked":
            one = with_chunked_logits(draw, *one)
        elif form in ("axes", "large"):
            one = with_all_axes(draw, *one, ranks=ranks, scale=4 if form == "large" else 1)
        elif form == "shared":
            one = with_shared_matmuls(draw, *one, ranks=ranks)
        drawn |= dict([one])
    for name, overrides in drawn.items():
        print(f'[[setting]]\nname = "{name}"\noverrides = {overrides}\n')


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), form="".join(sys.argv[4:]))
