"""Lesson 6, advanced: tensor parallel. Ranks share each matmul, and send activations.

torchrun --nproc-per-node 2 examples/learn/lesson_6_tensor_parallel.py
"""

from lesson import run_lesson, texts

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


if __name__ == "__main__":
    run_lesson(
        "sharding.strategy=full_shard",
        *TENSOR_PARALLEL,
        moments=[
            "microbatch 1: before forward",
            "microbatch 1: forward of block 1",
            "microbatch 1: backward of block 0",
            "before the update",
            "between steps",
        ],
        names=NAMES,
        make_model=lambda run: fs.DecoderModel(run.decoder_config),
        data=texts,
        loss=fs.next_token_loss,
    )
