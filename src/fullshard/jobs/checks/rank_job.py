"""The work of each rank of `fullshard check`: facts about itself, its links, and sharded steps."""

import hashlib
import importlib.util
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import ErrorCapture, all_gather_object, rank
from fullshard.errors import FullshardError, SpecError
from fullshard.jobs.checks.model_trial import ModelTrial, build_model_trial, plain_run
from fullshard.jobs.checks.ranks import FILE_NAME, PairRate, RankFacts, ShardedComparison
from fullshard.launch.detect import detect_hardware
from fullshard.models.build import build_model
from fullshard.parallel.mesh import RankInfo, process_group
from fullshard.spec.plan import Plan
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from fullshard.system.dotted import append_working_directory_to_path
from fullshard.system.files import write_file_atomically
from fullshard.torch_private.tensors import tree_leaves
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.random_state import seed_generators
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

_PACKAGES = ("torch", "transformers", "numpy", "torchao", "peft")
_COMPARED = ("NCCL_", "TORCH_", "GLOO_", "CUDA_LAUNCH", "PYTORCH_", "OMP_NUM_THREADS", "FULLSHARD_")
# These differ between ranks or hosts by design.
_OWN = ("TORCHELASTIC_", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_PROBE_BYTES, _PROBES = 4 << 20, 4
_CONNECT_SECONDS = 5.0
_TIMEOUT_SECONDS = 120.0
_MOST_PAIRS = 28  # of 8 ranks
_STEPS, _RATE = 2, 0.1
_SGD = (
    "optimizer.name=sgd",
    f"optimizer.learning_rate={_RATE}",
    "optimizer.weight_decay=0",
    "optimizer.clip_norm=0",
    "optimizer.options={}",
    "schedule.kind=constant",
    "schedule.warmup_steps=0",
    f"train.steps={_STEPS}",
    "fault_tolerance.on_spike=none",
)

Connect = Callable[[str, int], str | None]


def connect_to(host: str, port: int) -> str | None:
    """Connects to a port of a host. Returns the error, or None."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error)


def run_rank_checks(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Gathers the facts of all ranks, and writes them into `run.run.dir` on rank 0."""
    del resume, command_started
    with process_group(run.run.device, timeout_seconds=_TIMEOUT_SECONDS) as ranks:
        facts = gather_rank_facts(run, plan=plan, ranks=ranks)
        if ranks.rank == 0:
            write_file_atomically(Path(run.run.dir, FILE_NAME), facts.model_dump_json())


def gather_rank_facts(
    run: Run,
    *,
    plan: Plan | None,
    ranks: RankInfo,
    host: str | None = None,
    environment: Mapping[str, str] | None = None,
    connect: Connect = connect_to,
) -> RankFacts:
    """Returns the facts about all ranks, on every rank. Collective.

    plan: the plan of the run, for any number of ranks; None for plain defaults
    host, environment: name and environment variables of this host, if not its own
    connect: connects to a port of a host; returns the error, or None
    """
    hosts = all_gather_object(socket.gethostname() if host is None else host)
    own = _rank_settings(run, os.environ if environment is None else environment)
    device, error = ranks.device, None
    try:
        comparison = _compare_sharded_steps(run, world_size=ranks.world_size, rank=ranks.rank)
    except _StepError as raised:
        comparison, error = "a sharded step raises", str(raised)
    return RankFacts(
        hosts=tuple(hosts),
        settings=tuple(all_gather_object(own)),
        unreachable=_unreachable_hosts(hosts, connect=connect),
        pairs=_pair_rates(device, world_size=ranks.world_size),
        device=device.type,
        catalog_bytes_per_second=_catalog_rate(device, ranks),
        comparison=comparison,
        step_error=error,
        state_dtypes=_optimizer_state_dtypes(run, world_size=ranks.world_size),
        master_dtype=plan.precision.master if plan is not None else "fp32",
    )


def _rank_settings(run: Run, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions, code and environment variables that must be equal on all ranks."""
    import importlib.metadata

    found = {"python": platform.python_version(), "code of fullshard": _digest_of_code("fullshard")}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    dotted = [getattr(run.model, "python", None), run.train.loss, run.data.factory]
    for name in filter(None, dotted):
        found[f"code of {name}"] = _digest_of_code(name.partition(":")[0])
    if run.run.device != "cpu" and torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    compared = (n for n in environment if n.startswith(_COMPARED) and not n.startswith(_OWN))
    return found | {name: environment[name] for name in compared}


def _digest_of_code(module: str) -> str:
    """Returns a digest of the Python files of a package or module; `absent` if it is not found."""
    try:
        append_working_directory_to_path()
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return "absent"
    if found is None:
        return "absent"
    if found.submodule_search_locations:
        paths = [path for root in found.submodule_search_locations for path in Path(root).rglob("*.py")]
    else:
        paths = [Path(found.origin)] if found.origin else []
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _unreachable_hosts(hosts: list[str], *, connect: Connect) -> tuple[str, ...]:
    """Returns the pairs of hosts of which the first cannot connect to the second. Collective.

    hosts: host of each rank. The first rank of each host connects to a port of every other host's.
    """
    own = dist.get_rank()
    first_of = {host: hosts.index(host) for host in hosts}
    if len(first_of) < 2:
        return ()
    with socket.create_server(("", 0)) as listening:
        ports = all_gather_object(listening.getsockname()[1])
        failed: list[str] = []
        if first_of[hosts[own]] == own:
            for host, rank in first_of.items():
                error = None if rank == own else connect(host, ports[rank])
                failed += [f"{hosts[own]} cannot connect to {host}: {error}"] if error else []
        found = all_gather_object(failed)
    return tuple(text for texts in found for text in texts)


def _pair_rates(device: torch.device, *, world_size: int) -> tuple[PairRate, ...]:
    """Returns the rates between pairs of ranks, measured one after another: the best of four exchanges."""
    rates: list[PairRate] = []
    own, data = dist.get_rank(), torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    for one, other in list(combinations(range(world_size), 2))[:_MOST_PAIRS]:
        best = float("inf")
        if own in (one, other):
            for _ in range(_PROBES):
                started = time.perf_counter()
                _exchange(data, peer=other if own == one else one, sends_first=own == one)
                best = min(best, time.perf_counter() - started)
        seconds = min(all_gather_object(best))
        rates.append(PairRate(ranks=(one, other), bytes_per_second=2 * _PROBE_BYTES / seconds))
    return tuple(rates)


def _exchange(data: torch.Tensor, *, peer: int, sends_first: bool) -> None:
    for sends in (sends_first, not sends_first):
        (dist.send if sends else dist.recv)(data, peer)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)


def _catalog_rate(device: torch.device, ranks: RankInfo) -> float | None:
    if device.type != "cuda":
        return None
    try:
        return detect_hardware("cuda", ranks=ranks.world_size).within.bytes_per_second
    except SpecError:
        return None


class _StepError(Exception):
    """Raised on all ranks if a sharded step of a model that works unsharded raises on any."""


def _compare_sharded_steps(run: Run, *, world_size: int, rank: int) -> ShardedComparison | str:
    """Trains a small copy of the model by SGD in fp32, sharded and unsharded. Collective.

    Returns the losses and the differences of parameters, or the reason why they cannot be compared. Raises
    _StepError.
    """
    trial = _build_trial(run, world_size=world_size)
    if isinstance(trial, str):
        return trial
    _run_random_steps(trial, world_size=world_size, rank=rank)
    if not _is_deterministic(trial):
        return "its loss is random in evaluation mode too, or depends on the call"
    own, attempt = _plan_of_steps(trial, world_size=world_size, settings=_SGD), ErrorCapture()
    found: ShardedComparison | None = None
    with attempt:
        batches = [
            [trial.batches(step * world_size + r) for r in range(world_size)] for step in range(_STEPS)
        ]
        plain = _without_dropout(trial.build())
        expected = list(_iterate_unsharded_losses(trial, plain, batches=batches))
        model = shard(_without_dropout(build_model(trial.run)), own)
        state = TrainState(model, build_optimizer(model, own), data=[step[rank] for step in batches])
        losses = tuple(step.loss for step in train(state, own, loss=trial.loss))
        found = ShardedComparison(
            losses_sharded=losses, losses_unsharded=tuple(expected), errors=_parameter_errors(model, plain)
        )
    _raise_on_all_ranks(attempt)
    assert found is not None, "no rank raised"
    return found


def _run_random_steps(trial: ModelTrial, *, world_size: int, rank: int) -> None:
    """Trains the model on different rows on each rank, with its dropout and layer drop. Collective.

    Raises _StepError, for example if ranks run different modules.
    """
    steps, attempt = 4, ErrorCapture()
    with attempt:
        own = _plan_of_steps(trial, world_size=world_size, settings=(*_SGD, f"train.steps={steps}"))
        seed_generators(own)
        model = shard(build_model(trial.run), own)
        data = [trial.batches(step * world_size + rank) for step in range(steps)]
        for _ in train(TrainState(model, build_optimizer(model, own), data=data), own, loss=trial.loss):
            pass
    _raise_on_all_ranks(attempt)


def _raise_on_all_ranks(attempt: ErrorCapture) -> None:
    """Raises _StepError on all ranks if there was an error on any. Collective."""
    text = next((text for text in all_gather_object(_error_text(attempt)) if text is not None), None)
    if text is not None:
        raise _StepError(text)


def _optimizer_state_dtypes(run: Run, *, world_size: int) -> dict[str, str] | str:
    """Returns the dtypes of the run's optimizer's state after a step. Collective."""
    if run.offload.offloads_optimizer or run.precision.mode == "bf16_pure":
        return "the state is offloaded, or in bf16 on purpose"
    if run.optimizer.name.lower() == "adamw8bit":
        return "adamw8bit keeps its state in 8 bits on purpose"
    trial = _build_trial(run, world_size=world_size)
    if isinstance(trial, str):
        return trial
    attempt, found = ErrorCapture(), dict[str, str]()
    with attempt:
        own = _plan_of_steps(trial, world_size=world_size, settings=("train.steps=1",))
        model = shard(build_model(trial.run), own)
        optimizer = build_optimizer(model, own)
        for _ in train(TrainState(model, optimizer, data=[trial.batches(rank())]), own, loss=trial.loss):
            pass
        for parameter in model.parameters():
            for name, value in cast(dict[str, Any], optimizer.state.get(parameter, {})).items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.is_floating_point():
                    found[name] = str(value.dtype).removeprefix("torch.")
    texts = [text for text in all_gather_object(_error_text(attempt)) if text is not None]
    return f"the step raises {texts[0]}" if texts else found


def _build_trial(run: Run, *, world_size: int) -> ModelTrial | str:
    if world_size == 1:
        return "a single rank shards nothing"
    plan = Plan.from_run(plain_run(run, rows=world_size, microbatch=1), world_size=world_size)
    trial = build_model_trial(plan)
    texts = all_gather_object(trial.got if isinstance(trial, Finding) else None)
    failed = next((text for text in texts if text is not None), None)
    return trial if isinstance(trial, ModelTrial) and failed is None else failed or "there is no trial"


def _plan_of_steps(trial: ModelTrial, *, world_size: int, settings: Sequence[str]) -> Plan:
    tensors = [one for one in tree_leaves(trial.batches(0)) if isinstance(one, Tensor) and one.ndim]
    rows = len(tensors[0]) if tensors else 1
    run = plain_run(trial.run, rows=rows * world_size, microbatch=rows)
    lengths = [one.shape[1] for one in tensors if one.ndim == 2 and not one.is_floating_point()]
    length = [f"data.sequence_length={lengths[0]}"] if lengths else []
    return Plan.from_run(run.with_overrides([*length, *settings]), world_size=world_size)


def _iterate_unsharded_losses(
    trial: ModelTrial, model: nn.Module, *, batches: Sequence[Sequence[Any]]
) -> Iterator[float]:
    """Yields the loss of each step of all ranks' batches, by torch alone."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=_RATE)
    for step in batches:
        results = [trial.loss(model, batch) for batch in step]
        pairs = [one if isinstance(one, tuple) else (one, 1) for one in results]
        mean = sum(value for value, _ in pairs) / sum(int(count) for _, count in pairs)
        assert isinstance(mean, Tensor), "there is a batch for each rank"
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(mean.detach())


def _parameter_errors(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    """Returns the difference of each parameter relative to its norm, or to 1e-2 if that is larger."""
    errors: dict[str, float] = {}
    sharded = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        own = sharded[name].detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        reference = parameter.detach()
        errors[name] = float((whole.cpu() - reference).norm() / reference.norm().clamp(min=1e-2))
    return errors


def _without_dropout(model: nn.Module) -> nn.Module:
    """Keeps `model` in evaluation mode, so that its dropout does not differ between the two runs."""
    model.eval()
    vars(model)["train"] = lambda mode=True: model  # pyright: ignore[reportUnknownLambdaType]
    return model


def _is_deterministic(trial: ModelTrial) -> bool:
    model, batch = _without_dropout(trial.build()), trial.batches(0)
    with torch.no_grad():
        first, second = (float(trial.mean_loss(model, batch)) for _ in range(2))
    return all(all_gather_object(first == second))


def _error_text(attempt: ErrorCapture) -> str | None:
    error = attempt.error
    if error is None:
        return None
    if isinstance(error, FullshardError):
        text = error.what if error.got is None else f"{error.what} {error.got}"
    else:
        text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:300]}"
