"""Effects of each lever on the peak: sharding, recompute, bf16, accumulation.

torchrun --nproc-per-node 2 examples/fsdp_memory_efficient.py
"""

import torch

import fullshard as fs
from fullshard.observe.memory import measure_peak_memory
from fullshard.quantities import format_bytes

SMALL = ["model.layers=4", "model.d_model=64", "model.d_ff=192", "data.sequence_length=64", "train.steps=2"]
LEVERS = {
    "no_shard, fp32": ["sharding.strategy=no_shard", "precision.mode=fp32"],
    "full_shard": ["precision.mode=fp32"],
    "… and recompute full": ["precision.mode=fp32", "recompute.mode=full"],
    "… and bf16 compute": ["precision.mode=bf16", "recompute.mode=full"],
    "… and 4 microbatches": ["precision.mode=bf16", "recompute.mode=full", "train.microbatch=2"],
}


def main() -> None:
    with fs.process_group() as ranks:
        for name, settings in LEVERS.items():
            batch = [f"train.global_batch={8 * ranks.world_size}"]
            run = fs.Run.load(overrides=[*SMALL, *batch, *settings])
            plan = fs.Plan.from_run(run, world_size=ranks.world_size, device=ranks.device.type)
            with torch.device("meta"):
                model = fs.DecoderModel(run.decoder_config)
            fs.shard(model, plan)
            state = fs.TrainState(model, fs.build_optimizer(model, plan), data=fs.build_data(run))
            steps = fs.train(state, plan)
            next(steps)  # the optimizer's state is made in the first step
            with measure_peak_memory(ranks.device, model=model, optimizer=state.optimizer) as peak:
                next(steps)
            if ranks.rank == 0:
                print(f"{name:24} {format_bytes(peak.bytes)} at the peak of rank 0")


if __name__ == "__main__":
    main()
