"""Fixtures that every test may ask for, and what holds for all: one thread, no measuring, no deadline."""

import gc
import os
from collections.abc import Callable, Iterator

# For the processes that tests start, too: threads of OpenMP that wait for work spin.
os.environ["OMP_NUM_THREADS"] = "1"
# Runs of tests are planned alike on every machine, and none is measured before.
os.environ["FULLSHARD_CALIBRATION"] = "off"
os.environ.pop("COLUMNS", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.ranks import Pool, Workers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that are skipped without a CUDA device, so that `pytest -m cuda` runs them on a GPU."""
    for item in items:
        if any(mark.kwargs.get("reason") == "no CUDA device" for mark in item.iter_markers("skipif")):
            item.add_marker("cuda")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leaves a million objects of torch and of the tests themselves out of each collection of garbage."""
    gc.freeze()
    gc.set_threshold(5_000, 20, 10)


# How long an example takes says nothing where others use the machine.
settings.register_profile(
    "any machine", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """As a rank has: small tensors gain nothing from more, and threads that wait lose a lot."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Described models are kept for the session, not among the user's own."""
    before = os.environ.get("FULLSHARD_CACHE")
    os.environ["FULLSHARD_CACHE"] = str(tmp_path_factory.mktemp("specs"))
    yield
    if before is None:
        del os.environ["FULLSHARD_CACHE"]
    else:
        os.environ["FULLSHARD_CACHE"] = before


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Pool]]:
    """`ranks(n)`: a pool of n gloo ranks (see tests/ranks); the processes live as long as the session."""
    workers = Workers()
    yield workers.pool
    workers.close()
