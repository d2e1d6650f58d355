"""Saves under one strategy, resumes under another: the checkpoint does not know how it was sharded.

torchrun --nproc-per-node 2 examples/fsdp_checkpoint.py
"""

import tempfile

import torch
import torch.distributed as dist

import fullshard as fs

SMALL = [
    "model.layers=2",
    "model.d_model=64",
    "model.d_ff=128",
    "data.sequence_length=64",
    "precision.mode=fp32",
]


def build(strategy: str, ranks: int, device: str, *, steps: int) -> tuple[fs.TrainState, fs.Plan]:
    run = fs.Run.load(overrides=[*SMALL, f"sharding.strategy={strategy}", f"train.steps={steps}"])
    plan = fs.Plan.from_run(run, world_size=ranks, device=device)
    with torch.device("meta"):
        model = fs.DecoderModel(run.decoder_config)
    fs.shard(model, plan)
    return fs.TrainState(model, fs.build_optimizer(model, plan), data=fs.build_data(run)), plan


def main() -> None:
    with fs.process_group() as ranks, tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)  # all ranks save into the directory of rank 0
        device = ranks.device.type

        state, plan = build("full_shard", ranks.world_size, device, steps=10)
        losses = [step.loss for step in fs.train(state, plan)]
        path = fs.save(state, shared[0], plan=plan)

        state, plan = build("no_shard", ranks.world_size, device, steps=20)
        fs.load(state, shared[0])
        losses += [step.loss for step in fs.train(state, plan)]
        if ranks.rank == 0:
            fs.export(path, f"{own}/model.safetensors")
            print(f"full_shard to step 10: loss {losses[9]:.3f}; no_shard to step 20: loss {losses[-1]:.3f}")
        dist.barrier()  # nobody removes a directory that another still reads


if __name__ == "__main__":
    main()
