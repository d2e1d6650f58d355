"""Counts the operations of torch."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """While active, counts operations by name, such as `aten::mm`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    def total(self, part: str) -> int:
        """Returns the number of operations with `part` in their names."""
        return sum(count for name, count in self.counts.items() if part in name)
