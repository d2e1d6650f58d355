"""Parametrisations of which the default suite takes a sample."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, here: Collection[Any]) -> list[Any]:
    """Parameters for all `values`, of which those that are not in `here` are marked `long`."""
    return [pytest.param(value, marks=() if value in here else pytest.mark.long) for value in values]
