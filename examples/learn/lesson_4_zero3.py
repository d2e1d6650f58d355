"""Lesson 4, intermediate: ZeRO-3. Parameters are gathered block by block, and freed again.

torchrun --nproc-per-node 2 examples/learn/lesson_4_zero3.py
"""

from lesson import run_lesson

if __name__ == "__main__":
    run_lesson(
        "sharding.strategy=full_shard",
        moments=[
            "microbatch 1: before forward",
            "microbatch 1: forward of block 0",
            "microbatch 1: forward of block 3",
            "microbatch 1: backward of block 3",
            "microbatch 1: backward of block 0",
            "microbatch 2: before forward",
            "before the update",
            "between steps",
        ],
    )
