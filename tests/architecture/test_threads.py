"""Threads that may touch a GPU set its device: a thread begins on device 0, and makes a context there."""

import ast
from collections.abc import Iterator

from tests.architecture.source import Module, package
from tests.architecture.test_budgets import of

WITHOUT_DEVICE = {
    "fullshard.checkpoint.shard_file": "hashes host memory",
    "fullshard.data.tokenize": "tokenizes text",
    "fullshard.jobs.calibrate.device": "reads a drive",
    "fullshard.observe.trackers": "sends figures",
    "fullshard.offload.generations": "hashes host memory",
    "fullshard.survival.status_board": "asks the store",
    "fullshard.survival.watchdog": "writes a diagnosis",
    "fullshard.system.direct_io": "writes host memory",
    "fullshard.weights.export": "reads files into host memory that is not pinned",
}
SETS_DEVICE = "fullshard.distributed.host"  # `make_device_thread`


def threads(module: Module) -> Iterator[int]:
    """The lines that start threads of other kinds than `make_device_thread`."""
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread"):
                yield node.lineno


def test_other_threads_leave_the_device_alone() -> None:
    assert {name for name, module in package().items() if any(threads(module))} == {
        *WITHOUT_DEVICE,
        SETS_DEVICE,
    }


def test_threads_are_found() -> None:
    text = "pool = futures.ThreadPoolExecutor(1)\nthreading.Thread(target=print)\nmake_device_thread('one')"
    assert [*threads(of(text))] == [1, 2]
