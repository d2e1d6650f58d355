"""Lesson 5, advanced: hybrid. Sharded within a node, replicated over nodes.

torchrun --nproc-per-node 4 examples/learn/lesson_5_hybrid.py
"""

from lesson import run_lesson

if __name__ == "__main__":
    run_lesson(
        "sharding.strategy=hybrid_shard",
        "sharding.shard_degree=2",
        moments=[
            "microbatch 1: before forward",
            "microbatch 1: forward of block 3",
            "microbatch 1: backward of block 0",
            "before the update",
            "between steps",
        ],
    )
