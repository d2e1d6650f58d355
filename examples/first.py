"""Beginner: shards a model over the ranks, and prints how much of it each rank holds.

torchrun --nproc-per-node 2 examples/first.py
"""

from torch import nn

import fullshard as fs

with fs.process_group() as ranks:
    run = fs.Run.load(overrides=["sharding.strategy=full_shard"])
    plan = fs.Plan.from_run(run, world_size=ranks.world_size, device=ranks.device.type)
    model = fs.shard(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), plan)
    held = sum(one.to_local().numel() for one in model.parameters())
    print(f"rank {ranks.rank} of {ranks.world_size} holds {held:,} of 2,101,248 parameters")
