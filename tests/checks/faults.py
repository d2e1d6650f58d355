"""Faults that the checks before a run are meant to find, each with the check that must find it."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fullshard.checks.data import build_data_trial
from fullshard.checks.every_check import CHECKS, CheckContext, iterate_findings
from fullshard.checks.model_trial import build_model_trial
from fullshard.checks.rank_facts import PairRate, RankFacts
from fullshard.checks.run_context import RunContext
from fullshard.spec.finding import Finding
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.machines import (
    ACROSS_SOCKETS,
    GIB,
    HEALTHY,
    SMI,
    Processors,
    context_of,
    gpu_machine,
    quiet_machine,
    write_files,
)

GROUP_OF = {one.name: one.group for one in CHECKS}
LEFT_OUT = Finding.skipped("left out")
FAST = RankFacts(
    hosts=("a", "a", "b", "b"),
    clock_offsets_seconds={"b": 0.001},
    settings=({"torch": "2.13.0"},) * 4,
    pairs=tuple(
        PairRate(ranks=pair, bytes_per_second=1e9)
        for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    ),
)


class Fault(NamedTuple):
    """A fault: what is broken, the name of the check that is meant for it, and the context that has it."""

    name: str
    check: str
    make: Callable[[Path], CheckContext]


def of_run(make: Callable[[Path], RunContext]) -> Callable[[Path], CheckContext]:
    return lambda path: CheckContext(make(path), LEFT_OUT, LEFT_OUT, LEFT_OUT)


def of_environment(**variables: str) -> Callable[[Path], CheckContext]:
    return of_run(lambda path: context_of(replace(quiet_machine(path), environment=variables)))


def of_settings(*settings: str) -> Callable[[Path], CheckContext]:
    return of_run(lambda path: context_of(quiet_machine(path), *settings))


def on_gpus(**answers: str) -> Callable[[Path], CheckContext]:
    return of_run(lambda path: context_of(gpu_machine(path, **answers), device="cuda"))


OWN_BATCHES = ("data.source=python", "data.factory=tests.fakes.broken:Batches")


def plan_of_decoder(fault: str, *settings: str, batches: tuple[str, ...] = OWN_BATCHES) -> Plan:
    own = ("model.python=tests.fakes.broken:Decoder", f'model.options={{fault="{fault}"}}')
    plain = ("data.sequence_length=16", "precision.mode=fp32")
    return Plan.from_run(Run.load(overrides=[*own, *batches, *plain, *settings]), world_size=2)


def of_model(
    fault: str, *settings: str, batches: tuple[str, ...] = OWN_BATCHES
) -> Callable[[Path], CheckContext]:
    def make(path: Path) -> CheckContext:
        plan = plan_of_decoder(fault, *settings, batches=batches)
        return CheckContext(RunContext(plan), build_model_trial(plan), LEFT_OUT, LEFT_OUT)

    return make


def of_data(fault: str) -> Callable[[Path], CheckContext]:
    def make(path: Path) -> CheckContext:
        plan = plan_of_decoder("none", f'data.options={{fault="{fault}"}}')
        found = build_data_trial(plan)
        data = found if isinstance(found, Finding) else replace(found, vocabulary=41)
        return CheckContext(RunContext(plan), LEFT_OUT, data, LEFT_OUT)

    return make


def of_short_documents(path: Path) -> CheckContext:
    file = path / "short.jsonl"
    file.write_text('{"text": "four"}\n' * 200 + '{"text": "%s"}\n' % ("long " * 40))
    run = Run.parse(
        {
            "data": {
                "source": "jsonl",
                "paths": (str(file),),
                "cache": str(path / "cache"),
                "processes": 1,
                "sequence_length": 64,
                "packing": "none",
            }
        },
        source="test",
    )
    plan = Plan.from_run(run, world_size=2)
    return CheckContext(RunContext(plan), LEFT_OUT, build_data_trial(plan), LEFT_OUT)


def of_ranks(**facts: object) -> Callable[[Path], CheckContext]:
    return lambda path: CheckContext(
        context_of(quiet_machine(path)), LEFT_OUT, LEFT_OUT, FAST.model_copy(update=facts)
    )


def copy_slowly(source: Path, target: Path) -> None:
    """Replaces a file as systems without an atomic rename do: piece by piece."""
    data = Path(source).read_bytes()
    with Path(target).open("wb") as file:
        for begin in range(0, len(data), 10_000):
            file.write(data[begin : begin + 10_000])
            file.flush()
    os.unlink(source)


def space_of(free: int) -> Callable[[Path], CheckContext]:
    return of_run(
        lambda path: context_of(
            replace(quiet_machine(path), space_bytes=lambda _: (GIB, free)),
            f"run.dir={path}",
            "checkpoint.every=10",
        )
    )


def slow_pair(path: Path) -> CheckContext:
    slow = tuple(
        one.model_copy(update={"bytes_per_second": 1e8}) if one.ranks == (1, 3) else one for one in FAST.pairs
    )
    return of_ranks(pairs=slow)(path)


ENVIRONMENT = (
    Fault(
        "torch 2.9",
        "torch_version",
        of_run(lambda p: context_of(replace(quiet_machine(p), version=lambda _: "2.9.1"))),
    ),
    Fault(
        "torch without CUDA beside GPUs",
        "cuda_build",
        of_run(lambda p: context_of(replace(gpu_machine(p), torch_version_file=lambda: "cuda = None"))),
    ),
    Fault("driver older than CUDA", "cuda_build", on_gpus(plain=SMI.replace("12.4", "11.8"))),
    Fault(
        "other NCCL than torch's",
        "cuda_build",
        of_run(
            lambda p: context_of(
                replace(
                    gpu_machine(p),
                    requirements=lambda _: ["nvidia-nccl-cu12==2.27.3"],
                    version=lambda _: "2.20.5",
                )
            )
        ),
    ),
    Fault("GPUs joined through processors", "topology", on_gpus(topo=ACROSS_SOCKETS)),
    Fault(
        "NCCL_P2P_DISABLE",
        "environment_variables",
        of_run(
            lambda p: context_of(
                replace(gpu_machine(p), environment={"NCCL_P2P_DISABLE": "1"}), device="cuda"
            )
        ),
    ),
    Fault(
        "interface that is absent",
        "environment_variables",
        of_run(
            lambda p: context_of(
                replace(
                    quiet_machine(write_files(p, sys__class__net__lo="", sys__class__net__eth0="")),
                    environment={"GLOO_SOCKET_IFNAME": "ib0"},
                )
            )
        ),
    ),
    Fault(
        "all ranks pinned alike",
        "environment_variables",
        of_environment(KMP_AFFINITY="granularity=fine,compact,1,0"),
    ),
    Fault(
        "few open files",
        "open_files",
        of_run(lambda p: context_of(replace(quiet_machine(p), soft_limit=lambda _: 256), ranks=8)),
    ),
    Fault(
        "small /dev/shm",
        "shared_memory",
        of_run(
            lambda p: context_of(
                replace(gpu_machine(p), space_bytes=lambda _: (64 << 20, 64 << 20)), device="cuda"
            )
        ),
    ),
    Fault(
        "container with little memory",
        "memory_and_quota",
        of_run(lambda p: context_of(quiet_machine(cgroup(p, "memory.max", str(GIB))))),
    ),
    Fault(
        "container with half a core",
        "memory_and_quota",
        of_run(lambda p: context_of(quiet_machine(cgroup(p, "cpu.max", "50000 100000")))),
    ),
    Fault(
        "pinned to one core",
        "pinned_cores",
        of_run(lambda p: context_of(replace(quiet_machine(p), usable_cores=lambda: 1))),
    ),
    Fault("too many threads", "threads", of_environment(OMP_NUM_THREADS="16")),
    Fault(
        "no huge pages for offload",
        "huge_pages",
        of_run(
            lambda p: context_of(
                quiet_machine(
                    write_files(p, sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]")
                ),
                "offload.tier=optimizer:cpu",
            )
        ),
    ),
    Fault("memory errors of a GPU", "gpu_health", on_gpus(health=HEALTHY.replace("0, 0,", "0, 7,"))),
    Fault("hot GPU that slows down", "gpu_health", on_gpus(health=HEALTHY.replace("43,", "91,"))),
    Fault("other process on a GPU", "other_processes", on_gpus(processes="4711, python, 30000 MiB\n")),
    Fault(
        "unknown MASTER_ADDR",
        "host_names",
        of_run(
            lambda p: context_of(
                replace(quiet_machine(p), environment={"MASTER_ADDR": "node-77"}, can_resolve=lambda _: False)
            )
        ),
    ),
    Fault(
        "busy loops",
        "idle_machine",
        of_run(lambda p: context_of(replace(quiet_machine(p), processor_seconds=Processors(0.9)))),
    ),
)


def cgroup(path: Path, name: str, text: str) -> Path:
    directory = path / "sys/fs/cgroup"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text)
    return path


SETTINGS = (
    Fault("warmup longer than the run", "settings", of_settings("train.steps=10")),
    Fault("rate that ends at zero", "settings", of_settings("schedule.min_lr_ratio=0")),
    Fault("restarts without saves", "settings", of_settings("run.restarts=3")),
    Fault("saves rarer than steps", "settings", of_settings("checkpoint.every=500")),
    Fault("validation rarer than steps", "settings", of_settings("train.validate_every=1000")),
)
STORAGE = (
    Fault(
        "copy instead of rename",
        "atomic_rename",
        of_run(lambda p: context_of(replace(quiet_machine(p), replace=copy_slowly), f"run.dir={p}")),
    ),
    Fault(
        "fsync that does nothing",
        "flush",
        of_run(lambda p: context_of(replace(quiet_machine(p), fsync=lambda _: None), f"run.dir={p}")),
    ),
    Fault(
        "checkpoints in memory",
        "flush",
        of_run(
            lambda p: context_of(
                quiet_machine(write_files(p, proc__mounts=f"tmpfs {p} tmpfs rw 0 0\n")), f"run.dir={p}"
            )
        ),
    ),
    Fault("space for one checkpoint of three", "checkpoint_space", space_of(GIB + GIB)),
    Fault("space for none", "checkpoint_space", space_of(1000)),
)
MODELS = (
    Fault("logits × 12", "first_loss", of_model("hot", "model.options.vocabulary=256", batches=())),
    Fault("loss is NaN", "first_loss", of_model("not finite")),
    Fault("tokens shifted by one", "sees_future", of_model("shifted")),
    Fault("attention without mask", "sees_future", of_model("attends to all")),
    Fault("BatchNorm", "row_independence", of_model("batch norm")),
    Fault("rows added up", "row_independence", of_model("mixes rows")),
    Fault("counter in a buffer", "repeatability", of_model("counter")),
    Fault("Python's random numbers", "repeatability", of_model("own random numbers")),
    Fault("unused module", "gradients", of_model("unused")),
    Fault("detached", "gradients", of_model("detached")),
    Fault("gradient is NaN", "gradients", of_model("gradient not finite")),
    Fault("tie by copy", "tied_parameters", of_model("copied tie")),
    Fault("mean of means", "microbatches", of_model("none", "train.loss=tests.fakes.broken:mean_of_means")),
    Fault("parameter without initialiser", "initial_values", of_model("uninitialised")),
    Fault("all matrices are zero", "initial_values", of_model("zeros")),
    Fault("buffer in fp64", "dtypes", of_model("fp64 table")),
    Fault("weights in fp16", "dtypes", of_model("fp16 weights")),
    Fault("tensor that is no buffer", "meta_tensors", of_model("lost table")),
    Fault("one unit of 99 %", "unit_sizes", of_model("one large unit")),
    Fault("graph break", "graphs", of_model("breaks the graph", "run.compile=true")),
)
DATA = (
    Fault("token over the vocabulary", "vocabulary_range", of_data("token too large")),
    Fault("labels mostly masked", "labels", of_data("masked")),
    Fault("all labels masked", "labels", of_data("all masked")),
    Fault("labels not shifted", "labels", of_data("labels not shifted")),
    Fault("short documents, unpacked", "lengths", of_short_documents),
    Fault("same rows on all ranks", "duplicates", of_data("same on all ranks")),
    Fault("same rows in all steps", "duplicates", of_data("repeats")),
    Fault("order by what was read", "order", of_data("depends on what was read")),
    Fault("order by number of ranks", "order", of_data("depends on ranks")),
)
RANKS = (
    Fault("clock 5 s ahead", "clocks", of_ranks(clock_offsets_seconds={"b": 5.0})),
    Fault("firewall", "connections", of_ranks(unreachable=("a cannot connect to b: refused",))),
    Fault("slow link", "links", slow_pair),
    Fault(
        "other version on a rank",
        "same_settings",
        of_ranks(settings=({"torch": "2.13.0"},) * 3 + ({"torch": "2.12.0"},)),
    ),
    Fault("state in bf16", "state_dtypes", of_ranks(state_dtypes={"momentum": "bfloat16"})),
)
FAULTS = (*SETTINGS, *ENVIRONMENT, *STORAGE, *MODELS, *DATA, *RANKS)


def problems(context: CheckContext, *, group: str) -> dict[str, Finding]:
    """Name of the check -> warning or failure, of the checks of a group."""
    return {one.check: one for one in iterate_findings(context, group=group) if one.is_problem}
