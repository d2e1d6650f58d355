"""Hands weights to a process that generates, while the model trains: what a rollout of RL does.

torchrun --nproc-per-node 2 examples/hand_off.py [section.key=value ...]

Rank 0 starts the receiver, which has the model of transformers, unsharded. Every 10 steps it gets all
weights, bucket by bucket, and continues a text. Buckets travel as the bytes of a safetensors file; on one
machine with GPUs an engine would rather get handles of their memory.
"""

import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fullshard as fs

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SETTINGS = ["data.sequence_length=64", "data.source=stdlib", "train.steps=30", "sharding.strategy=full_shard"]
PROMPT = b"def main("


def train(overrides: list[str]) -> None:
    directory = "runs/hand_off"
    with fs.process_group() as ranks:
        if ranks.rank == 0:
            LlamaConfig(vocab_size=256, max_position_embeddings=64, **SIZES).save_pretrained(directory)
        dist.barrier()
        run = fs.Run.load(overrides=[f"model.hf={directory}", *SETTINGS, *overrides])
        plan = fs.Plan.from_run(run, world_size=ranks.world_size, device=ranks.device.type)
        model = fs.shard(fs.meta_model(directory), plan)
        state = fs.TrainState(model, fs.build_optimizer(model, plan), data=fs.build_data(run))
        receiver = start_receiver(directory) if ranks.rank == 0 else None
        for step in fs.train(state, plan):
            if step.index % 10:
                continue
            for bucket in fs.iterate_weights(model, plan, bucket_bytes=100_000):  # on every rank
                if receiver is not None:
                    receiver.send_bytes(save({name: one.cpu() for name, one in bucket.items()}))
            if receiver is not None:
                receiver.send_bytes(b"")
                print(f"step {step.index}: {receiver.recv_bytes().decode()}")
        if receiver is not None:
            receiver.close()


def start_receiver(directory: str) -> Connection:
    with Listener() as listener:
        subprocess.Popen([sys.executable, __file__, "receive", directory, str(listener.address)])
        return listener.accept()


def receive(directory: str, address: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()
    model.model.rotary_emb.to_empty(device="cpu").__init__(model.config)  # its table is in no checkpoint
    with Client(address) as trainer, suppress(EOFError):  # until the trainer closes
        while True:
            missing = set(model.state_dict())
            buckets = 0
            while data := trainer.recv_bytes():
                missing -= (bucket := load(data)).keys()
                model.load_state_dict(bucket, strict=False, assign=True)
                buckets += 1
            text = model.generate(torch.tensor([list(PROMPT)]), max_new_tokens=20, do_sample=False)[0]
            trainer.send_bytes(
                f"{buckets} buckets, {len(missing)} missing: {bytes(text.tolist())!r}".encode()
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        receive(*sys.argv[2:])
    else:
        train(sys.argv[1:])
