"""Activations of blocks move to the host and back, in order, and change no number."""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.parallel.activation_offload import (
    CpuHostCopier,
    FakeReportingCopier,
    HostCopier,
    offload_activations,
)
from fullshard.parallel.units import find_recompute_and_compile_blocks, find_units
from fullshard.spec.run import UnitSection
from fullshard.training.shard import shard
from tests.fakes.architectures import WIDTH, Block, loss_of, on_meta, tokens_of
from tests.fakes.plans import STRATEGIES, plan_of
from tests.training.same_numbers import make_run, train_sharded

ROWS = 40  # so that what is saved is larger than any weight
HALF = 0.5  # of a block's input: more than the mean and the deviation that a norm saves for each row


class LateLane:
    """Copies only when it is waited for, as a GPU may. Its sources and targets must live until then, and
    what it has not brought is NaN."""

    is_concurrent = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self._jobs: list[Callable[[], None]] = []
        self._done = 0

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        hosts = [torch.full_like(flat, torch.nan) for flat in flats]
        return self._issued("leave", hosts, [(weakref.ref(a), b) for a, b in zip(flats, hosts, strict=True)])

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        flats = [torch.full_like(host, torch.nan, device=device) for host in hosts]
        return self._issued("fetch", flats, [(weakref.ref(a), b) for a, b in zip(flats, hosts, strict=True)])

    def make_stream_wait(self, ticket: Any) -> None:
        self.log.append("wait")
        for job in self._jobs[self._done : ticket]:
            job()
        self._done = max(self._done, ticket)

    @property
    def idle(self) -> bool:
        return self._done == len(self._jobs)

    def _issued(self, what: str, made: list[Any], pairs: list[Any]) -> tuple[list[Any], int]:
        def job(reference: "weakref.ref[Tensor]", host: Tensor) -> None:
            flat = reference()
            assert flat is not None, "a tensor was let go while it was copied"
            _ = host.copy_(flat) if what == "leave" else flat.copy_(host)

        self.log.append(what)
        self._jobs += [partial(job, *pair) for pair in pairs]
        return made, len(self._jobs)


LANES: dict[str, Callable[[], HostCopier]] = {"plain": CpuHostCopier, "late": LateLane}


def blocks(count: int = 4, kind: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(count)))


def offloaded(model: nn.Sequential, copier: HostCopier, *, share: float = HALF) -> nn.Sequential:
    twin = copy.deepcopy(model)
    offload_activations(list(twin), smallest_fraction=share, device="cpu", copier=copier)
    return twin


def entering() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    x = entering()
    run(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def moves_of(model: nn.Sequential, *, share: float = HALF) -> list[tuple[str, int]]:
    """The moves of a forward and backward. The copier brings nothing back, so gradients are none."""
    moves: list[tuple[str, int]] = []
    twin = offloaded(model, FakeReportingCopier(lambda way, size: moves.append((way, size))), share=share)
    gradients(twin, twin)
    return moves


@pytest.mark.parametrize("copier", LANES)
@pytest.mark.parametrize("share", [0.0, HALF])
def test_gradients_are_bitwise_equal_with_offload(copier: str, share: float) -> None:
    model, lanes = blocks(), LANES[copier]()
    twin = offloaded(model, lanes, share=share)
    for _ in range(2):
        assert same(gradients(twin, twin), gradients(model, model))
    if isinstance(lanes, LateLane):
        assert lanes.idle


def test_large_storages_of_all_blocks_except_the_last_move_once() -> None:
    """Its input, what its norm gives and its tanh; of parameters, and of a row's mean and deviation, none."""
    moves = moves_of(blocks(3))
    each = [ROWS * WIDTH * 4, ROWS * WIDTH * 4, ROWS * 3 * WIDTH * 4]
    for way in ("out", "back"):
        assert [size for done, size in moves if done == way] == 2 * each
    small = moves_of(blocks(3), share=0.0)
    assert sorted(size for way, size in small if way == "out") == sorted(2 * [*each, ROWS * 4, ROWS * 4])


def test_a_few_rows_do_not_send_weights_along() -> None:
    """Weights are saved too, and may be larger than what enters; the block's own, or another module's."""
    lent = nn.Parameter(torch.ones(9, 9))

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.table = nn.Parameter(torch.ones(9, 9)), nn.Buffer(torch.ones(9, 9))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t() @ lent.t()).tanh() * self.table[:1] + x

    model = blocks(2, Flat)
    moves: list[tuple[str, int]] = []
    offload_activations(
        list(model),
        smallest_fraction=0.0,
        device="cpu",
        copier=FakeReportingCopier(lambda *one: moves.append(one)),
    )
    model(torch.ones(1, 9)).sum().backward()
    assert {size for way, size in moves if way == "out"} == {9 * 4}


def test_copies_are_waited_for_a_block_later_and_brought_a_block_before() -> None:
    copier = LateLane()
    twin = offloaded(blocks(3), copier)
    for at, block in enumerate(twin):
        block.up.register_forward_pre_hook(lambda *_, at=at: copier.log.append(f"forward {at}"))
        block.register_full_backward_pre_hook(lambda *_, at=at: copier.log.append(f"backward {at}"))
    result = twin(entering())
    # The first leaves while the second computes, the second while the last does, which keeps what it saves.
    first = ["forward 0", "leave", "forward 1", "wait", "leave", "forward 2", "wait"]
    assert copier.log == first
    copier.log.clear()
    result.sum().backward()
    # As the last one's backward begins the second's is fetched; as that one's does, the first's.
    assert copier.log == ["backward 2", "fetch", "backward 1", "wait", "fetch", "backward 0", "wait"]


class Deaths:
    """Notes which blocks' tanh, a storage that it saves, is still on the device."""

    def __init__(self, model: nn.Sequential) -> None:
        self.alive: list[weakref.ref[torch.UntypedStorage]] = []
        for block in model:
            block.up.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        tanh = torch.tanh(result)
        self.alive.append(weakref.ref(tanh.untyped_storage()))
        return tanh

    def alive_blocks(self) -> list[bool]:
        return [reference() is not None for reference in self.alive]


@pytest.mark.parametrize(
    ("copier", "during"), [("plain", [False, False, False]), ("late", [False, False, True])]
)
def test_at_most_two_blocks_are_on_the_device(copier: str, during: list[bool]) -> None:
    model = blocks(5)
    twin = offloaded(model, LANES[copier]())
    deaths, seen = Deaths(twin), list[list[bool]]()
    twin[3].norm.register_forward_hook(lambda *_: seen.append(deaths.alive_blocks()))
    result = twin(entering())
    assert seen == [during]
    assert deaths.alive_blocks() == [False, False, False, False, True]
    result.sum().backward()
    del result
    assert not any(deaths.alive_blocks())


def test_nothing_that_moved_outlives_the_graph() -> None:
    """Neither what leaves nor what was fetched; where no backward comes, until the next forward is done."""
    for copier in (CpuHostCopier(), LateLane()):
        twin = offloaded(blocks(4), copier)
        deaths = Deaths(twin)
        result = twin(entering())
        del result
        assert deaths.alive_blocks()[:2] == [False, False]
        gradients(twin, twin)
        assert not any(deaths.alive_blocks())


def test_backward_may_run_twice_over_a_retained_graph() -> None:
    model = blocks()
    plain, moved = model, offloaded(model, LateLane())
    found = []
    for one in (plain, moved):
        one.zero_grad()
        loss = one(entering()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert same(*found)


def test_backward_may_go_again_after_another_forward() -> None:
    """The last block that moves had not left yet in the first backward."""
    model = blocks(3)
    copier, found = LateLane(), []
    for one in (model, offloaded(model, copier)):
        one.zero_grad()
        part = one[1](one[0](entering())).square().sum()
        part.backward(retain_graph=True)
        loss = one(entering()).sum()
        part.backward()
        loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert same(*found)
    assert copier.idle


@pytest.mark.parametrize("copier", LANES)
def test_a_block_may_run_twice_and_two_forwards_go_before_a_backward(copier: str) -> None:
    model = blocks(3)
    twin = offloaded(model, LANES[copier]())

    def twice(one: nn.Sequential, x: Tensor) -> Tensor:
        once = one[2](one[1](one[0](one[0](one[1](x)))))
        return once + one(x * 0.5)

    assert same(gradients(partial(twice, twin), twin), gradients(partial(twice, model), model))


class Sliced(Block):
    """Saves views of one storage, of another dtype too, and a conjugate."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(self.norm(x)).tanh().chunk(3, dim=-1)
        turned = torch.view_as_complex((q * k).exp().unflatten(-1, (-1, 2)))
        turned = turned * turned.conj() * turned
        return x + self.down(torch.cat([torch.view_as_real(turned).flatten(-2), k * v, q.t().exp().t()], -1))


@pytest.mark.parametrize("copier", LANES)
def test_views_come_back_as_they_were(copier: str) -> None:
    model = blocks(3, Sliced)
    twin = offloaded(model, LANES[copier](), share=0.0)
    assert same(gradients(twin, twin), gradients(model, model))
    # q, k and v are one storage, of 3 widths: the tanh itself.
    assert [size for way, size in moves_of(model) if way == "out"].count(ROWS * 3 * WIDTH * 4) == 2 * 2


class Mutating(Block):
    """Changes in place what it saved, or what the block before saved and has not left yet."""

    changes = ""
    before: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        z = self.down(y)
        if self.changes == "own":
            y.mul_(2)
        elif self.changes == "before":
            Mutating.before.mul_(2)
        Mutating.before = y
        return x + z


@pytest.mark.parametrize("copier", LANES)
@pytest.mark.parametrize("share", [0.0, 100.0])
def test_in_place_change_of_saved_tensors_is_refused(copier: str, share: float) -> None:
    """As without hooks, whether it moves or stays."""
    model = blocks(3, Mutating)
    model[0].changes = "own"
    twin = offloaded(model, LANES[copier](), share=share)
    for one in (model, twin):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(one, one)


def test_in_place_change_of_leaving_tensors_is_refused() -> None:
    model = blocks(3, Mutating)
    model[1].changes = "before"
    twin = offloaded(model, LateLane())
    for one in (model, twin):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(one, one)


class Failing(Block):
    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fails == "forward":
            raise ValueError("forward failed")
        if self.fails == "backward":
            y.register_hook(self._raise)
        return y

    def _raise(self, _gradient: Tensor) -> None:
        raise ValueError("backward failed")


@pytest.mark.parametrize("copier", LANES)
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_step_that_failed_leaves_the_next_one_whole(copier: str, fails: str, at: int) -> None:
    model, lanes = blocks(4, Failing), LANES[copier]()
    twin = offloaded(model, lanes)
    twin[at].fails = fails
    with pytest.raises(ValueError, match=f"{fails} failed"):
        gradients(twin, twin)
    twin[at].fails = ""
    assert same(gradients(twin, twin), gradients(model, model))
    if isinstance(lanes, LateLane):
        assert lanes.idle


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_tensors_saved_by_compiled_blocks_move() -> None:
    """Except weights, of which compiled code saves views without an owner."""
    torch._dynamo.reset()
    moves: list[tuple[str, int]] = []
    copier = LateLane()
    model = blocks(3)
    for twin_copier in (FakeReportingCopier(lambda *one: moves.append(one)), copier):
        twin = copy.deepcopy(model)
        for block in twin:
            block.forward = torch.compile(block.forward)
        offload_activations(list(twin), smallest_fraction=HALF, device="cpu", copier=twin_copier)
        ours = gradients(twin, twin)
    torch.testing.assert_close(ours, gradients(model, model))
    assert copier.log == ["leave", "wait"] * 2 + ["fetch", "wait"] * 2
    weights = {parameter.nbytes for parameter in model.parameters()}
    out = [size for way, size in moves if way == "out"]
    assert out
    assert not weights & set(out)


def test_without_gradients_nothing_moves() -> None:
    copier = LateLane()
    model = blocks()
    twin = offloaded(model, copier)
    with torch.no_grad():
        assert torch.equal(twin(entering()), model(entering()))
    with torch.inference_mode():
        twin.eval()(entering())
    assert copier.log == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gradients_on_a_gpu_are_bitwise_equal_with_offload() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6))).cuda()
    twin = copy.deepcopy(model)
    offload_activations(list(twin), smallest_fraction=0.0, device="cuda")
    x = torch.randn(1 << 16, WIDTH, device="cuda")
    found = []
    for one in (model, twin):
        for _ in range(3):
            one.zero_grad()
            one(x).square().sum().backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert same(*found)


# On ranks #
class Clones(TorchDispatchMode):
    """Bytes of each flat copy: what leaves on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].ndim == 1:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


OFFLOADS = {
    "all": ("recompute.mode=offload",),
    "inputs": ("recompute.mode=full", "recompute.inputs=host"),
    "first inputs": ("recompute.mode=full", "recompute.inputs=host", "recompute.blocks=1"),
}


def moved_bytes(name: str, *settings: str) -> tuple[list[int], int]:
    """Bytes that leave in a forward, and those of one sequence's input of a block."""
    plan = plan_of(2, *settings)
    model = shard(on_meta(name), plan)
    section = UnitSection()
    assert len(find_recompute_and_compile_blocks(model, units=find_units(on_meta(name), section))) == 2
    with Clones() as clones:
        loss = loss_of(model, tokens_of(0, sequences=1))
    loss.backward()
    numel = tokens_of(0, sequences=1).numel() * WIDTH
    # Without the mean and the deviation that a norm saves for each row.
    return [size for size in clones.sizes if size >= HALF * numel * 2], numel


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_gathered_parameters_do_not_move(strategy: str, precision: str, ranks: Any) -> None:
    """One of two blocks moves: input, norm and tanh. Weights, which are larger, are freed and gathered."""
    settings = (*OFFLOADS["all"], *STRATEGIES[strategy], f"precision.mode={precision}")
    for sizes, numel in ranks(2).run(moved_bytes, "gpt2", *settings):
        each = numel * (2 if precision == "bf16" else 4)
        assert sorted(sizes) == [each, each, 3 * each]


def test_of_recomputed_blocks_the_inputs_move(ranks: Any) -> None:
    settings = (*OFFLOADS["inputs"], *STRATEGIES["full_shard"], "precision.mode=bf16")
    for sizes, numel in ranks(2).run(moved_bytes, "gpt2", *settings):
        assert sizes == [numel * 2]


@pytest.mark.parametrize(
    ("model", "offload", "strategy", "accumulation", "extra"),
    [
        ("decoder", "all", "full_shard", (2, "last_microbatch"), ("precision.mode=bf16",)),
        ("decoder", "inputs", "full_shard", (2, "last_microbatch"), ("precision.mode=bf16",)),
        ("tied_decoder", "all", "no_shard", (1, "every_microbatch"), ()),
        ("tied_decoder", "first inputs", "shard_grad_op", (1, "every_microbatch"), ()),
        pytest.param("odd_mixture", "all", "zero1", (2, "every_microbatch"), (), marks=pytest.mark.long),
        pytest.param("odd_mixture", "inputs", "zero1", (2, "every_microbatch"), (), marks=pytest.mark.long),
    ],
)
def test_training_with_offload_is_bitwise_equal(
    model: str,
    *,
    offload: str,
    strategy: str,
    accumulation: tuple[int, str],
    extra: tuple[str, ...],
    ranks: Any,
) -> None:
    """Parameters, losses and norms of a few steps."""
    runs = [
        make_run(
            model=model, ranks=2, strategy=strategy, accumulation=accumulation, extra=(*settings, *extra)
        )
        for settings in (("recompute.mode=none",), OFFLOADS[offload])
    ]
    for (plain, *figures), (moved, *others) in zip(
        *(ranks(2).run(train_sharded, model, run) for run in runs), strict=True
    ):
        assert figures == others
        assert same(list(moved.values()), list(plain.values()))
