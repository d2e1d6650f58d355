"""Lesson 4, intermediate: ZeRO-3. Parameters are gathered block by block, and freed again.

torchrun --nproc-per-node 2 examples/learn/lesson_4_zero3.py
"""

import torch
from lesson import Net, Watch, batches, load_run, show_holders, show_moments, show_sent

import fullshard as fs


def main() -> None:
    with fs.process_group("cpu") as ranks:
        run = load_run("sharding.strategy=full_shard")
        plan = fs.Plan.from_run(run, world_size=ranks.world_size, device="cpu")
        with torch.device("meta"):  # no parameter is allocated before it is sharded
            model = Net()
        fs.shard(model, plan)
        optimizer = fs.build_optimizer(model, plan)
        watch = Watch(model, optimizer)
        state = fs.TrainState(model, optimizer, data=batches(plan, ranks.rank))
        step, sent = watch.second_step(fs.train(state, plan, loss=watch.loss))

        show_holders(model, "blocks.0.up.weight", "blocks.0.down.weight")
        show_moments(
            watch,
            "microbatch 1: before forward",
            "microbatch 1: forward of block 0",
            "microbatch 1: forward of block 3",
            "microbatch 1: backward of block 3",
            "microbatch 1: backward of block 0",
            "microbatch 2: before forward",
            "before the update",
            "between steps",
        )
        show_sent(sent, step)


if __name__ == "__main__":
    main()
