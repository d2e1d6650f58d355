"""The items for several GPUs of one machine, in order of worth. Each names the ranks that it needs."""

from dataclasses import replace

from bench.gpu.items import BF16, DOCUMENTS, FAST, SHARED, SMALL, WAITS, Item, Variant, preset_settings
from bench.gpu.one_gpu import LLAMA3_8B

_8B = (*SHARED, *preset_settings("llama3-8b"), *FAST)
_LONG = (*_8B, "data.sequence_length=131072", "model.max_sequence=131072", "recompute.mode=full")
_MIXTURE = (  # Qwen3-30B-A3B, all in bf16
    *(*SHARED, *FAST, "model.vocabulary=151936", "model.d_model=2048", "model.layers=48", "model.heads=32"),
    *("model.kv_heads=4", "model.d_ff=6144", "model.max_sequence=8192", "model.rope_theta=1e6"),
    *("model.experts=128", "model.experts_per_token=8", "model.expert_d_ff=768"),
    *("precision.mode=bf16_pure", "recompute.mode=full"),
)
_EXPERTS = ("model.experts=4", "model.experts_per_token=2", "model.expert_d_ff=128")
_DIVIDED = ("sharding.tensor_parallel=2", "sharding.context_parallel=2")


def _axes(within: float) -> tuple[Variant, ...]:
    """Returns runs whose losses are those of one rank, however the work is divided."""
    options = {"like": "1 rank", "within": within}
    mixture = {"like": "experts, 1 rank", "within": within}
    return (
        Variant("1 rank"),
        Variant("tp 2", _DIVIDED[:1], 2, **options),
        Variant("cp 2", _DIVIDED[1:], 2, **options),
        Variant("tp 2, cp 2, dp 2", _DIVIDED, 8, **options),
        Variant("hybrid 2 x 4", ("sharding.strategy=hybrid_shard", "sharding.shard_degree=4"), 8, **options),
        Variant("no_shard 8", ("sharding.strategy=no_shard",), 8, **options),
        Variant("zero1 2", ("sharding.strategy=zero1",), 2, **options),
        Variant("documents, 1 rank", DOCUMENTS),
        Variant("documents, cp 2", (*_DIVIDED[1:], *DOCUMENTS), 2, "documents, 1 rank", within),
        Variant("experts, 1 rank", _EXPERTS),
        Variant("experts, ep 2", (*_EXPERTS, "sharding.expert_parallel=2"), 2, **mixture),
    )


_HUNDREDS = ("train.steps=400", "train.validate_every=0")
_SURVIVAL = (
    Variant("undisturbed", _HUNDREDS, 2),
    Variant(
        *("rank killed", (*_HUNDREDS, "checkpoint.every=10", "run.restarts=1"), 2, "undisturbed"),
        within=0,
        fault="kill",
    ),
    Variant(
        *("rank stopped", (*_HUNDREDS, "fault_tolerance.watchdog_timeout_seconds=15"), 2),
        fault="stop",
    ),
    Variant("whole", ("train.steps=9",), 8),
    Variant("8 ranks", ("train.steps=3", "checkpoint.mode=async"), 8),
    Variant("then 4", ("train.steps=6",), 4, "whole", continues="8 ranks"),
    Variant("then 8 again", ("train.steps=9",), 8, "whole", continues="8 ranks"),
    Variant(
        "offloaded", ("offload.tier=optimizer:cpu", "checkpoint.mode=async", "checkpoint.every=2"), 8, "whole"
    ),
)


def _checks_and_8b() -> list[Item]:
    hybrid = ("sharding.strategy=hybrid_shard", "sharding.shard_degree=4", "recompute.mode=full")
    peer = (*_8B, "train.loss_chunk=0")
    equal, eight = "losses and norms of one rank", "8B, data parallel"
    return [
        Item("axes/fp32", equal, "runs", SMALL, 240, ranks=8, variants=_axes(1e-3)),
        Item("axes/bf16", equal, "runs", (*SMALL, BF16), 100, ranks=8, variants=_axes(2e-2)[:4]),
        Item("groups", "device memory of each communicator", "groups", seconds=30, ranks=2),
        Item("waits/ranks", "host waits by strategy", "waits", SMALL, 60, (2,), ranks=2),
        Item("links", "collectives of all ranks, as hardware.toml", "calibrate", seconds=120, ranks=2),
        *(
            Item(f"dp/{name}", eight, "train", (*_8B, one), 90, (1, 4), ranks=2)
            for name, one in (
                ("full_shard", "sharding.strategy=full_shard"),
                ("shard_grad_op", "sharding.strategy=shard_grad_op"),
                ("fp8", "precision.mode=fp8"),
            )
        ),
        Item("dp/hybrid", "8B, sharded over 4 ranks", "train", (*_8B, *hybrid), 90, ranks=8),
        Item("dp/plain", "peer: a plain fully_shard loop", "plain", (*peer, WAITS), 90, (1, 4), ranks=2),
        Item("dp/plain-no-waits", "peer: reads no figures", "plain", peer, 90, (1, 4), ranks=2),
        Item("dp/torchtitan", "peer: torchtitan's Llama", "torchtitan", peer, 90, (1, 4), ranks=2),
    ]


def _divided_and_survival() -> list[Item]:
    saved = (*LLAMA3_8B, "train.global_batch=8", "train.steps=2", "checkpoint.every=1", "checkpoint.keep=1")
    modes = (Variant("sync", (), 8), Variant("async", ("checkpoint.mode=async",), 8, "sync"))
    faults = "a killed rank, a stopped rank, other numbers of ranks"
    long = Item("cp/2", "131,072 tokens, divided", settings=_LONG, seconds=90, ranks=2)
    return [
        *(
            Item(f"ep/{name}", "experts divided over ranks", "train", (*_MIXTURE, *own), 120, ranks=n)
            for name, n, compiles in (("2", 2, False), ("8", 8, False), ("8-compiled", 8, True))
            for own in [(f"sharding.expert_parallel={n}", f"run.compile={str(compiles).lower()}")]
        ),
        *(
            replace(long, name=f"cp/{name}", settings=(*_LONG, one), ranks=n, documents=documents)
            for name, n, documents in (("2", 2, 0), ("4", 4, 0), ("8", 8, 0), ("8-documents", 8, 4))
            for one in [f"sharding.context_parallel={n}"]
        ),
        *(
            Item(f"tp/{name}", "matmuls divided over ranks", "train", (*_8B, *own), 75, ranks=n)
            for name, n, compiles in (("2", 2, True), ("4", 4, True), ("8", 8, True), ("8-eager", 8, False))
            for own in [(f"sharding.tensor_parallel={n}", f"run.compile={str(compiles).lower()}")]
        ),
        Item("survival", faults, "runs", SMALL, 240, ranks=8, variants=_SURVIVAL),
        Item("save/8b", "saves of 8B in both modes, verified", "runs", saved, 180, ranks=8, variants=modes),
    ]


SEVERAL_GPUS = (*_checks_and_8b(), *_divided_and_survival())
