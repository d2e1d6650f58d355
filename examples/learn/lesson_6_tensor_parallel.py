"""Lesson 6, advanced: tensor parallel. Ranks share each matmul, and send activations.

torchrun --nproc-per-node 2 examples/learn/lesson_6_tensor_parallel.py
"""

import torch
from lesson import Watch, load_run, show_holders, show_moments, show_sent, texts

import fullshard as fs

# A decoder of two blocks. A step is one microbatch of 8 sequences of 32 tokens, which both ranks read.
TENSOR_PARALLEL = [
    "sharding.tensor_parallel=2",
    "model.layers=2",
    "model.d_model=64",
    "model.d_ff=128",
    "model.heads=4",
    "model.kv_heads=4",
    "data.sequence_length=32",
    "train.global_batch=8",
]
NAMES = [
    "blocks.0.attention.query.weight",
    "blocks.0.attention.output.weight",
    "blocks.0.feed_forward.up.weight",
    "blocks.0.feed_forward.down.weight",
    "blocks.0.feed_forward_norm.weight",
]


def main() -> None:
    with fs.process_group("cpu") as ranks:
        run = load_run("sharding.strategy=full_shard", *TENSOR_PARALLEL)
        plan = fs.Plan.from_run(run, world_size=ranks.world_size, device="cpu")
        with torch.device("meta"):  # no parameter is allocated before it is sharded
            model = fs.DecoderModel(run.decoder_config)
        fs.shard(model, plan)
        optimizer = fs.build_optimizer(model, plan)
        watch = Watch(model, optimizer, loss=fs.next_token_loss)
        state = fs.TrainState(model, optimizer, data=texts(plan, ranks.rank))
        step, sent = watch.second_step(fs.train(state, plan, loss=watch.loss))

        show_holders(model, *NAMES)
        show_moments(
            watch,
            "microbatch 1: before forward",
            "microbatch 1: forward of block 1",
            "microbatch 1: backward of block 0",
            "before the update",
            "between steps",
        )
        show_sent(sent, step)


if __name__ == "__main__":
    main()
