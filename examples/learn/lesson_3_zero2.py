"""Lesson 3, intermediate: ZeRO-2. Gradients are sharded as soon as they exist.

torchrun --nproc-per-node 2 examples/learn/lesson_3_zero2.py
"""

from lesson import run_lesson

if __name__ == "__main__":
    run_lesson("sharding.strategy=shard_grad_op")
