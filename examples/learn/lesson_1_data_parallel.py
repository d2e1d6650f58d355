"""Lesson 1, beginner: data parallel (DDP). Every rank holds everything.

torchrun --nproc-per-node 2 examples/learn/lesson_1_data_parallel.py
"""

from lesson import run_lesson

if __name__ == "__main__":
    run_lesson("sharding.strategy=no_shard")
