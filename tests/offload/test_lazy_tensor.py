"""A tensor on a drive: read when it is used, kept by nobody, changed by nothing."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullshard.offload.store import RereadingTensor, make_lazy_tensor


class File:
    """Counts how often it is read."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.numbers = torch.arange(12, dtype=torch.float32).to(dtype)
        self.reads = 0

    def read(self) -> Tensor:
        self.reads += 1
        return self.numbers.clone()

    def tensor(self) -> RereadingTensor:
        return make_lazy_tensor(torch.Size([12]), self.numbers.dtype, read=self.read)


def test_shape_and_dtype_are_known_without_a_read() -> None:
    file = File(torch.bfloat16)
    one = file.tensor()
    shaped = one.view(3, 4).detach().view(-1).view(2, 6)
    assert (one.shape, one.dtype, one.numel(), one.nbytes) == ((12,), torch.bfloat16, 12, 24)
    assert (shaped.shape, shaped.dtype, shaped.is_contiguous()) == ((2, 6), torch.bfloat16, True)
    assert isinstance(shaped, RereadingTensor)
    assert not shaped.requires_grad
    assert "(2, 6)" in repr(shaped)
    assert file.reads == 0


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda one: one.cpu(),
    "clone": lambda one: one.clone(),
    "to device": lambda one: one.to("cpu"),
    "to device and dtype": lambda one: one.to("cpu", torch.float64).float(),
    "viewed": lambda one: one.view(4, 3).cpu().view(-1),
    "detached": lambda one: one.detach().cpu(),
    "copied into": lambda one: torch.zeros(12).copy_(one),
    "in a list": lambda one: torch.cat([one.view(2, 6), torch.zeros(0, 6)]).view(-1),
    "sliced": lambda one: torch.cat([one[:5], one[5:]]),
    "computed with": lambda one: one * 1,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_is_read_when_it_is_used_and_each_time(use: Callable[[Tensor], Tensor]) -> None:
    file = File()
    one = file.tensor()
    found = use(one)
    assert type(found) is Tensor
    assert torch.equal(found, file.numbers)
    reads = file.reads
    assert reads >= 1
    file.numbers.add_(1)
    assert torch.equal(use(one), file.numbers)  # nothing was kept
    assert file.reads == 2 * reads


def test_cpu_reads_once_and_keeps_no_copy() -> None:
    """A checkpoint reads it so: with no copy beside."""
    given: list[Tensor] = []

    def read() -> Tensor:
        given.append(torch.ones(3))
        return given[-1]

    one = make_lazy_tensor(torch.Size([3]), torch.float32, read=read)
    assert one.cpu().data_ptr() == given[0].data_ptr()
    assert len(given) == 1


def test_deepcopy_and_pickle_hold_the_values() -> None:
    file = File()
    one = file.tensor().view(3, 4)
    for kept in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert type(kept) is Tensor
        assert torch.equal(kept, file.numbers.view(3, 4))


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda one: one.zero_(),
    "copy_": lambda one: one.copy_(torch.ones(12)),
    "add_": lambda one: one.add_(1),
    "a view": lambda one: one.view(3, 4).mul_(2),
    "out": lambda one: torch.add(torch.ones(12), 1, out=one),
    "foreach": lambda one: torch._foreach_add_([one], 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_cannot_be_changed(change: Callable[[Tensor], object]) -> None:
    """Else a copy would be changed."""
    with pytest.raises(TypeError, match="would change a tensor that is on a drive"):
        change(File().tensor())
