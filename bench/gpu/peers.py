"""Training loops that a user would write without fullshard, with the settings of a Plan."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fullshard.errors import SpecError
from fullshard.models.decoder import DecoderModel
from fullshard.parallel.mesh import build_mesh
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import HuggingFaceModel

Batches = Iterator[dict[str, Tensor]]


class PeerLoop(NamedTuple):
    """A loop written by hand. `step` runs a step of this many microbatches."""

    step: Callable[[int], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def plain_loop(plan: Plan, batches: Batches) -> PeerLoop:
    """Returns a loop of the reference decoder on `fully_shard`.

    A unit per block and one for the rest, bf16 mixed precision (or all in bf16), fused AdamW, clipping. With
    `run.compile`, each block is compiled; with `recompute.mode = "full"`, each block is checkpointed; with an
    offload target, FSDP2's CPUOffloadPolicy keeps parameters and optimizer state on the host.
    """
    run = plan.run
    if run.recompute.mode not in ("none", "full"):
        raise SpecError("the plain loop has no such recompute.", got=run.recompute.mode, fix="none or full")
    offloads = run.offload.offloads_optimizer
    torch.manual_seed(run.run.seed)
    with torch.device("cpu" if offloads else plan.device):
        model = DecoderModel(run.decoder_config).to(TORCH_DTYPE[plan.precision.master])
    for name, block in list(model.blocks.named_children()):
        wrapped = checkpoint_wrapper(block) if run.recompute.mode == "full" else block
        if run.run.compile is True:
            wrapped.compile()
        model.blocks.register_module(name, wrapped)
    host = CPUOffloadPolicy(pin_memory=plan.device == "cuda")
    _shard_blocks(model, model.blocks, plan, policy=host if offloads else OffloadPolicy())
    for module in model.modules() if offloads else ():  # the policy moves parameters alone
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, buffer.to(plan.device))
    section = run.optimizer
    kwargs: dict[str, Any] = {"betas": section.betas, "eps": section.eps, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.learning_rate, **kwargs)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    return _loop(model, optimizer, loss_of=loss_of, batches=batches, plan=plan)


def transformers_loop(plan: Plan, batches: Batches) -> PeerLoop:
    """Returns a loop of transformers' model as the guide of docs/smollm3.md has it.

    All in bf16, every layer checkpointed and sharded, a plain AdamW, and the model's own loss.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    section = plan.run.model
    assert isinstance(section, HuggingFaceModel), "the item has a model of transformers"
    config = AutoConfig.from_pretrained(str(Path(section.hf).parent), **section.options)
    torch.manual_seed(plan.run.run.seed)
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    _shard_blocks(model, model.model.layers, plan, policy=OffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.run.optimizer.learning_rate)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["tokens"], labels=batch["labels"]).loss

    return _loop(model, optimizer, loss_of=loss_of, batches=batches, plan=plan)


def torchtitan_loop(plan: Plan, batches: Batches) -> PeerLoop:
    """Returns a loop of torchtitan 0.2's Llama 3 with its own compilation, units and loss.

    Its head is never tied to the embedding. Its package imports readers and trackers, of which this loop uses
    none, so something stands for those that are not installed.
    """
    for name in ("torch.utils.tensorboard", "datasets", "datasets.distributed", "einops", "PIL"):
        try:
            import_module(name)
        except ImportError:
            sys.modules[name] = _Unused(name)
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import Compile
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp

    run, config = plan.run, plan.run.decoder_config
    sizes = TransformerModelArgs(
        dim=config.d_model,
        n_layers=config.layers,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        vocab_size=config.vocabulary,
        # It has int(int(8 / 3 · d_model) · multiplier) channels, rounded up to a multiple of two: d_ff.
        ffn_dim_multiplier=(config.d_ff - 0.5) / int(8 * config.d_model / 3),
        multiple_of=2,
        max_seq_len=run.data.sequence_length,
        rope_theta=config.rope_theta,
    )
    with torch.device("meta"):
        model = Transformer(sizes)
    loss_function = cross_entropy_loss
    if run.run.compile is True:
        apply_compile(model, Compile(enable=True))
        loss_function = torch.compile(cross_entropy_loss)
    dtypes = (TORCH_DTYPE[plan.precision.param], TORCH_DTYPE[plan.precision.reduce])
    apply_fsdp(model, build_mesh(plan), *dtypes, pp_enabled=False)
    model.to_empty(device=plan.device)
    torch.manual_seed(run.run.seed)
    with torch.no_grad():
        model.init_weights(torch.device(plan.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.optimizer.learning_rate, fused=True)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return loss_function(model(batch["tokens"]), batch["labels"]) / batch["labels"].numel()

    return _loop(model, optimizer, loss_of=loss_of, batches=batches, plan=plan)


class _Unused(ModuleType):
    """Stands for a package that is not installed: every name in it is `object`."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def _shard_blocks(model: nn.Module, blocks: nn.ModuleList, plan: Plan, *, policy: OffloadPolicy) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[plan.precision.param], reduce_dtype=TORCH_DTYPE[plan.precision.reduce]
    )
    mesh, reshard = build_mesh(plan), plan.reshard_after_forward
    for block in blocks:
        fully_shard(
            block, mesh=mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=reshard
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=policy)


def _loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    batches: Batches,
    plan: Plan,
) -> PeerLoop:
    device, clip_norm = torch.device(plan.device), plan.run.optimizer.clip_norm
    reads_figures = plan.run.fault_tolerance.on_spike == "rollback"

    def step(microbatches: int) -> None:
        total = torch.zeros((), device=device)
        for _ in range(microbatches):
            loss = loss_of(next(batches)) / microbatches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        # Figures that any training log shows. torchtitan reads them only in the steps that it logs.
        if reads_figures:
            _ = total.item(), norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()

    return PeerLoop(step, model, optimizer)
