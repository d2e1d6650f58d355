"""Makes archives of checkpoints that other trainers write themselves, and the truth beside each.

Start it in an environment with torch, accelerate, lightning and transformers, from the root:

    python -m tests.takeover.make_fixtures [NAME …]

The truth is a safetensors file of all parameters and buffers, and `exp_avg.NAME`, `exp_avg_sq.NAME`.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from tests.takeover.tiny import RATE, STEPS, WARMUP, Block, batch, groups, initial, loss_of
from tests.takeover.unpacked import ARCHIVES, pack

ROOT = ARCHIVES.with_name("unpacked-fixtures")  # until they are packed
WORLD = 2


def warm(step: int) -> float:
    return min(1, (step + 1) / WARMUP)


def train(model: nn.Module, opt: torch.optim.Optimizer) -> Any:
    """Trains the steps of a fixture on this rank's half of each batch. Returns the schedule."""
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warm)
    for step in range(STEPS):
        rows = batch(step).tensor_split(dist.get_world_size())[dist.get_rank()]
        loss_of(model, rows).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    return schedule


def full(value: Any) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone().contiguous()


def write_truth(named: Iterable[tuple[str, Tensor]], opt: Any, path: Path, buffers: Any = ()) -> None:
    truth = {name: full(one) for name, one in buffers}
    for name, parameter in named:
        truth[name] = full(parameter)
        state = {k: v for k, v in opt.state[parameter].items() if k != "step"}
        truth |= {f"{key}.{name}": full(one) for key, one in state.items()}
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(truth, path / "truth.safetensors")
    dist.barrier()


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = initial()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(groups(model), lr=RATE)


def fsdp2() -> None:
    """FSDP2 in a program of one's own: DCP, and torch.save of the full state, by names and by numbers."""
    model, opt = sharded()
    schedule = train(model, opt)
    state, optim = get_state_dict(model, opt)
    dcp.save(
        {"model": state, "optim": optim, "scheduler": schedule.state_dict(), "step": STEPS},
        checkpoint_id=str(ROOT / "fsdp2_dcp/source"),
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, optim = get_state_dict(model, opt, options=options)
    for name in ("fsdp2_dcp", "torch_names"):
        write_truth(model.named_parameters(), opt, ROOT / name, model.named_buffers())
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": optim, "step": STEPS}, ROOT / "torch_names/source.pt")


def plain() -> None:
    """A plain program on one rank, whose optimizer has numbers."""
    if dist.get_rank() == 0:
        model = initial()
        opt = torch.optim.AdamW(groups(model), lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, warm)
        for step in range(STEPS):
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
        named = dict(model.named_parameters())
        truth = {name: full(one) for name, one in model.state_dict().items()}
        for name, one in named.items():
            truth |= {f"{k}.{name}": full(v) for k, v in opt.state[one].items() if k != "step"}
        (ROOT / "torch_numbers").mkdir(parents=True)
        save_file(truth, ROOT / "torch_numbers/truth.safetensors")
        names = {id(one): name for name, one in named.items()}
        order = [names[id(one)] for group in opt.param_groups for one in group["params"]]
        (ROOT / "torch_numbers/order.txt").write_text("\n".join(order) + "\n")
        content = {"model": model.state_dict(), "optimizer": opt.state_dict()}
        torch.save(content | {"scheduler": schedule.state_dict()}, ROOT / "torch_numbers/source.pt")
        legacy = ROOT / "torch_numbers/legacy.pt"
        torch.save(content, legacy, _use_new_zipfile_serialization=False)


def wrap(by_parameter: bool) -> Any:
    return FSDP(
        initial(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=by_parameter,
        device_id=torch.device("cpu"),
    )


def weights_of(wrapped: Any) -> dict[str, Tensor]:
    with FSDP.summon_full_params(wrapped, writeback=False):
        named = {k.replace("_fsdp_wrapped_module.", ""): full(v) for k, v in wrapped.named_parameters()}
    return named | {"seen": torch.ones(3)}


def full_moments(wrapped: Any, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = FSDP.full_optim_state_dict(wrapped, opt, rank0_only=False)["state"]
    return {f"{k}.{own}": full(v) for own, one in state.items() for k, v in one.items() if k != "step"}


def joined_moments(wrapped: Any, opt: Any, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins parts of ranks, as the full state has wrong moments with use_orig_params."""
    own = {n.replace("_fsdp_wrapped_module.", ""): opt.state[p] for n, p in wrapped.named_parameters()}
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, own)
    return {
        f"{key}.{name}": torch.cat([one[name][key] for one in every if one[name]]).view(shapes[name].shape)
        for name in own
        for key in ("exp_avg", "exp_avg_sq")
    }


def fsdp1_local() -> None:
    """Local state dicts of FSDP1 with moments by name: flat parameters, also beside parts of parameters."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    for name, by_parameter in (("fsdp1_local", False), ("fsdp1_local_parts", True)):
        wrapped = wrap(by_parameter)
        opt = torch.optim.AdamW(wrapped.parameters(), lr=RATE)
        train(wrapped, opt)
        path = ROOT / name
        (path / "source").mkdir(parents=True, exist_ok=True)
        config = LocalStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT, config):
            content = {"model": wrapped.state_dict(), "optimizer": FSDP.optim_state_dict(wrapped, opt)}
            torch.save(content, path / f"source/rank{dist.get_rank()}.pt")
        accelerator = Accelerator(cpu=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, state_dict_type="LOCAL_STATE_DICT", cpu_ram_efficient_loading=False
        )
        fsdp_utils.save_fsdp_model(plugin, accelerator, wrapped, str(path / "accelerate"), 0)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, opt, wrapped, str(path / "accelerate"), 0)
        truth = weights_of(wrapped)
        truth |= joined_moments(wrapped, opt, truth) if by_parameter else full_moments(wrapped, opt)
        if dist.get_rank() == 0:
            save_file(truth, path / "truth.safetensors")


def fsdp1() -> None:
    """FSDP1: DCP, one file of each rank (sharded, local), and the full state whose moments are wrong."""
    for name, by_parameter in (("fsdp1_flat", False), ("fsdp1_full", True)):
        wrapped = wrap(by_parameter)
        opt = torch.optim.AdamW(groups(wrapped) if by_parameter else wrapped.parameters(), lr=RATE)
        schedule = train(wrapped, opt)
        path = ROOT / name
        path.mkdir(parents=True, exist_ok=True)
        truth = weights_of(wrapped) | full_moments(wrapped, opt)
        if dist.get_rank() == 0:
            save_file(truth, path / "truth.safetensors")
        if by_parameter:
            with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
                content = {"model": wrapped.state_dict(), "optimizer": FSDP.optim_state_dict(wrapped, opt)}
            if dist.get_rank() == 0:
                torch.save(content, path / "source.pt")
            continue
        config = ShardedStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, config):
            content = {"model": wrapped.state_dict(), "optimizer": FSDP.optim_state_dict(wrapped, opt)}
            (path / "source").mkdir(exist_ok=True)
            rank = dist.get_rank()
            torch.save(content | {"scheduler": schedule.state_dict()}, path / f"source/rank{rank}.pt")
            dcp.save(content, checkpoint_id=str(path / "dcp"))
        with FSDP.state_dict_type(
            wrapped, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(offload_to_cpu=True)
        ):
            content = {"model": wrapped.state_dict(), "optimizer": opt.state_dict()}
            (path / "local").mkdir(exist_ok=True)
            torch.save(content, path / f"local/rank{dist.get_rank()}.pt")


def accelerate() -> None:
    """Accelerate's own writers for FSDP2. It refuses FSDP on CPUs, so they are called directly."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        accelerator = Accelerator(cpu=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
        )
        model, opt = sharded()
        schedule = train(model, opt)
        path = ROOT / f"accelerate_{kind.split('_')[0].lower()}"
        (path / "source").mkdir(parents=True, exist_ok=True)
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(path / "source"), 0)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, opt, model, str(path / "source"), 0)
        if dist.get_rank() == 0:
            torch.save(schedule.state_dict(), path / "source/scheduler.bin")
        write_truth(model.named_parameters(), opt, path, model.named_buffers())


def trainer() -> None:
    """transformers' Trainer on one rank."""
    if dist.get_rank() == 0:
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=13,
            hidden_size=4,
            intermediate_size=6,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
        model = LlamaForCausalLM(config)
        row = torch.arange(8) % 13
        rows = [{"input_ids": row, "labels": row} for _ in range(16)]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        with tempfile.TemporaryDirectory() as directory:
            args = TrainingArguments(
                output_dir=directory, max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=2,
                use_cpu=True, report_to=[], weight_decay=0.1, lr_scheduler_type="constant",
            )  # fmt: skip
            one = Trainer(model=model, args=args, train_dataset=rows)
            one.train()
            shutil.copytree(f"{directory}/checkpoint-{STEPS}", ROOT / "trainer/source")
        truth = {name: full(p) for name, p in model.named_parameters()}
        state = one.optimizer.optimizer.state
        for name, p in model.named_parameters():
            truth |= {f"{k}.{name}": full(v) for k, v in state[p].items() if k != "step"}
        save_file(truth, ROOT / "trainer/truth.safetensors")
        for name in ("rng_state.pth", "training_args.bin", "generation_config.json"):
            (ROOT / "trainer/source" / name).unlink(missing_ok=True)


def lightning() -> None:
    """Lightning's ModelParallelStrategy: a directory of DCP, and one file."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = initial()

        def configure_model(self) -> None:
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            return loss_of(self.net, tokens)

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), lr=RATE)
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, warm)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    data = torch.utils.data.DataLoader([batch(i)[0] for i in range(12)], batch_size=2)
    for name, is_sharded in (("lightning_sharded", True), ("lightning_full", False)):
        strategy = ModelParallelStrategy(
            save_distributed_checkpoint=is_sharded,
            data_parallel_size=WORLD,
            tensor_parallel_size=1,
            process_group_backend="gloo",
        )
        one = lightning.Trainer(
            accelerator="cpu", devices=WORLD, strategy=strategy, max_steps=STEPS, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        one.fit(module, data)
        (ROOT / name).mkdir(parents=True, exist_ok=True)
        one.save_checkpoint(ROOT / name / ("source" if is_sharded else "source.ckpt"))
        net = module.net
        write_truth(net.named_parameters(), one.optimizers[0], ROOT / name, net.named_buffers())


MAKERS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (fsdp2, plain, fsdp1, fsdp1_local, accelerate, trainer, lightning)
}


def on_rank(rank: int, name: str, port: int) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), **address)
    dist.init_process_group("gloo")
    MAKERS[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    ROOT.mkdir(exist_ok=True)
    for number, maker in enumerate(sys.argv[1:] or MAKERS):
        mp.start_processes(on_rank, (maker, 29600 + number), nprocs=WORLD, start_method="spawn")
    for fixture in ROOT.iterdir():
        pack(fixture)
    shutil.rmtree(ROOT)
