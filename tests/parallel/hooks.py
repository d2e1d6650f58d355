"""Communication hooks of a user: one that counts what it sends, and one with error feedback."""

from collections import Counter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor


class Counting:
    """Sends as FSDP2 does, in torch's own collectives, and counts bytes for all other ranks."""

    sent: ClassVar[Counter[str]] = Counter()

    def gather(self, shard: Tensor, group: Any) -> Tensor:
        rows = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(rows, shard.contiguous(), group=group)
        self.sent["gather"] += (group.size() - 1) * self.wire_bytes(shard.numel(), str(shard.dtype))
        return torch.stack(rows)

    def reduce(self, parts: Tensor, group: Any) -> Tensor:
        total = parts.float().clone()
        dist.all_reduce(total, group=group)
        self.sent["reduce"] += (group.size() - 1) * self.wire_bytes(parts.shape[1], str(parts.dtype))
        return total[group.rank()]

    def wire_bytes(self, n: int, dtype: str) -> int:
        return (2 if dtype.endswith("16") else 4) * n


class ErrorFeedback:
    """Sends signs and one scale, and adds what they leave out to the next gradients (arXiv:1901.09847)."""

    def __init__(self) -> None:
        self.error: Tensor | None = None

    def reduce(self, parts: Tensor, group: Any) -> Tensor:
        wanted = parts.float() + (0 if self.error is None else self.error)
        sent = wanted.sign() * wanted.abs().mean()
        self.error = (wanted - sent).nan_to_num(0.0, 0.0, 0.0)  # a step with NaN or infinity is skipped
        total = sent.clone()
        dist.all_reduce(total, group=group)
        return total[group.rank()]

    def wire_bytes(self, n: int, dtype: str) -> int:
        return -(-n // 8) + 4

    def state(self) -> dict[str, Tensor]:
        return {} if self.error is None else {"error": self.error}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.error = state.get("error")


class WrongShape(Counting):
    def reduce(self, parts: Tensor, group: Any) -> Tensor:
        return super().reduce(parts, group)[:-1]


class NotAHook:
    def gather(self, shard: Tensor, group: Any) -> Tensor:
        return shard
