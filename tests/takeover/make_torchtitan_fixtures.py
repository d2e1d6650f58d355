"""Makes torchtitan's archives in `fixtures/`: its Llama 3, trained and saved by its own parts on CPU ranks.

It needs triton, which torchtitan imports, and makes the fixture of the version that is installed:

    pip install triton torchtitan==0.3.0      # then again with torchtitan==0.2.2
    python -m tests.takeover.make_torchtitan_fixtures

0.3 fuses queries, keys and values: the state of AdamW is that of `wqkv`, and the weights are saved apart.
The truth has the names of Hugging Face, by torchtitan's own export, for weights and moments alike.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.takeover.tiny import RATE, STEPS, WARMUP, WORDS, batch, loss_of
from tests.takeover.unpacked import pack

WORLD, WIDTH, HEADS, INNER = 2, 12, 2, 5


class TrainState:
    """As torchtitan's Trainer saves its own state."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.__dict__ |= state


def parts_of_0_3(folder: str, state: TrainState) -> SimpleNamespace:
    """Two heads of queries, and two of keys, in one fused matrix, as in all Llamas of torchtitan 0.3."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    rope = llama3.ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=16, theta=500000, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=1, dim=WIDTH, n_heads=HEADS, hidden_dim=INNER, rope=rope, attn_backend="flex"
    )
    layers[0].attention.inner_attention = ScaledDotProductAttention.Config()  # flex needs a compiler
    embedding = llama3.Embedding.Config(
        num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
    )
    head = llama3.Linear.Config(
        in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH)
    )
    norm = llama3.RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT)
    config = llama3.Llama3Model.Config(
        dim=WIDTH, vocab_size=WORDS, tok_embeddings=embedding, norm=norm, lm_head=head, layers=layers
    )
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor"
    )  # the default needs a later torch than 2.13
    with torch.device("meta"):
        model = config.build()
    model = llama3.parallelize_llama(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, WORLD),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder=folder,
    )
    initialise(model)
    settings = default_adamw(lr=RATE)
    settings.implementation = "for-loop"
    optimizers = settings.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=WARMUP)
    schedulers = schedule.build(optimizers=optimizers, training_steps=20)
    manager = CheckpointManager.Config(enable=True, interval=STEPS, keep_latest_k=0).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    adapter = Llama3StateDictAdapter(config, None)
    return SimpleNamespace(
        model=model, optimizers=optimizers, schedulers=schedulers, manager=manager, adapter=adapter
    )


def parts_of_0_2(folder: str, state: TrainState) -> SimpleNamespace:
    """Two heads of queries, and one of keys."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    args = TransformerModelArgs(
        dim=WIDTH, n_layers=1, n_heads=HEADS, n_kv_heads=1, vocab_size=WORDS, max_seq_len=16,
        multiple_of=INNER, ffn_dim_multiplier=0.15,
    )  # fmt: skip
    job = JobConfig()
    job.training.mixed_precision_param, job.training.seq_len = "float32", 6
    job.activation_checkpoint.mode, job.optimizer.implementation = "none", "for-loop"
    job.optimizer.lr, job.lr_scheduler.warmup_steps = RATE, WARMUP
    job.checkpoint.enable, job.checkpoint.interval, job.checkpoint.keep_latest_k = True, STEPS, 0
    dims = ParallelDims(1, WORLD, 1, 1, 1, 1, 1, WORLD)
    with torch.device("meta"):
        model = Transformer(args)
    model = parallelize_llama(model, dims, job)
    initialise(model)
    optimizers = build_optimizers([model], job.optimizer, dims)
    schedulers = build_lr_schedulers(optimizers, job.lr_scheduler, 20)
    manager = CheckpointManager(
        None, [model], optimizers, schedulers, {"train_state": state}, job.checkpoint, None, folder
    )
    adapter = Llama3StateDictAdapter(args, None)
    return SimpleNamespace(
        model=model, optimizers=optimizers, schedulers=schedulers, manager=manager, adapter=adapter
    )


def initialise(model: Any) -> None:
    """Gives a sharded model its values, as torchtitan's Trainer does."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(
                True
            )  # gloo lacks the scaled sum that torchtitan asks for
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)


def full(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().contiguous()


def read_truth(parts: SimpleNamespace) -> dict[str, Tensor]:
    """Returns weights and moments as torchtitan's own export names and permutes them.

    Moments take the places of their parameters in the model, so its own hooks split `wqkv`.
    """
    truth: dict[str, Tensor] = {}
    parameters, optimizer = [*parts.model.parameters()], next(iter(parts.optimizers))
    weights = [one.detach().clone() for one in parameters]
    for key in ("", "exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for own, weight in zip(parameters, weights, strict=True):
                own.copy_(optimizer.state[own][key] if key else weight)
        saved = {name: full(one) for name, one in parts.model.state_dict().items()}
        truth |= {f"{key}.{n}" if key else n: one.clone() for n, one in parts.adapter.to_hf(saved).items()}
    return truth


def make_on_rank(rank: int, folder: str, port: int) -> None:
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA if this is None
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    state = TrainState()
    parts = MAKERS[short_version()](folder, state)
    for step in range(STEPS):
        rows = batch(step).tensor_split(WORLD)[rank]
        parts.optimizers.zero_grad()
        (loss_of(parts.model, rows) / WORLD).backward()
        parts.optimizers.step()
        parts.schedulers.step()
        state.step, state.ntokens_seen = state.step + 1, state.ntokens_seen + batch(step)[:, 1:].numel()
        parts.manager.save(state.step)
    truth = read_truth(parts)
    if rank == 0:
        save_file(truth, Path(folder, "truth.safetensors"))
    dist.destroy_process_group()


MAKERS: dict[str, Callable[[str, TrainState], SimpleNamespace]] = {"0.2": parts_of_0_2, "0.3": parts_of_0_3}


def short_version() -> str:
    return ".".join(version("torchtitan").split(".")[:2])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        fixture = Path(temporary, f"torchtitan_{short_version().replace('.', '_')}")
        fixture.mkdir()
        mp.start_processes(
            make_on_rank, (str(fixture), 29600 + os.getpid() % 1000), nprocs=WORLD, start_method="spawn"
        )
        (fixture / f"checkpoint/step-{STEPS}").rename(fixture / "source")
        (fixture / "checkpoint").rmdir()
        pack(fixture)
    sys.stdout.write(f"made {fixture.name}\n")
