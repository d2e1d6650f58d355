"""Writes archives of DeepSpeed's checkpoints, each with the tensors of the engine that saved it.

It needs the package deepspeed 0.19, and no GPU:

    DS_BUILD_OPS=0 pip install "deepspeed==0.19.*"
    python -m tests.takeover.make_deepspeed_fixtures [NAME...]
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor

from tests.takeover.deepspeed_model import SmallModel, batch, loss_of, parameter_groups
from tests.takeover.unpacked import pack

STEPS = 3


@dataclass(frozen=True)
class Fixture:
    """A checkpoint to write: DeepSpeed's settings, and the model's and the run's.

    zero: the keys of zero_optimization
    precision: "fp32", "bf16" or "fp16"
    more: further keys of the config
    universal: writes its universal form instead
    """

    zero: dict[str, Any]
    precision: str = "fp32"
    ranks: int = 2
    tied: bool = False
    frozen: bool = False
    blocks: int = 2
    more: tuple[tuple[str, Any], ...] = ()
    universal: bool = False


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
SUBGROUPS = {"stage": 3, "sub_group_size": 40, "stage3_param_persistence_threshold": 0}
ALIGNED = {"stage": 2, "parameter_alignment": True, "round_robin_gradients": True}
ACCUMULATED = ("data_types", {"grad_accum_dtype": "fp32"})
FIXTURES_BY_NAME = {
    "zero1_bf16": Fixture({"stage": 1}, "bf16"),
    "zero1_tied_frozen": Fixture({"stage": 1}, ranks=3, tied=True, frozen=True),
    "zero1_fp16": Fixture({"stage": 1}, "fp16"),
    "zero2_fp32": Fixture({"stage": 2}, ranks=3),
    "zero2_round_robin": Fixture({"stage": 2, "round_robin_gradients": True}),
    "zero2_aligned": Fixture(ALIGNED, "bf16", ranks=3),
    "zero2_offload": Fixture({"stage": 2} | OFFLOADED, "bf16", frozen=True),
    "zero3_bf16": Fixture({"stage": 3}, "bf16", ranks=3, tied=True),
    "zero3_subgroups": Fixture(SUBGROUPS, frozen=True),
    "zero3_offload": Fixture({"stage": 3} | OFFLOADED),
    "bf16_optimizer": Fixture({"stage": 1}, "bf16", ranks=3, more=(ACCUMULATED,)),
    "universal1": Fixture({"stage": 1}, "bf16", tied=True, frozen=True, blocks=1, universal=True),
    "universal3": Fixture({"stage": 3}, frozen=True, blocks=1, universal=True),
}


def config_of(fixture: Fixture) -> dict[str, Any]:
    """Returns DeepSpeed's settings of a fixture."""
    precision = {"enabled": True} | (
        {"initial_scale_power": 18, "hysteresis": 1} if fixture.precision == "fp16" else {}
    )
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": fixture.zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_num_steps": 10,
                "warmup_max_lr": 1e-2,
                "warmup_min_lr": 1e-3,
                "warmup_type": "linear",
            },
        },
        **({} if fixture.precision == "fp32" else {fixture.precision: precision}),
        **dict(fixture.more),
    }


def make_on_rank(rank: int, name: str, folder: str, port: int) -> None:
    """Trains a fixture's model on one rank, and saves it and its truth."""
    fixture = FIXTURES_BY_NAME[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(fixture.ranks)}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed  # after the environment, which it reads at import

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else every rank waits for a C++ compiler
    deepspeed.init_distributed("gloo")
    # torch computes fp16 on the CPU, if slowly, and DeepSpeed asks whether it is fast
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = SmallModel(tied=fixture.tied, frozen=fixture.frozen, blocks=fixture.blocks)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(fixture))
    rates: list[list[float]] = []
    for step in range(STEPS):
        rates.append(engine.get_lr())
        engine.backward(loss_of(engine, batch(step, rank)))
        engine.step()
    engine.save_checkpoint(folder)
    tensors = gathered_tensors(engine, stage=fixture.zero["stage"])
    if rank == 0:
        values = {
            "rates": [*rates, engine.get_lr()],
            "steps": engine.global_steps,
            "skipped": engine.skipped_steps,
            "samples": engine.global_samples,
            "scale": getattr(engine.optimizer, "cur_scale", None),
        }
        save_file(tensors, Path(folder, "truth.safetensors"), {"values": json.dumps(values)})
    dist.barrier()


def gathered_tensors(engine: Any, *, stage: int) -> dict[str, Tensor]:
    """Returns the masters, frozen parameters and buffers of the live engine, and moments as KEY.NAME."""
    tensors = dict(engine.module.named_buffers())
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed_gathered(parameter, stage=stage):
                tensors[name] = parameter.detach().clone()
        else:
            found = zero3_state(parameter) if stage == 3 else flat_state(engine.optimizer, parameter)
            tensors |= {f"{key}{name}": value for key, value in found.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def deepspeed_gathered(parameter: Tensor, *, stage: int) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3)


def zero3_state(parameter: Tensor) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    moments = ("exp_avg", "exp_avg_sq")
    found = {f"{one}.": safe_get_full_optimizer_state(parameter, one) for one in moments}
    return {"": safe_get_full_fp32_param(parameter)} | found


def flat_state(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the state of a parameter of ZeRO-1 or ZeRO-2, at its place in the memory of its group.

    DeepSpeed's own `safe_get_full_fp32_param` has the order of `param_slice_mappings`, which is not that of
    the memory with round_robin_gradients (0.19.8).
    """
    is_bf16 = hasattr(optimizer, "bf16_groups_flat")
    buffers = optimizer.bf16_groups_flat if is_bf16 else optimizer.bit16_groups_flat
    masters = optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups
    for buffer, master in zip(buffers, masters, strict=True):
        begin = (parameter.data_ptr() - buffer.data_ptr()) // buffer.element_size()
        if 0 <= begin < buffer.numel():
            state = optimizer.optimizer.state[master]
            own = {"": master.detach(), "exp_avg.": state["exp_avg"], "exp_avg_sq.": state["exp_avg_sq"]}
            end = begin + parameter.numel()
            return {key: gathered(one)[begin:end].view(parameter.shape) for key, one in own.items()}
    raise LookupError("a parameter outside of all groups")


def gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def make(name: str) -> None:
    """Writes one fixture, in place of its older form."""
    fixture = FIXTURES_BY_NAME[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, name)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        torch.multiprocessing.spawn(make_on_rank, (name, str(folder), port), nprocs=fixture.ranks)
        if fixture.universal:
            folder = universal_form(folder)
        for recovery_script in folder.glob("*.py"):
            recovery_script.unlink()
        packed = Path(temporary, "packed", name)
        packed.parent.mkdir()
        pack(folder.rename(packed))


def universal_form(folder: Path) -> Path:
    """Writes the universal form of the checkpoint in `folder` beside it, and returns its directory."""
    from deepspeed.checkpoint import ds_to_universal

    target = folder.parent / f"{folder.name}_universal"
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder / f"global_step{STEPS}"),
            output_folder=str(target / f"global_step{STEPS}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    shutil.copy(folder / "truth.safetensors", target)
    return target


if __name__ == "__main__":
    for chosen in sys.argv[1:] or FIXTURES_BY_NAME:
        make(chosen)
