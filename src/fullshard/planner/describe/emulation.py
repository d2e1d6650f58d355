"""Emulates on fake tensors what runs on real ones: fused CUDA kernels, and compiled blocks.

[Note: CUDA kernels]
A CPU build of torch cannot create fake CUDA tensors, and on CPU tensors these functions take other paths: RMS
norm decomposes and keeps several copies, dropout uses a float mask, attention uses another layout. While a
model is described for a GPU, they call the fused operations, whose output shapes are known on any device.

[Note: compiled blocks]
A block's forward and backward are traced into one graph, which torch's own partitioner splits into what
forward saves and what backward computes again, as for Inductor. Both graphs then run operation by
operation on fake tensors, so that the tracer counts them as it counts eager code. Elementwise operations
between two other kernels count as one kernel, which never writes the tensors between them to memory. No
code is generated, and no GPU or C++ compiler is needed.
"""

from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fullshard.models.document_attention import emulate_cuda_attention
from fullshard.parallel.recompute import OperationPolicy, apply_recompute, block_recompute_policy
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.settings.train_section import RecomputeSection
from fullshard.torch_private import fake_tensors, graphs
from fullshard.torch_private.tensors import TreeSpec, tree_flatten, tree_unflatten

_ATEN = torch.ops.aten
_DECOMPOSED: ContextVar[bool] = ContextVar("_DECOMPOSED", default=False)


class _CudaAttention:
    """Chooses the kernel of `scaled_dot_product_attention` as torch does on a GPU.

    Without a mask, flash attention stands for cuDNN's kernel: both save the output and one fp32 number per
    row. Dropout's random state is a few bytes more.
    """

    def __init__(self, preferred: AttentionKernel) -> None:
        self._preferred: AttentionKernel = preferred
        # Whether the memory-efficient kernel takes fewer key/value heads than query heads depends on torch.
        with torch.device("meta"):
            many, few, rows = torch.empty(1, 2, 8, 8), torch.empty(1, 1, 8, 8), torch.empty(1, 2, 8)
            state = [torch.empty((), dtype=torch.int64)] * 2
        wanted = [True, True, True, False]
        gradients = _ATEN._scaled_dot_product_efficient_attention_backward(
            many, many, few, few, None, many, rows, *state, 0.0, wanted
        )
        self._efficient_takes_groups = gradients[1].shape == few.shape

    def __call__(  # signature: aten::scaled_dot_product_attention  # noqa: PLR0913, PLR0917
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        half, grouped = query.dtype in (torch.float16, torch.bfloat16), key.shape[1] != query.shape[1]
        one_width = query.shape[-1] == value.shape[-1]  # latent attention (MLA) has narrower values
        # Flash attention takes heads of one width, and reads the number of grouped heads off the shapes.
        if attn_mask is None and half and one_width and query.shape[-1] <= 256:
            return _ATEN._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # each call writes an additive mask
            bias = torch.where(attn_mask.logical_not(), float("-inf"), query.new_zeros(()))
        is_trained = bias is not None and bias.requires_grad  # T5's positions; cuDNN's has no such gradient
        if half and not is_trained and _cudnn_supports_head_widths(query, value, kernel=self._preferred):
            return _ATEN._scaled_dot_product_cudnn_attention(
                query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
            )[0]
        if grouped and not self._efficient_takes_groups:
            return _ATEN._scaled_dot_product_attention_math(
                query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        expanded = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        return _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, expanded, True, dropout_p, is_causal, scale=scale
        )[0]


def _cudnn_supports_head_widths(query: Tensor, value: Tensor, *, kernel: AttentionKernel) -> bool:
    """Returns whether cuDNN's kernel is for heads of these widths, multiples of 8 (`sdp_utils.cpp`, 2.11)."""
    most = {"flash": 0, "cudnn": 128, "cudnn_256": 256}[kernel]
    return all(width <= most and width % 8 == 0 for width in (query.shape[-1], value.shape[-1]))


def _cuda_rms_norm(  # signature: aten::rms_norm
    value: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if _DECOMPOSED.get():
        mean = value.float().square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
        rows = torch.finfo(value.dtype).eps if eps is None else eps
        normal = (value.float() * (mean + rows).rsqrt()).to(value.dtype)
        return normal if weight is None else normal * weight
    if weight is None or tuple(weight.shape) != tuple(normalized_shape):
        weight = torch.ones(normalized_shape, dtype=value.dtype)
    return cast(Tensor, _FusedRmsNorm.apply(value, weight))


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm as one kernel per direction, which saves its input and one fp32 number per row.

    Only shapes and dtypes are right; the values are not.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        rows = value.shape[: value.ndim - weight.ndim]
        ctx.save_for_backward(value, weight, value.new_empty(rows, dtype=torch.float32))
        return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        value, weight, _ = ctx.saved_tensors
        return gradients[0] * value, torch.empty_like(weight)


def _cuda_dropout(value: Tensor, p: float, train: bool) -> Tensor:  # signature: aten::dropout
    return _ATEN.native_dropout(value, p, train)[0] if train and p > 0 else value


@contextmanager
def decompose_fused_norms() -> Generator[None]:
    """While active, emulated RMS norm runs as the operations that a compiler fuses with others."""
    token = _DECOMPOSED.set(True)
    try:
        yield
    finally:
        _DECOMPOSED.reset(token)


@contextmanager
def emulate_cuda_kernels(attention_kernel: AttentionKernel = "flash") -> Generator[None]:
    """Makes CPU tensors of this process take CUDA's code paths while active. For fake tensors only.

    attention_kernel: the kernel that torch prefers on the GPU, where it can be used
    """
    kernels: dict[str, Any] = {
        "scaled_dot_product_attention": _CudaAttention(attention_kernel),
        "dropout": _cuda_dropout,
        "rms_norm": _cuda_rms_norm,
    }
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
            fake_tensors.forget_dispatch(getattr(_ATEN, name).default)
        with emulate_cuda_attention():
            yield
    finally:
        fake_tensors.unregister(library)
        for name in kernels:
            fake_tensors.forget_dispatch(getattr(_ATEN, name).default)


# What tracing a block may raise that eager code does not: torch's compiler cannot take every block.
_FAILURES = (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError, KeyError)
Program = Callable[..., Any]


class CompiledPrograms:
    """Graphs of blocks on fake tensors, which equal blocks share: of a model, and of its copies.

    fakes: the mode of all these tensors
    fuse: context in which launches are fused and memory is counted as compiled code uses it
    """

    def __init__(self) -> None:
        self.fakes = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        self.fuse: Callable[[], AbstractContextManager[None]] = nullcontext
        self._programs: dict[Hashable, Program | None] = {}

    def find_or_trace_program(
        self, key: Hashable, function: Program, *, tensors: Sequence[Tensor], policy: OperationPolicy | None
    ) -> Program | None:
        """Returns the program of `key`, at first traced from `function` on `tensors`; None if that failed."""
        if key not in self._programs:
            try:
                self._programs[key] = self._trace_program(function, tensors, policy=policy)
            except _FAILURES:
                self._programs[key] = None
        return self._programs[key]

    def _trace_program(
        self, function: Program, tensors: Sequence[Tensor], *, policy: OperationPolicy | None
    ) -> Program:
        """Returns `function` as a forward and a backward graph for tensors of these shapes."""

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:  # signature: torch's
            if policy is not None:
                _mark_operations_to_save_or_recompute(joint.graph, policy)
            return graphs.min_cut_rematerialization_partition(joint, inputs, **options)

        def run_graph(graph: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
            def run(arguments: list[Any]) -> Any:
                with self.fuse():
                    return _GraphInterpreter(graph).boxed_run(arguments)

            graphs.mark_as_emptying_its_arguments(run)
            return run

        compilers: dict[str, Any] = {"fw_compiler": run_graph, "bw_compiler": run_graph}
        program = graphs.aot_function(
            function, partition_fn=partition, decompositions=graphs.select_decomp_table(), **compilers
        )
        fakes = cast(fake_tensors.FakeTensorMode, graphs.detect_fake_mode(list(tensors)))
        with fake_tensors.disable_current_modes(), decompose_fused_norms():
            with fakes:
                likes = [_empty_like(one) for one in tensors]
            program(*likes)
        return program


class CompiledBlocks:
    """Replaces `forward`s of blocks by the graphs that `torch.compile` would run.

    failed: blocks that run eagerly: they cannot be traced, or are no single graph and recompute selectively
    """

    def __init__(self, programs: CompiledPrograms) -> None:
        self.programs = programs
        self.failed: set[nn.Module] = set()

    def replace_forwards(
        self,
        blocks: Sequence[nn.Module],
        section: RecomputeSection,
        *,
        pieces: Collection[nn.Module],
    ) -> None:
        """Replaces the `forward` of each block, except of `pieces`: blocks with units inside, not one graph.

        section: which blocks recompute, within their graphs; pieces recompute as if they were eager
        """
        if section.mode == "selective":  # then pieces run eagerly
            self.failed.update(pieces)
        own = [block.forward for block in blocks]
        apply_recompute(blocks, section)
        for position, (block, forward) in enumerate(zip(blocks, own, strict=True)):
            recomputed = section if section.applies_to(position) else RecomputeSection(mode="none")
            if block not in pieces:
                block.forward = _GraphForward(block, forward, blocks=self, section=recomputed)


def _empty_like(tensor: Tensor) -> Tensor:
    """Returns a new leaf like `tensor`, which may be a wrapper of other tensors (a weight in fp8)."""
    if not fake_tensors.is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor, requires_grad=tensor.requires_grad)
    wrapper = cast(Any, tensor)
    names, context = wrapper.__tensor_flatten__()
    inner = {name: _empty_like(getattr(wrapper, name)) for name in names}
    like: Tensor = type(wrapper).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return like.requires_grad_(tensor.requires_grad)


class _GraphForward:
    """A block's forward on fake tensors, run as the graphs that `torch.compile` would make of it."""

    def __init__(
        self, block: nn.Module, forward: Program, *, blocks: CompiledBlocks, section: RecomputeSection
    ) -> None:
        self.block, self.forward, self.blocks, self.section = block, forward, blocks, section
        self.eager = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # signature: the block's own
        leaves, structure = tree_flatten((args, kwargs))
        modules = [self.block, *(leaf for leaf in leaves if isinstance(leaf, nn.Module))]
        held = [dict([*module.named_parameters(), *module.named_buffers()]) for module in modules]
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [*(tensor for one in held for tensor in one.values()), *(leaves[index] for index in where)]
        # The function outlives this call, and must not keep its tensors alive.
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        run = partial(_run_with_tensors_replaced, self.forward, tree=(rest, structure), where=where)
        run = partial(run, holders=[(module, list(one)) for module, one in zip(modules, held, strict=True)])
        policy = block_recompute_policy(self.section)
        saved = self.section.save_matmuls if self.section.mode == "selective" else str(policy is None)
        key = (_operations_key(run, tensors), saved, torch.is_grad_enabled())
        program = self.blocks.programs.find_or_trace_program(key, run, tensors=tensors, policy=policy)
        if program is not None:
            return program(*tensors)
        self.blocks.failed.add(self.block)
        return self.eager(*args, **kwargs)


def _run_with_tensors_replaced(
    forward: Program,
    *tensors: Tensor,
    holders: Sequence[tuple[nn.Module, list[str]]],
    tree: tuple[list[Any], TreeSpec],
    where: Sequence[int],
) -> Any:
    """Calls `forward` with `tensors` in the place of parameters, buffers and arguments.

    holders: modules with the names of their tensors, which come first
    tree: the other arguments as leaves, with their structure; `where`: the leaves that are tensors
    """
    given, passed = iter(tensors), list(tree[0])
    with ExitStack() as stack:
        for module, names in holders:
            stack.enter_context(graphs.reparametrize_module(module, {name: next(given) for name in names}))
        for index in where:
            passed[index] = next(given)
        positional, named = tree_unflatten(passed, tree[1])
        return forward(*positional, **named)


class _GraphInterpreter(fx.Interpreter):
    """Runs a graph operation by operation. Operations that save or restore a random state run without it."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:  # signature: torch's
        if target is torch.ops.higher_order.run_and_save_rng_state:
            return torch.empty(0, dtype=torch.uint8), args[0](*args[1:], **kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)


def _mark_operations_to_save_or_recompute(graph: fx.Graph, policy: OperationPolicy) -> None:
    """Marks each operation of forward as one to save or to compute again, as recompute does when compiled."""
    of_backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(one in of_backward for one in node.all_input_nodes):
            of_backward.add(node)
        elif node.op == "call_function":
            node.meta["ac_graph_id"] = 0
            source = node.all_input_nodes[0] if node.target is getitem else node
            node.meta["recompute"] = source.meta["recompute"] if source is not node else policy(node.target)


class _OperationLog(fake_tensors.TorchDispatchMode):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[Hashable] = []
        self._tensors = list(tensors)  # kept alive, so that no id is used twice
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [self._describe(leaf) for leaf in tree_flatten((args, kwargs or {}))[0]]
        outputs = [self._describe(leaf) for leaf in tree_flatten(result)[0]]
        self.operations.append((func, *leaves, *outputs))
        return result

    def _describe(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        if id(leaf) not in self._numbers:
            self._numbers[id(leaf)] = len(self._tensors)
            self._tensors.append(leaf)
        return (self._numbers[id(leaf)], tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)


def _operations_key(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Hashable:
    """Returns a key that is equal for functions that do the same operations on the same tensors."""
    fakes = cast(fake_tensors.FakeTensorMode, graphs.detect_fake_mode(list(tensors)))
    with fake_tensors.disable_current_modes(), fakes, torch.no_grad(), _OperationLog(tensors) as log:
        function(*tensors)
    inputs = tuple((tuple(one.shape), one.stride(), one.dtype, one.requires_grad) for one in tensors)
    return inputs, tuple(log.operations)
