"""Draws settings at random from the cross of models and mechanisms, for bench/runs.py.

python bench/draw.py RANKS COUNT SEED [chunked] > SETTINGS.toml

With `chunked`, the logits of each setting are computed in chunks of a random number of rows.
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
STRATEGIES = {
    "no_shard": [],
    "zero1": [],
    "shard_grad_op": [],
    "full_shard": [],
    "hybrid_shard": ["sharding.shard_degree=2"],
    "hybrid_shard_zero2": ["sharding.shard_degree=2"],
    "hpz": ["sharding.reshard_after_forward=2"],
}


def setting(draw: random.Random, ranks: int) -> tuple[str, list[str]]:
    model = draw.choice(list(MODELS))
    strategy = draw.choice([name for name in STRATEGIES if not STRATEGIES[name] or ranks == 4])
    precision = draw.choice(["fp32", "fp32", "bf16", "bf16_reduce", "bf16_pure"])
    recompute = draw.choice(["none", "full", "every", "selective"])
    prefetch = draw.choice(["implicit", "implicit", "none", "explicit"])
    microbatch, accumulation = draw.choice([1, 2, 3, 5]), draw.choice([1, 1, 2, 3])
    sequence = draw.choice([32, 64, 128])
    name = f"{model} {strategy} {precision} {recompute} {prefetch} {microbatch}x{accumulation}x{sequence}"
    return name, [
        *(f"model.{one}" for one in MODELS[model].split()),
        f"sharding.strategy={strategy if strategy != 'hpz' else 'full_shard'}",
        *STRATEGIES[strategy],
        f"precision.mode={precision}",
        f"recompute.mode={recompute}",
        f"prefetch.mode={prefetch}",
        *(
            [f"prefetch.forward={draw.choice([1, 2])}", "prefetch.backward=2"]
            if prefetch == "explicit"
            else []
        ),
        f"train.microbatch={microbatch}",
        f"train.global_batch={microbatch * accumulation * ranks}",
        f"data.sequence_length={sequence}",
    ]


def with_chunked_logits(draw: random.Random, name: str, overrides: list[str]) -> tuple[str, list[str]]:
    rows = draw.choice([8, 16, 32])
    return f"{name} chunk {rows}", [*overrides, f"train.loss_chunk={rows}"]


def main(ranks: int, count: int, seed: int, *, chunked: bool) -> None:
    draw = random.Random(seed)
    drawn: dict[str, list[str]] = {}
    while len(drawn) < count:
        one = setting(draw, ranks)
        drawn |= dict([with_chunked_logits(draw, *one) if chunked else one])
    for name, overrides in drawn.items():
        print(f'[[setting]]\nname = "{name}"\noverrides = {overrides}\n')


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), chunked=sys.argv[4:] == ["chunked"])
