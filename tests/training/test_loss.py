"""The default loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.training.loss import next_token_loss


class Fixed(nn.Module):
    """Gives the same logits for any tokens."""

    def __init__(self, logits: Tensor, *, wrapped: bool = False) -> None:
        super().__init__()
        self.logits, self.wrapped = logits, wrapped

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits) if self.wrapped else self.logits


def example() -> tuple[Tensor, dict[str, Tensor]]:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, -100, 4], [-100, -100, 2]])
    return logits, {"tokens": torch.zeros_like(labels), "labels": labels}


def test_it_sums_over_valid_labels_and_counts_them() -> None:
    logits, batch = example()
    total, count = next_token_loss(Fixed(logits), batch)
    by_hand = -sum(logits.log_softmax(-1)[place] for place in ((0, 0, 0), (0, 2, 4), (1, 2, 2)))
    torch.testing.assert_close(total, by_hand)
    assert count == 3


def test_no_valid_label_is_a_sum_of_nothing() -> None:
    logits, batch = example()
    total, count = next_token_loss(Fixed(logits), batch | {"labels": torch.full((2, 3), -100)})
    assert (total.item(), count.item()) == (0.0, 0)


def test_an_output_with_logits_is_as_good_and_half_precision_is_summed_in_fp32() -> None:
    logits, batch = example()
    total, _ = next_token_loss(Fixed(logits.bfloat16(), wrapped=True), batch)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, next_token_loss(Fixed(logits.bfloat16().float()), batch)[0])


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ({"tokens": torch.zeros(1)}, "dict of tokens"),
        ((torch.zeros(1), torch.zeros(1)), "tuple"),
        (torch.zeros(2, 3), "Tensor"),
        (None, "NoneType"),
    ],
)
def test_a_batch_without_tokens_and_labels_is_refused(batch: Any, got: str) -> None:
    with pytest.raises(TrainError, match="needs a batch with tokens and labels") as raised:
        next_token_loss(nn.Identity(), batch)
    assert raised.value.got == got
