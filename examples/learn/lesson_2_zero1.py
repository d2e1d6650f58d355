"""Lesson 2, beginner: ZeRO-1. Each rank updates its half of the parameters.

torchrun --nproc-per-node 2 examples/learn/lesson_2_zero1.py
"""

from lesson import run_lesson

if __name__ == "__main__":
    run_lesson("sharding.strategy=zero1")
