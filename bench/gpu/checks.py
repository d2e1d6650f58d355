"""Items that look at one thing: host waits, `generate`, the memory of communicators."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.gpu.task import Task, start_training
from fullshard.models.build import build_model
from fullshard.parallel.mesh import process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.loop import Step, train
from fullshard.training.shard import close_offloaded_state, shard

STRATEGIES = {
    **{name: (f"sharding.strategy={name}",) for name in ("full_shard", "shard_grad_op", "zero1", "no_shard")},
    "bf16_pure": ("precision.mode=bf16_pure",),
    "full recompute": ("recompute.mode=full",),
    "activations offloaded": ("recompute.mode=offload",),
    "optimizer:cpu": ("offload.tier=optimizer:cpu",),
}


def measure_waits(task: Task) -> None:
    """Records how often, and where, the host waits for the device in three steps of each strategy."""
    device, [microbatches] = task.device, task.item.microbatches
    for name, settings in STRATEGIES.items():
        run = task.load_run(microbatches, *settings, "train.steps=5")
        plan = Plan.from_run(run, world_size=task.ranks.world_size, device=device)
        state, loss = start_training(plan)
        with closing(cast(Generator[Step], train(state, plan, loss=loss))) as steps:
            for _ in range(2):
                next(steps)
            with count_waits(device) as places:
                for _ in range(3):
                    next(steps)
        close_offloaded_state(state.model, plan=plan, finished=True)
        task.record.add_row(name, measured={"waits": float(places.total())})
        if places:
            task.record.details[name] = [f"{count} at {place}" for place, count in places.most_common(10)]
        del state, loss, steps
        gc.collect()


@contextmanager
def count_waits(device: str) -> Generator[Counter[str]]:
    """Counts the waits of this process for its GPU, by the line of Python that each comes from."""
    places = Counter[str]()
    if device != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places.update(f"{one.filename}:{one.lineno}" for one in found if "synchroniz" in str(one.message))


def check_generate(task: Task) -> None:
    """Generates with a sharded model of transformers, twice, and compares with the unsharded one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=4")
    options = (*sizes, "num_key_value_heads=2", "vocab_size=512")
    ids = (f"model.options.{name}_token_id=0" for name in ("bos", "eos", "pad"))
    overrides = ["model.hf=examples/smollm3/config.json", "model.weights=none", "precision.mode=fp32"]
    run = Run.load(overrides=[*overrides, *(f"model.options.{one}" for one in options), *ids])
    with process_group(task.device) as ranks:
        plan = Plan.from_run(run, world_size=1, device=task.device)
        model: Any = shard(build_model(run), plan, methods=("generate",))
        section = run.model
        assert isinstance(section, HuggingFaceModel), "a model of transformers"
        config = AutoConfig.from_pretrained(str(Path(section.hf).parent), **section.options)
        plain: Any = AutoModelForCausalLM.from_config(config).to(ranks.device)
        whole = {
            name: one.full_tensor() for name, one in model.state_dict().items() if hasattr(one, "full_tensor")
        }
        plain.load_state_dict(model.state_dict() | whole)
        tokens = torch.arange(1, 9, device=ranks.device)[None]
        asked = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
        expected = plain.eval().generate(tokens, **asked)
        for attempt in range(2):
            found = model.eval().generate(tokens, **asked)
            if not torch.equal(found, expected):
                raise SystemExit(f"attempt {attempt}: generated {found.tolist()}, not {expected.tolist()}")
    task.record.details["tokens"] = expected.tolist()


def measure_groups(task: Task) -> None:
    """Records the device memory that each communicator takes at its first collectives."""
    device, world = task.ranks.device, task.ranks.world_size

    def used_by(work: Callable[[], object]) -> float:
        before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        work()
        if device.type != "cuda":
            return 0.0
        torch.cuda.synchronize(device)
        return float(before - torch.cuda.mem_get_info(device)[0])

    data = torch.ones(1 << 20, device=device)
    gathered = torch.empty(world << 20, device=device)
    half, _ = dist.new_subgroups(max(1, world // 2))
    for name, group in (("all ranks", None), ("all ranks again", dist.new_group()), ("half of them", half)):
        size = dist.get_world_size(group) << 20
        used = used_by(lambda group=group: dist.all_reduce(data, group=group))
        task.record.add_row(f"{name}: all-reduce", measured={"group_bytes": used})
        for kind, collective in (
            ("all-gather", lambda: dist.all_gather_into_tensor(gathered[:size], data, group=group)),  # noqa: B023
            ("reduce-scatter", lambda: dist.reduce_scatter_tensor(data, gathered[:size], group=group)),  # noqa: B023
        ):
            task.record.add_row(f"{name}: {kind}", measured={"group_bytes": used_by(collective)})
