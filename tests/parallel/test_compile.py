"""torch.compile per block: the same numbers, the same names. Slow: the compiler starts anew on every rank."""

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from fullshard.parallel.compile import EagerBlockWarning, compile_blocks, count_compilation
from fullshard.parallel.recompute import apply_recompute
from fullshard.spec.settings.train_section import RecomputeSection
from fullshard.training.shard import shard
from tests.fakes.architectures import WIDTH, Block, loss_of, on_meta, tokens_of, whole
from tests.fakes.plans import STRATEGIES, plan_of

# The compiler's own, on some releases of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")

Results = tuple[list[str], list[float], dict[str, Tensor], int, list[str]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(name: str, *settings: str) -> Results:
    """Names in the state dict, losses, gradients, how many graphs were compiled, and warnings."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EagerBlockWarning)
        model = shard(on_meta(name), plan_of(2, *settings))
        losses = []
        for step in range(2):
            loss = loss_of(model, tokens_of(step))
            loss.backward()
            losses.append(loss.item())
    gradients = {key: whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    warned = [str(one.message) for one in caught if one.category is EagerBlockWarning]
    return list(model.state_dict()), losses, gradients, graphs, warned


def assert_compiled_equals_eager(name: str, settings: tuple[str, ...], ranks: Any) -> None:
    eager = ranks(2, timeout_seconds=400).run(train, name, *settings)
    compiled = ranks(2, timeout_seconds=400).run(train, name, *settings, "run.compile=true")
    for (names, losses, gradients, none, _), (names_, losses_, gradients_, graphs, warned) in zip(
        eager, compiled, strict=True
    ):
        assert none == 0
        assert graphs > 0
        assert not warned
        assert names_ == names
        assert not any("_orig_mod" in one for one in names_)
        assert losses_ == pytest.approx(losses, rel=1e-5)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradients_[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("decoder", "none"),
        ("decoder", "full"),
        ("decoder", "selective"),
        ("decoder", "offload"),
        ("fused_experts", "none"),  # which gather in the middle of the block
        ("fused_experts", "full"),
        ("fused_experts", "offload"),
    ],
)
def test_compiled_blocks_equal_eager_ones(name: str, recompute: str, ranks: Any) -> None:
    assert_compiled_equals_eager(name, (f"recompute.mode={recompute}",), ranks)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "hybrid_shard"])
def test_under_every_strategy(strategy: str, ranks: Any) -> None:
    assert_compiled_equals_eager("decoder", STRATEGIES[strategy], ranks)


def test_a_block_that_gathers_runs_eagerly_under_selective_recompute(ranks: Any) -> None:
    eager = ranks(2).run(train, "fused_experts", "recompute.mode=selective")
    asked = ranks(2).run(train, "fused_experts", "recompute.mode=selective", "run.compile=true")
    for (_, losses, *_), (_, losses_, _, graphs, warned) in zip(eager, asked, strict=True):
        assert graphs == 0
        assert losses_ == losses
        assert len(warned) == 1
        assert "MixtureBlock runs eagerly" in warned[0]


class Breaking(Block):
    """The compiler does not take `breakpoint`s and the like into a graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Deciding(Block):
    """Takes another way for each width of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.shape[0]


def run(blocks: nn.Sequential, *, rows: int = 5) -> list[Tensor]:
    """The gradients of one step."""
    torch.manual_seed(3)
    blocks.zero_grad()
    blocks(torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)).square().sum().backward()
    return [parameter.grad for parameter in blocks.parameters()]


def stack(kind: type[nn.Module], *, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(layers))).double()


def test_block_that_cannot_be_compiled_runs_eagerly() -> None:
    blocks = stack(Breaking)
    expected = run(copy.deepcopy(blocks))
    forwards = compile_blocks(list(blocks), pieces=())
    with pytest.warns(EagerBlockWarning, match="Breaking runs eagerly: Unsupported") as warned:
        assert all(torch.equal(*pair) for pair in zip(run(blocks), expected, strict=True))
    assert len(warned) == 1
    assert all(one.is_eager for one in forwards)
    run(blocks)  # and says no more


def test_without_a_cpp_compiler_blocks_run_eagerly() -> None:
    blocks = stack(Block)
    expected = run(copy.deepcopy(blocks))
    compile_blocks(list(blocks), pieces=())
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        pytest.warns(EagerBlockWarning, match=r"Block runs eagerly: .*(CxxCompiler|no-such-compiler)"),
    ):
        gradients = run(blocks)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def fail_in_backward(graph: torch.fx.Graph) -> None:
    """A pass of the compiler that cannot take the graphs of backward."""
    if any("tangents" in node.name for node in graph.nodes):
        raise RuntimeError("no backward today")


@pytest.mark.parametrize("whole", [True, False])
def test_block_without_compiled_backward_runs_eagerly(whole: bool) -> None:
    blocks = stack(Block)
    expected = run(copy.deepcopy(blocks))
    forwards = compile_blocks(list(blocks), pieces=() if whole else set(blocks))
    with (
        torch._inductor.config.patch({"post_grad_custom_post_pass": fail_in_backward}),
        pytest.warns(EagerBlockWarning, match=r"Block runs eagerly: .*no backward today") as warned,
    ):
        gradients = run(blocks)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    assert len(warned) == 1
    assert all(one.is_eager for one in forwards) == whole


class MeanSubtracting(nn.Module):
    """Subtracts a running mean, which includes the batch itself."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(hidden.mean(0))
        return torch.tanh(hidden - self.mean)


def test_a_recomputed_block_that_changes_a_buffer_runs_eagerly() -> None:
    blocks = stack(MeanSubtracting)
    plain = copy.deepcopy(blocks)
    expected = [run(plain), run(plain)]
    apply_recompute(list(blocks), RecomputeSection(mode="full"), compiled=set(blocks))
    forwards = compile_blocks(list(blocks), pieces=())
    with pytest.warns(EagerBlockWarning, match="changes the buffer 'mean'"):
        gradients = run(blocks)
    torch.testing.assert_close([gradients, run(blocks)], expected)
    assert all(torch.equal(one.mean, other.mean) for one, other in zip(blocks, plain, strict=True))
    assert all(one.is_eager for one in forwards)


def test_equal_blocks_share_a_graph_and_another_shape_is_a_recompilation() -> None:
    blocks = stack(Deciding)
    expected = [run(copy.deepcopy(blocks), rows=rows) for rows in (5, 7)]
    forwards = compile_blocks(list(blocks), pieces=())
    with count_compilation() as tally:
        for rows, graphs, again in ((5, 1, 0), (7, 2, 1)):
            gradients = run(blocks, rows=rows)
            torch.testing.assert_close(gradients, expected[rows > 5])
            counts = tally.compilation_of_blocks(forwards)
            assert (counts.blocks, counts.graphs, counts.recompilations) == (3, graphs, again)
            assert counts.graph_breaks == 0
            assert counts.seconds > 0
        with torch.no_grad():  # in yet another shape: no graph is compiled for it
            blocks(torch.randn(9, WIDTH, dtype=torch.float64))
        assert tally.compilation_of_blocks(forwards) == counts


def test_too_many_shapes_run_eagerly_with_a_warning() -> None:
    blocks = stack(Deciding, layers=1)
    with torch._dynamo.config.patch(recompile_limit=1):
        forwards = compile_blocks(list(blocks), pieces=())
        torch._dynamo.config.recompile_limit = 1
        run(blocks, rows=5)
        with pytest.warns(EagerBlockWarning, match=r"Deciding runs eagerly: .*recompile limit"):
            run(blocks, rows=7)
    assert forwards[0].is_eager


def test_settings_of_the_compiler_hold_in_any_thread_that_runs_a_block() -> None:
    blocks = stack(Deciding, layers=1)

    def run_in_two_shapes() -> None:
        torch._dynamo.config.recompile_limit = 1  # this thread's, which never had fullshard's
        for rows in (5, 7):
            run(blocks, rows=rows)

    with torch._dynamo.config.patch(recompile_limit=8), ThreadPoolExecutor(1) as pool:
        forwards = compile_blocks(list(blocks), pieces=())
        pool.submit(run_in_two_shapes).result()
    assert not forwards[0].is_eager


def test_graph_breaks_are_counted() -> None:
    blocks = stack(Breaking)
    expected = run(copy.deepcopy(blocks))
    forwards = compile_blocks(list(blocks), pieces=set(blocks))
    with count_compilation() as tally:
        torch.testing.assert_close(run(blocks), expected)
    counts = tally.compilation_of_blocks(forwards)
    assert (counts.blocks, counts.eager_blocks) == (3, 0)
    assert counts.graph_breaks > 0
    assert "graph break" in counts.format_text()
