"""The parts that the lessons of docs/learn share: model, data, training (`run_lesson`) and tables."""

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard as fs
from fullshard.distributed.tensors import shard_offsets
from fullshard.observe.memory import storage_bytes_of_tensors
from fullshard.torch_private.groups import group_of_name

WIDTH, BLOCKS = 64, 4
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor | tuple[Tensor, Tensor]]
# Plain settings, so that each number of a table can be derived by hand. A lesson adds its strategy.
SETTINGS = [
    "data.sequence_length=1",  # a sample is one row
    "train.global_batch=32",  # rows of a step, over all ranks
    "train.microbatch=8",  # rows of a rank in one forward: two microbatches a step on two ranks
    "precision.mode=fp32",
    "recompute.mode=none",
]
COLUMNS = ("parameters", "gathered", "gradients", "optimizer")
MOMENTS = (
    "microbatch 1: before forward",
    "microbatch 1: forward of block 3",
    "microbatch 2: before forward",
    "before the update",
    "between steps",
)


class Block(nn.Module):
    """2 · 64 · 256 parameters: 128 KiB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Four blocks: 131,072 parameters, 512 KiB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def reversal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the error of a network that learns to reverse its input."""
    return (model(batch["x"]) - batch["x"].flip(-1)).square().mean()


def batches(plan: fs.Plan, rank: int) -> Iterator[dict[str, Tensor]]:
    """Yields microbatches without end. Each rank has its own."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield {"x": torch.randn(plan.microbatch, WIDTH, generator=generator)}


def texts(plan: fs.Plan, rank: int) -> Iterator[dict[str, Tensor]]:
    """Yields microbatches of tokens that count upwards. Ranks that share each matmul have the same ones."""
    generator = torch.Generator().manual_seed(plan.data_rank(rank))
    length, words = plan.run.data.sequence_length, plan.run.decoder_config.vocabulary
    while True:
        first = torch.randint(words, (plan.microbatch, 1), generator=generator)
        tokens = (first + torch.arange(length + 1)) % words
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


class BytesSent(TorchDispatchMode):
    """Counts the bytes that this rank sends while it is active, on CPU ranks.

    Of an all-reduce over N ranks, these are 2 (N - 1) / N of its tensor's, as in a ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # signature: torch's
        match func.name():
            case "c10d::send":  # of parameters and gradients; a reduce-scatter has the tag 1
                self.total["reduce-scatter" if args[3] == 1 else "all-gather"] += args[0][0].nbytes
            case "c10d::allreduce_":
                self._count_all_reduce(args[0][0], dist.ProcessGroup.unbox(args[1]))
            case "fullshard::gather_sequence":  # of activations: the rank's part goes to the others
                self.total["all-gather"] += args[0].nbytes * (args[1] - 1)
            case "fullshard::reduce_sequence":
                self.total["reduce-scatter"] += args[0].nbytes * (args[1] - 1) // args[1]
            case "fullshard::reduce_over_ranks":
                self._count_all_reduce(args[0], group_of_name(args[2]))
        return func(*args, **(kwargs or {}))

    def _count_all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.total["all-reduce"] += 2 * (group.size() - 1) * tensor.nbytes // group.size()


class Watch:
    """Records the bytes that a rank holds at moments of a step. `loss` is the loss to train with.

    The columns: parameters that stay on the rank (its shards), parameters that are gathered for a while,
    gradients, and AdamW's two moments. Activations are not counted.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        self.moments: dict[str, dict[str, int]] = {}
        self._model, self._optimizer, self._shards = model, optimizer, list(model.parameters())
        self._loss, self._microbatch = loss, 0
        for name, module in model.named_modules():
            if name.endswith("down"):  # the last matmul of a block
                block = f"block {name.split('.')[1]}"
                module.register_forward_pre_hook(lambda *_, b=block: self.note(f"forward of {b}"))
                module.register_full_backward_pre_hook(lambda *_, b=block: self.note(f"backward of {b}"))
        optimizer.register_step_pre_hook(lambda *_: self.note("before the update", in_step=True))

    def note(self, moment: str, *, in_step: bool = False) -> None:
        """Records the bytes that are alive now. `in_step`: behind the last microbatch of the step."""
        own = {id(one) for one in self._shards}
        others = [one for one in self._model.parameters() if id(one) not in own]
        states = [t for state in self._optimizer.state.values() for t in state.values()]
        gradients = [one.grad for one in (*self._shards, *others) if one.grad is not None]
        kinds = (self._shards, others, gradients, states)
        held = {name: storage_bytes_of_tensors(kind) for name, kind in zip(COLUMNS, kinds, strict=True)}
        self.moments[moment if in_step else f"microbatch {self._microbatch}: {moment}"] = held

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the loss of a microbatch, whose moments begin with its number."""
        self._microbatch += 1
        self.note("before forward")
        return self._loss(model, batch)

    def second_step(self, steps: Iterator[fs.Step]) -> tuple[fs.Step, dict[str, int]]:
        """Runs two steps. Returns the second with the bytes that this rank sent in it.

        AdamW makes its moments in the first.
        """
        next(steps)
        self.moments, self._microbatch = {}, 0
        with BytesSent() as sent:
            step = next(steps)
        self.note("between steps", in_step=True)
        return step, sent.total


def rows_of(parameter: Tensor) -> str:
    """Returns the rows of a parameter, or its columns if these are divided, that this rank holds."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    kind, dim = ("rows", 0) if local.shape[0] < parameter.shape[0] or local.ndim == 1 else ("columns", 1)
    if local.shape == parameter.shape:
        return "all"
    first = shard_offsets(parameter)[dim]
    return f"{kind} {first}-{first + local.shape[dim] - 1}"


def show(title: str, rows: dict[str, list[str]], *, columns: list[str]) -> None:
    """Prints a table, on rank 0 only."""
    if dist.get_rank():
        return
    lines = {title: columns, **rows}
    first = max(map(len, lines))
    widths = [max(len(line[i]) for line in lines.values()) for i in range(len(columns))]
    for name, line in lines.items():
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print(name.ljust(first), *cells, sep="   ")
    print()


def show_holders(model: nn.Module, *names: str) -> None:
    """Prints which part of these parameters each rank holds. Collective."""
    parameters = dict(model.named_parameters())
    own = {f"{name} {tuple(parameters[name].shape)}": rows_of(parameters[name]) for name in names}
    ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    rows = {name: [rank[name] for rank in ranks] for name in own}
    show("who holds what", rows, columns=[f"rank {i}" for i in range(len(ranks))])


def show_moments(watch: Watch, *moments: str) -> None:
    """Prints what rank 0 held at these moments, as far as they occurred."""
    held = {one: watch.moments[one] for one in moments if one in watch.moments}  # else: fewer microbatches
    rows = {one: [*map(kib, kinds.values()), kib(sum(kinds.values()))] for one, kinds in held.items()}
    show("KiB held by a rank", rows, columns=[*COLUMNS, "in all"])


def show_sent(sent: dict[str, int], step: fs.Step) -> None:
    """Prints what rank 0 sent in the step, and its loss."""
    row = [*map(kib, sent.values()), kib(sum(sent.values()))]
    show("KiB sent by a rank", {"in the step": row}, columns=[*sent, "in all"])
    if dist.get_rank() == 0:
        print(f"step {step.index}: loss {step.loss:.3f}")


def kib(count: int) -> str:
    return f"{count / 1024:,.0f}"


def run_lesson(
    *settings: str,
    moments: Sequence[str] = MOMENTS,
    names: Sequence[str] = ("blocks.0.up.weight", "blocks.0.down.weight"),
    make_model: Callable[[fs.Run], nn.Module] = lambda run: Net(),
    data: Callable[[fs.Plan, int], Iterator[dict[str, Tensor]]] = batches,
    loss: Loss = reversal_loss,
) -> None:
    """Trains two steps with `settings`, which those of the command line replace, and prints the tables.

    moments: moments of the second step, in the table of bytes held
    names: parameters in the table of who holds what
    """
    with errors_without_traceback():
        run = fs.Run.load(overrides=[*SETTINGS, *settings, *sys.argv[1:]])
        with fs.process_group("cpu") as ranks:
            plan = fs.Plan.from_run(run, world_size=ranks.world_size, device="cpu")
            with torch.device("meta"):  # no parameter is allocated before it is sharded
                model = make_model(run)
            fs.shard(model, plan)
            optimizer = fs.build_optimizer(model, plan)
            watch = Watch(model, optimizer, loss)
            state = fs.TrainState(model, optimizer, data=data(plan, ranks.rank))
            step, sent = watch.second_step(fs.train(state, plan, loss=watch.loss))

            show_holders(model, *names)
            show_moments(watch, *moments)
            show_sent(sent, step)


@contextmanager
def errors_without_traceback() -> Generator[None]:
    """Ends the program after an error of fullshard, which rank 0 prints."""
    try:
        yield
    except fs.FullshardError as error:
        sys.exit(f"error: {error}" if os.environ.get("RANK", "0") == "0" else error.exit_code)
