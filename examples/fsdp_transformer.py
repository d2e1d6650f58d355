"""A transformer on real text: the library's own loop, whose body is yours.

torchrun --nproc-per-node 2 examples/fsdp_transformer.py [section.key=value ...]
"""

import sys

import torch

import fullshard as fs


def main() -> None:
    settings = [
        "model.layers=2",
        "model.d_model=64",
        "model.d_ff=128",
        "data.sequence_length=64",
        "train.steps=30",
    ]
    run = fs.Run.load(overrides=[*settings, "sharding.strategy=full_shard", *sys.argv[1:]])
    with fs.process_group() as ranks:
        plan = fs.Plan.from_run(run, world_size=ranks.world_size, device=ranks.device.type)
        with torch.device("meta"):
            model = fs.DecoderModel(run.decoder_config)
        fs.shard(model, plan)
        state = fs.TrainState(model, fs.build_optimizer(model, plan), data=fs.build_data(run))
        for step in fs.train(state, plan):
            if ranks.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index}: loss {step.loss:.3f}, {step.tokens / step.seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main()
