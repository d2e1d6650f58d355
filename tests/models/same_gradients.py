"""Compares the gradients of a sharded model with those of the whole one."""

import torch
from torch import nn

from fullshard.training.gradients import sum_gradients_over_tensor_axis
from tests.fakes.architectures import whole


def assert_same_values_and_gradients(model: nn.Module, plain: nn.Module) -> None:
    """`model`: sharded, after its backward; its gradients are summed over ranks that share matmuls here."""
    sum_gradients_over_tensor_axis([p.grad for p in model.parameters() if p.grad is not None])
    sharded = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        assert torch.equal(whole(sharded[key]), parameter), key
        if parameter.grad is not None:
            gradient = sharded[key].grad
            assert gradient is not None, key
            torch.testing.assert_close(
                whole(gradient), parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda t, key=key: f"{key}: {t}"
            )
