"""Fixtures that every test may ask for."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Pool, Workers


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Pool]]:
    """`ranks(n)`: a pool of n gloo ranks (see tests/ranks); the processes live as long as the session."""
    workers = Workers()
    yield workers.pool
    workers.close()
