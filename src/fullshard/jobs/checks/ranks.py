"""The checks that the ranks of `fullshard check` make together: of settings and a sharded step."""

import hashlib
import importlib.util
import math
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import all_gather_object, raise_on_all_ranks
from fullshard.distributed.collectives import all_reduce_together
from fullshard.errors import CheckpointError
from fullshard.jobs.checks.model_trial import ModelTrial, build_model_trial, make_eager_fp32_cpu_run
from fullshard.models.build import build_model
from fullshard.parallel.mesh import RankInfo, process_group
from fullshard.quantities import count_text
from fullshard.spec.plan import Plan
from fullshard.spec.records.finding import CheckReport, Finding
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import OptimizerSection, ScheduleSection
from fullshard.system.dotted import append_working_directory_to_path
from fullshard.system.files import write_file_atomically
from fullshard.system.process import installed_version
from fullshard.torch_private.tensors import tree_leaves
from fullshard.training.extra_state import seed_generators
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

FILE_NAME = "rank-findings.json"

_PACKAGES = ("torch", "transformers", "numpy", "torchao", "peft")
_COMPARED = ("NCCL_", "TORCH_", "GLOO_", "CUDA_LAUNCH", "PYTORCH_", "OMP_NUM_THREADS", "FULLSHARD_")
# These differ between ranks or hosts by design.
_OWN = ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_STEPS, _RANDOM_STEPS, _RATE, _MOST_SHARDS = 2, 4, 0.1, 16
# fp32 sums of gradients in another order differ by 1e-6 of a parameter after two steps.
_LOSS_TOLERANCE, _PARAMETER_TOLERANCE = 1e-4, 1e-3
_SGD = OptimizerSection(name="sgd", learning_rate=_RATE, weight_decay=0.0, clip_norm=0.0)
_CONSTANT_RATE = ScheduleSection(kind="constant", warmup_steps=0)


def run_rank_checks(  # signature: a job's, see `LaunchRequest`
    run: Run, *, timeout_seconds: float, **_: object
) -> None:
    """Makes the checks of ranks, and writes the findings into `run.run.dir` on rank 0."""
    with process_group(run.run.device, timeout_seconds=timeout_seconds) as ranks:
        report = CheckReport(findings=run_checks_on_ranks(run, ranks=ranks))
        if ranks.rank == 0:
            write_file_atomically(Path(run.run.dir, FILE_NAME), report.model_dump_json())


def run_checks_on_ranks(
    run: Run, *, ranks: RankInfo, environment: Mapping[str, str] = os.environ
) -> tuple[Finding, ...]:
    """Returns what the checks of ranks find, on every rank. Collective."""
    hosts = all_gather_object(socket.gethostname())
    settings = all_gather_object(_rank_settings(run, environment))
    found = {
        "same_settings": check_same_settings(settings, hosts=hosts),  # NVIDIA/nccl#286
        "sharded_step": check_sharded_step(run, ranks=ranks),  # NovaSky-AI/SkyRL#1709
    }
    return tuple(one.model_copy(update={"check": name, "group": "ranks"}) for name, one in found.items())


def check_same_settings(settings: Sequence[Mapping[str, str]], *, hosts: Sequence[str]) -> Finding:
    """Compares versions, code and environment of the ranks."""
    differing: list[str] = []
    for name in sorted({name for one in settings for name in one}):
        values = [one.get(name, "unset") for one in settings]
        if len(set(values)) > 1:
            rank = next(i for i, value in enumerate(values) if value != values[0])
            differing.append(f"{name}: {values[0]} on rank 0, {values[rank]} on rank {rank} ({hosts[rank]})")
    if differing:
        return Finding.failure(
            "; ".join(differing[:3]),
            why="ranks that run different programs hang, or train different models",
            fix="one environment and one copy of the code for all hosts",
        )
    return Finding.ok(f"the same versions, code and environment on {count_text(len(settings), 'rank')}")


def _rank_settings(run: Run, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions, code and environment variables that must be equal on all ranks."""
    found = {"python": platform.python_version(), "code of fullshard": _digest_of_code("fullshard")}
    found |= {package: installed_version(package) or "absent" for package in _PACKAGES}
    dotted = [getattr(run.model, "python", None), run.train.loss, run.data.factory]
    found |= {f"code of {name}": _digest_of_code(name.partition(":")[0]) for name in dotted if name}
    if run.run.device != "cpu" and torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    compared = (n for n in environment if n.startswith(_COMPARED) and not n.startswith(_OWN))
    return found | {name: environment[name] for name in compared}


def _digest_of_code(module: str) -> str:
    """Returns a digest of the Python files of a package or module; `absent` if it is not found."""
    found = None
    with suppress(ImportError, ValueError):
        append_working_directory_to_path(module)
        found = importlib.util.find_spec(module)
    if found is None:
        return "absent"
    roots = found.submodule_search_locations or ()
    paths = [path for root in roots for path in Path(root).rglob("*.py")]
    if not roots and found.origin:
        paths = [Path(found.origin)]
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def check_sharded_step(run: Run, *, ranks: RankInfo) -> Finding:
    """Compares sharded steps of a small copy of the model with unsharded ones, in fp32. Collective."""
    trial = _build_trial_on_all_ranks(run, world_size=ranks.world_size)
    if isinstance(trial, str):
        return Finding.skipped(trial)
    try:
        by_rank = _evaluate_on_two_ranks(trial, ranks=ranks)
        is_random = any(own != again for own, again, _ in by_rank)
        pairs = [(by_rank[(rank + 1) % len(by_rank)][0], one[2]) for rank, one in enumerate(by_rank)]
        if not is_random and (loss := _largest_relative_difference(pairs)) > _LOSS_TOLERANCE:
            return _rank_dependence_finding(f"the loss of one batch differs between ranks: {loss:.1e}")
        with raise_on_all_ranks("a sharded step"):  # with dropout and layer drop, on other rows on each rank
            _shard_and_train(trial, build_model(trial.run), steps=_RANDOM_STEPS, ranks=ranks)
        if is_random:
            return Finding.skipped("its loss is random in evaluation mode too, or depends on the call")
        with raise_on_all_ranks("a sharded step"):
            plain = _keep_in_evaluation_mode(trial.build())
            expected = list(_iterate_unsharded_losses(trial, plain, ranks=ranks))
            model = _keep_in_evaluation_mode(build_model(trial.run))
            losses = _shard_and_train(trial, model, steps=_STEPS, ranks=ranks)
            errors = _relative_parameter_differences(model, plain)
    except CheckpointError as error:  # `raise_on_all_ranks` makes one of any exception of any rank
        return Finding.failure(
            f"{error.what.removesuffix('.')}: {error.got}"[:300] if error.got else error.what[:300],
            why=error.why or "the same step works unsharded",
            fix=error.fix or "fullshard.shard in a loop of your own, with FULLSHARD_TRACEBACK=1, shows where",
        )
    loss = _largest_relative_difference(zip(losses, expected, strict=True))
    steps = f"{_STEPS} steps sharded over {choose_shard_degree(ranks.world_size)} of {ranks.world_size} ranks"
    worst, largest = max(errors.items(), key=lambda one: one[1])
    if not math.isfinite(loss + largest) or loss > _LOSS_TOLERANCE or largest > _PARAMETER_TOLERANCE:
        return _rank_dependence_finding(
            f"{steps} differ from unsharded ones: loss {loss:.1e}, {worst} {largest:.1e}"
        )
    return Finding.ok(f"{steps} equal unsharded ones within {max(loss, largest):.0e}")


def _rank_dependence_finding(got: str) -> Finding:
    return Finding.failure(
        got,
        why="the model or the loss depends on the rank, or computes with parameters outside of forward",
        fix="a look for ranks, cached weights, and own collectives in the model and the loss",
    )


def _largest_relative_difference(pairs: Iterable[tuple[float, float]]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def _build_trial_on_all_ranks(run: Run, *, world_size: int) -> ModelTrial | str:
    """Returns a trial of the run's model, or the reason against one, the same on all ranks. Collective."""
    if world_size == 1:
        return "a single rank shards nothing"
    plan = Plan.from_run(make_eager_fp32_cpu_run(run, rows=world_size, microbatch=1), world_size=world_size)
    trial = build_model_trial(plan)
    texts = all_gather_object(trial.got if isinstance(trial, Finding) else None)
    failed = next((text for text in texts if text is not None), None)
    return trial if isinstance(trial, ModelTrial) and failed is None else failed or "there is no trial"


def _shard_and_train(trial: ModelTrial, model: nn.Module, *, steps: int, ranks: RankInfo) -> list[float]:
    """Trains `model` by SGD, sharded over all ranks. Returns the loss of each step. Collective."""
    tensors = [one for one in tree_leaves(trial.batches(0)) if isinstance(one, Tensor) and one.ndim]
    rows = len(tensors[0]) if tensors else 1
    run = make_eager_fp32_cpu_run(trial.run, rows=rows * ranks.world_size, microbatch=rows)
    lengths = [one.shape[1] for one in tensors if one.ndim == 2 and not one.is_floating_point()]
    settings = ["fault_tolerance.on_spike=none", f"train.steps={steps}"]
    settings += [f"data.sequence_length={length}" for length in lengths[:1]]
    if (degree := choose_shard_degree(ranks.world_size)) < ranks.world_size:
        settings += ["sharding.strategy=hybrid_shard", f"sharding.shard_degree={degree}"]
    own = run.model_copy(update={"optimizer": _SGD, "schedule": _CONSTANT_RATE})
    plan = Plan.from_run(own.with_overrides(settings), world_size=ranks.world_size)
    seed_generators(plan)
    shard(model, plan)
    data = [trial.batches(step * ranks.world_size + ranks.rank) for step in range(steps)]
    state = TrainState(model, build_optimizer(model, plan), data=data)
    return [step.loss for step in train(state, plan, loss=trial.loss)]


def choose_shard_degree(world_size: int) -> int:
    """Returns the largest divisor of `world_size` up to 16; `world_size` if that is 1.

    gloo connects a rank to each rank with which it exchanges shards.
    """
    degree = max(one for one in range(1, _MOST_SHARDS + 1) if world_size % one == 0)
    return degree if degree > 1 else world_size


def _iterate_unsharded_losses(trial: ModelTrial, model: nn.Module, *, ranks: RankInfo) -> Iterator[float]:
    """Trains `model` by torch alone on the batches of all ranks. Yields the loss of each step. Collective.

    A rank computes the batch of the rank after it, so that a loss that depends on the rank is found: it
    differs from that of the sharded step.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer, group = torch.optim.SGD(parameters, lr=_RATE), dist.group.WORLD
    assert group is not None, "the ranks have met"
    for step in range(_STEPS):
        for one in parameters:
            one.grad = torch.zeros_like(one)
        with raise_on_all_ranks("an unsharded step"):
            other = (ranks.rank + 1) % ranks.world_size
            result = trial.loss(model, trial.batches(step * ranks.world_size + other))
            value, count = result if isinstance(result, tuple) else (result, 1)
            value.backward()
        totals = torch.tensor([float(value.detach()), float(count)], dtype=torch.float64)
        gradients = [one.grad for one in parameters if one.grad is not None]
        for parts in ([totals], gradients):  # of two dtypes
            all_reduce_together(parts, group)
        for one in gradients:
            one.div_(totals[1])
        optimizer.step()
        yield float(totals[0] / totals[1])


def _relative_parameter_differences(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    """Returns the difference of each parameter relative to its norm, or to 1e-2 if that is larger."""
    errors: dict[str, float] = {}
    sharded = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        own = sharded[name].detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        reference = parameter.detach()
        errors[name] = float((whole.cpu() - reference).norm() / reference.norm().clamp(min=1e-2))
    return errors


def _keep_in_evaluation_mode(model: nn.Module) -> nn.Module:
    """Keeps `model` in evaluation mode, so that its dropout does not differ between the two runs."""
    model.eval()
    vars(model)["train"] = lambda mode=True: model  # pyright: ignore[reportUnknownLambdaType]
    return model


def _evaluate_on_two_ranks(trial: ModelTrial, *, ranks: RankInfo) -> list[tuple[float, float, float]]:
    """Returns each rank's unsharded losses: of its batch, again, of the next rank's. Collective."""
    with raise_on_all_ranks("an evaluation"), torch.no_grad():
        model, other = _keep_in_evaluation_mode(trial.build()), (ranks.rank + 1) % ranks.world_size
        batches = (trial.batches(number) for number in (ranks.rank, ranks.rank, other))
        own, again, following = (float(trial.mean_loss(model, batch)) for batch in batches)
    return all_gather_object((own, again, following))
