"""The items for several GPUs of one machine, in order of worth. Each names the ranks that it needs."""

from bench.gpu.items import BF16, FAST, SHARED, SMALL, WAITS, Item, Variant, preset_settings
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
        Variant("documents, 1 rank", ("data.document_mask=true",)),
        Variant(
            "documents, cp 2", (*_DIVIDED[1:], "data.document_mask=true"), 2, "documents, 1 rank", within
        ),
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


def _items() -> list[Item]:
    saved = (*LLAMA3_8B, "train.global_batch=8", "train.steps=2", "checkpoint.every=1", "checkpoint.keep=1")
    return [
        Item("axes/fp32", "losses and norms of one rank", "runs", SMALL, 240, ranks=8, variants=_axes(1e-3)),
        Item(
            *("axes/bf16", "losses and norms of one rank", "runs", (*SMALL, BF16), 240),
            ranks=8,
            variants=_axes(2e-2)[:4],
        ),
        Item("groups", "device memory of each communicator", "groups", seconds=30, ranks=2),
        Item("waits/ranks", "host waits by strategy", "waits", SMALL, 60, (2,), ranks=2),
        Item("links", "collectives of all ranks, as hardware.toml", "calibrate", seconds=120, ranks=2),
        *(
            Item(f"dp/{name}", "8B, data parallel", kind, (*_8B, *settings), 90, (1, 4), ranks=2)
            for name, kind, settings in (
                ("full_shard", "train", ("sharding.strategy=full_shard",)),
                ("shard_grad_op", "train", ("sharding.strategy=shard_grad_op",)),
                ("fp8", "train", ("precision.mode=fp8",)),
            )
        ),
        Item(
            *("dp/hybrid", "8B, sharded over 4 of the ranks", "train"),
            settings=(
                *_8B,
                "sharding.strategy=hybrid_shard",
                "sharding.shard_degree=4",
                "recompute.mode=full",
            ),
            seconds=90,
            ranks=8,
        ),
        *(
            Item(
                f"dp/{name}", f"peer: {what}", kind, (*_8B, "train.loss_chunk=0", *waits), 90, (1, 4), ranks=2
            )
            for name, what, kind, waits in (
                ("plain", "a plain fully_shard loop", "plain", (WAITS,)),
                ("plain-no-waits", "that reads no figures", "plain", ()),
                ("torchtitan", "torchtitan's Llama", "torchtitan", ()),
            )
        ),
        *(
            Item(f"ep/{n}", "experts divided over ranks", "train", (*_MIXTURE, one), 120, ranks=n)
            for n in (2, 4, 8)
            for one in [f"sharding.expert_parallel={n}"]
        ),
        *(
            Item(
                f"cp/{n}{'-documents' if count else ''}",
                "131,072 tokens, divided",
                "train",
                own,
                90,
                ranks=n,
                documents=count,
            )
            for n, count in ((2, 0), (4, 0), (8, 0), (8, 4))
            for own in [(*_LONG, f"sharding.context_parallel={n}")]
        ),
        *(
            Item(
                f"tp/{n}{'-eager' if not compiles else ''}",
                "matmuls divided over ranks",
                "train",
                own,
                75,
                ranks=n,
            )
            for n, compiles in ((2, True), (4, True), (8, True), (8, False))
            for own in [(*_8B, f"sharding.tensor_parallel={n}", f"run.compile={str(compiles).lower()}")]
        ),
        Item(
            *("survival", "a killed rank, a stopped rank, other numbers of ranks", "runs", SMALL, 240),
            ranks=8,
            variants=_SURVIVAL,
        ),
        Item(
            *("save/8b", "seconds of saves of 8B, both modes, and verified", "runs", saved, 180),
            ranks=8,
            variants=(
                Variant("sync", (), 8),
                Variant("async", ("checkpoint.mode=async",), 8, "sync", within=1e-3),
            ),
        ),
    ]


SEVERAL_GPUS = tuple(_items())
