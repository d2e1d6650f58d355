"""Roundings depend on seed and position alone, and the GPU's kernel has the CPU's results."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.offload.rounding import (
    AdamOptions,
    RoundingSeed,
    UpdateFactors,
    adamw_with_stochastic_rounding,
    factors_of_steps,
    fixed_factors,
    philox_4x32,
    random_halfwords,
)
from fullshard.spec.groups import ROUNDING_CHUNK_ELEMENTS

OPTIONS = AdamOptions(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
CPU = torch.device("cpu")
FACTORS = UpdateFactors.from_numbers(3, OPTIONS)


def decided_factors(step: int, *, grad_scale: float, left_out: bool = False) -> UpdateFactors:
    """Factors that the device decides on."""
    scale, found_inf = torch.tensor(grad_scale), torch.tensor(float(left_out))
    rows = factors_of_steps(torch.tensor([float(step)]), OPTIONS, grad_scale=scale, found_inf=found_inf)
    return UpdateFactors(fixed_factors(OPTIONS), rows[0])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_has_the_known_answers_of_random123(counter, key, words):
    first, *others = counter
    found = philox_4x32((torch.tensor([first]), *others), key)
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("cut", [1, 30, 63, 64])
def test_a_piece_has_the_numbers_of_its_place_in_the_whole(cut):
    whole = random_halfwords(RoundingSeed(7), 101, step=2, device=CPU)
    begin, rest = RoundingSeed(7), 101 - cut
    pieces = [
        random_halfwords(begin, cut, step=2, device=CPU),
        random_halfwords(begin._replace(begin=begin.begin + cut), rest, step=2, device=CPU),
    ]
    for one, *parts in zip(whole, *pieces, strict=True):
        assert torch.equal(one, torch.cat(parts))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], random_halfwords(RoundingSeed(7), 101, step=3, device=CPU)[0])


def state_and_gradient(count: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    value, gradient, first = (
        torch.randn(count, generator=generator).mul_(scale).bfloat16().view(shape)
        for scale in (1, 1e-2, 1e-2)
    )
    second = torch.rand(count, generator=generator).mul_(1e-4).bfloat16().view(shape)
    gradient.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 0.0])
    return value, first, second, gradient


def test_an_update_in_pieces_is_the_whole_update():
    whole, pieces = state_and_gradient(150_001, (150_001,)), state_and_gradient(150_001, (150_001,))
    adamw_with_stochastic_rounding(whole[:3], whole[3], factors=FACTORS, seed=RoundingSeed(11))
    for begin, end in ((0, 64), (64, 777), (777, 150_001)):
        part = [tensor[begin:end] for tensor in pieces]
        seed = RoundingSeed(11, begin)
        adamw_with_stochastic_rounding(part[:3], part[3], factors=FACTORS, seed=seed)
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


class LargestResult(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns, except views."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        own = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in own:
            self.elements = max(self.elements, result.numel())
        return result


def test_strided_tensors_are_updated_in_chunks_with_the_bits_of_contiguous_ones():
    shape = (400, 500)
    plain, strided = state_and_gradient(200_000, shape), state_and_gradient(200_000, shape)
    strided = [one.t().contiguous().t() for one in strided]
    adamw_with_stochastic_rounding(plain[:3], plain[3], factors=FACTORS, seed=RoundingSeed(11))
    with LargestResult() as largest:
        adamw_with_stochastic_rounding(strided[:3], strided[3], factors=FACTORS, seed=RoundingSeed(11))
    assert largest.elements <= 2 * ROUNDING_CHUNK_ELEMENTS, "pairs of random numbers are twice as many"
    for one, other in zip(plain, strided, strict=True):
        assert torch.equal(one.view(torch.int16), other.contiguous().view(torch.int16))


def test_the_triton_kernel_has_the_cpus_results_bit_for_bit():
    """In Triton's interpreter, where Triton is installed; it runs the kernel's operations on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton comes with CUDA builds of torch")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", "from tests.offload.test_rounding import compare; compare()"]
    subprocess.run(command, env=environment, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_triton_kernel_has_the_cpus_results_on_a_gpu():
    compare("cuda")


def compare(device: str = "cpu") -> None:
    """Updates in both ways: an odd number of elements, in several programs, from within a shard."""
    from fullshard.offload.rounding_kernel import launch_update

    by_host, by_device = (
        UpdateFactors.from_numbers(7, OPTIONS, grad_scale=1.7),
        decided_factors(7, grad_scale=3.0),
    )
    for count, key, begin, master, factors in (
        (2501, 2**62 + 12345, 64, torch.bfloat16, by_host),
        (2501, 2**62 + 12345, 64, torch.bfloat16, by_device),
        (2501, 5, 0, torch.bfloat16, decided_factors(7, grad_scale=1.0, left_out=True)),
        (3, 5, 0, torch.float32, by_device),
    ):
        ours, kernel = ([*state_and_gradient(count, (count,))] for _ in range(2))
        ours[0], kernel[0] = ours[0].to(master), kernel[0].to(master)
        kernel = [one.to(device) for one in kernel]
        seed = RoundingSeed(key, begin)
        adamw_with_stochastic_rounding(ours[:3], ours[3], factors=factors, seed=seed)
        moved = {
            name: one.to(device) if isinstance(one, torch.Tensor) else one
            for name, one in factors._asdict().items()
        }
        launch_update(kernel[:3], kernel[3], **moved, **seed._asdict())
        for name, one, other in zip(("value", "m", "v"), ours, (one.cpu() for one in kernel), strict=False):
            assert one.isnan().equal(other.isnan()), name
            assert torch.equal(one[~one.isnan()], other[~one.isnan()]), name


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_factors_of_the_device_give_the_bits_of_the_same_numbers_or_leave_the_update_out(master):
    start = state_and_gradient(301, (301,))
    for left_out in (False, True):
        ours, theirs = ([one.clone() for one in start] for _ in range(2))
        ours[0], theirs[0] = ours[0].to(master), theirs[0].to(master)
        factors = decided_factors(7, grad_scale=1.7, left_out=left_out)
        adamw_with_stochastic_rounding(ours[:3], ours[3], factors=factors, seed=RoundingSeed(11))
        if not left_out:
            numbers = UpdateFactors.from_numbers(7, OPTIONS, grad_scale=1.7)
            adamw_with_stochastic_rounding(theirs[:3], theirs[3], factors=numbers, seed=RoundingSeed(11))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
