"""Runs that hang on purpose, in processes of their own: a watchdog ends them, so the pool cannot run them."""

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.models.loss import Loss
from fullshard.spec.plan import Plan
from fullshard.survival.phase import RunPhase
from fullshard.survival.watchdog import watch_for_hangs
from fullshard.system.process import call_on_watchdog_exit
from fullshard.training.loop import train
from tests.ranks.pool import warm
from tests.training.runs import Pairs, mean_square, run_of, sharded

FOREVER = 600
WATCHDOG_SECONDS = 6  # a busy machine may stop a process for a second or two
PATIENT = {"grace_seconds": 60.0, "slack_seconds": 60.0}  # a machine may stop all of them for some seconds
SILENT = {harm: {"slack_seconds": 10.0} for harm in ("stops_itself", "holds_the_interpreter")}
"""Harms after which the culprit reports nothing, however long the others wait, and a timer ends it."""
HANGS_AT = 2
"""The step, counted from 0, in which something goes wrong on the last rank but one."""


def sleeps_in_the_data() -> None:
    time.sleep(FOREVER)


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_interpreter() -> None:
    time.sleep(1)  # the watchdog sees that the first step is over, and sets its timer to less
    ctypes.PyDLL(None).sleep(FOREVER)  # unlike CDLL, it does not let go of it


class Hanging(Pairs):
    """Batches whose loader comes to harm on one rank."""

    def __init__(self, harm: str, culprit: int) -> None:
        self.harm, self.culprit = harm, culprit

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        if (rank, step) == (self.culprit, HANGS_AT) and self.harm in globals():
            globals()[self.harm]()
        yield from super().microbatches(step, rank=rank, plan=plan)


def skipping(culprit: int) -> Loss:
    """A loss that sums something over ranks, in which one rank has no part once."""
    calls = itertools.count()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(calls) != HANGS_AT or dist.get_rank() != culprit:
            dist.all_reduce(torch.zeros(3))
        return mean_square(model, batch)

    return loss


def run_rank(harm: str, culprit: int, world: tuple[int, int, int], directory: str) -> None:
    """One rank: (rank, ranks, port of the store). Its standard error and last words lie in `directory`."""
    rank, ranks, port = world
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    file = os.open(Path(directory, f"stderr-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    state, plan = sharded(run_of(f"fault_tolerance.watchdog_timeout_seconds={WATCHDOG_SECONDS}"))
    state.data = Hanging(harm, culprit)
    loss = skipping(culprit) if harm == "skips_a_collective" else mean_square
    leave_word = Path(directory, f"last-words-{rank}").write_text
    with (
        call_on_watchdog_exit(lambda error: leave_word(str(error)), shows_error=False),
        watch_for_hangs(state.phase, plan.run.fault_tolerance, **SILENT.get(harm, PATIENT)),
    ):
        for step in train(state, plan, loss=loss):
            if harm == "saves_for_long" and (rank, step.index) == (culprit, HANGS_AT):
                state.phase.enter(RunPhase.SAVING)
                time.sleep(1.5 * WATCHDOG_SECONDS)
                state.phase.enter(RunPhase.DATA)
                time.sleep(1)  # the others see that the slow phase is over, and still wait


def hung(harm: str, directory: Path, *, ranks: int, culprit: int) -> list[int | None]:
    """The exit codes of ranks of which one comes to harm; None for one that had to be killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = warm()
    processes = [
        context.Process(target=run_rank, args=(harm, culprit, (rank, ranks, store.port), str(directory)))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    codes: list[int | None] = []
    for rank in sorted(range(ranks), key=lambda rank: rank == culprit):  # the culprit last
        process = processes[rank]
        process.join(timeout=1 if rank == culprit and harm == "stops_itself" else 600)
        codes.append(process.exitcode)
        process.kill()
        process.join()
    return codes
