"""Trace of one microbatch on fake tensors, cut into phases where FSDP2 would act.

The hooks are at the same points as those of `fully_shard`:

- before and after a unit's modules in forward;
- at the first gradient of the outputs of a unit's modules;
- when the gradients of its inputs are complete.

A unit whose inputs have no gradient (an embedding) ends its backward with the whole backward.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fullshard.errors import TraceError
from fullshard.models.chunked_loss import run_first_chunk_for_all
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.parallel.units import Unit
from fullshard.planner.describe.operations import AllocationRecorder, PhaseRecord, list_tensors
from fullshard.quantities import count_text
from fullshard.spec.plan import DeviceType, Plan
from fullshard.torch_private import fake_tensors
from fullshard.torch_private.tensors import tree_flatten, tree_map_only, tree_unflatten

_ATEN = torch.ops.aten
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)
# Floating point results with more elements become fake: such masks take gigabytes.
_MOST_KEPT = 1 << 20
_ARANGES = (_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)


def count_batch_rows(batch: Any, plan: Plan) -> int | None:
    """Returns the number of rows of an example batch: dim 0, if all tensors agree in it.

    Returns None for a batch that cannot be resized: tensors that differ in dim 0, or the vectors of one
    sequence. Raises TraceError if such a batch has another number of sequences than the plan's microbatch.
    """
    tensors, length = list_tensors(batch), plan.run.data.sequence_length
    sizes = {tensor.shape[:1] for tensor in tensors}
    if len(sizes) == 1 and (size := sizes.pop()) and any(one.shape != (length,) for one in tensors):
        return size[0]
    for rows in (one.shape[0] for one in tensors if one.ndim > 1 and one.shape[1] == length):
        if rows != plan.microbatch:
            raise TraceError(
                "the batch that describes the model must be one microbatch.",
                got=f"{count_text(rows, 'sequence')}, where a microbatch has {plan.microbatch}",
                why="its tensors differ in dim 0, so it cannot be made larger or smaller",
                fix=f"train.microbatch = {rows}, or a batch of {count_text(plan.microbatch, 'sequence')}",
            )
    return None


def make_fake_batch(
    batch: Any,
    plan: Plan,
    *,
    microbatch: int,
    fakes: fake_tensors.FakeTensorMode,
    keep_integers: bool = False,
) -> Any:
    """Returns `batch` as fake tensors, with `microbatch` rows if it has any; None: tokens and labels.

    keep_integers: whether integers keep their values. Further rows then repeat the first ones.
    """
    if batch is None:
        shape = (microbatch, plan.run.data.sequence_length)
        batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}
    is_resized = count_batch_rows(batch, plan) not in (None, microbatch)

    def make_fake_tensor(tensor: Tensor) -> Tensor:
        if keep_integers and is_integer_with_values(tensor):
            with fake_tensors.unset_fake_temporarily():
                rows = torch.arange(microbatch) % tensor.shape[0] if is_resized else slice(None)
                return tensor.cpu()[rows].clone() if tensor.ndim else tensor.cpu().clone()
        shape = (microbatch, *tensor.shape[1:]) if is_resized else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")

    with fakes:
        return tree_map_only(Tensor, make_fake_tensor, cast(object, batch))


@contextmanager
def disable_packing_detection() -> Generator[None]:
    """Makes transformers models treat each row as one document while active, as they do on real batches.

    These models check whether positions restart within a row, to separate packed documents. On fake tensors
    they cannot know, and build a mask, so that attention does not use its causal kernel (torch 2.13,
    transformers 5). A batch that separates documents has its own mask, and the check does not run.
    """
    masks, check = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    own = getattr(masks, check, None)
    if masks is None or own is None:
        yield
        return
    setattr(masks, check, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, check, own)


class ComputeIntegerValues(fake_tensors.TorchDispatchMode):
    """Dispatch mode that computes operations on integers with values, within a FakeTensorMode.

    Models branch on, and take sizes from, the sizes of images and the places of their tokens. What depends on
    a fake tensor (activations, parameters) is fake.
    """

    def __init__(self, fakes: fake_tensors.FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        tensors = list_tensors((args, given))
        has_values = all(map(_has_values, tensors)) if tensors else _makes_integers(func, args, given=given)
        if not has_values:
            return func(*(_with_indices_for_masks(args) if func in _INDEXING else args), **given)
        with fake_tensors.unset_fake_temporarily():
            result = func(*args, **given)
        return tree_map_only(Tensor, self._fake_if_large, result)

    def _fake_if_large(self, tensor: Tensor) -> Tensor:
        is_large = tensor.is_floating_point() and tensor.numel() > _MOST_KEPT
        return self.fakes.from_tensor(tensor) if is_large else tensor


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, fake_tensors.FakeTensor))


def is_integer_with_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has integers or booleans, not on the meta device."""
    return _has_values(tensor) and not (tensor.is_floating_point() or tensor.is_complex())


def _makes_integers(func: Any, args: tuple[Any, ...], *, given: dict[str, Any]) -> bool:
    """Returns whether a function without tensor arguments makes integers or booleans, which are kept real."""
    dtype = given.get("dtype")
    if given.get("device", "cpu") not in (None, "cpu", torch.device("cpu")):
        return False
    if dtype is None:
        numbers = args if func in _ARANGES else args[1:2] if func is _ATEN.full.default else ()
        return bool(numbers) and all(isinstance(number, int) for number in numbers)
    return not (dtype.is_floating_point or dtype.is_complex)


def _with_indices_for_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of an indexing of fake tensors, with masks of known values as indices."""
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype is torch.bool and is_integer_with_values(index):
            with fake_tensors.unset_fake_temporarily():
                indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


LossFunction = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | int]]


class MicrobatchTracer:
    """Traces microbatches of a model of fake tensors.

    device: the device whose kernels compute
    has_integers: whether integers of the batches have values, and are computed
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        plan: Plan,
        fakes: fake_tensors.FakeTensorMode,
        device: DeviceType,
        has_integers: bool = False,
    ) -> None:
        self.model, self.units, self.plan, self.fakes = model, units, plan, fakes
        self.device: DeviceType = device
        self.integers = ComputeIntegerValues(fakes) if has_integers else nullcontext()
        self.allocations = AllocationRecorder(device)
        self._to_run: list[set[nn.Module]] = [set() for _ in units]  # modules of a unit yet to run
        self._in_backward: set[int] = set()
        self._finished: set[int] = set()
        self._backward_began = False

    def trace_microbatch(self, loss: LossFunction, batch: Any) -> list[PhaseRecord]:
        """Returns a record of each phase of one forward and backward. Earlier gradients do not count."""
        self.allocations = AllocationRecorder(self.device)
        self._finished, self._backward_began = set(), False
        self._to_run = [set() for _ in self.units]
        handles = self._register_hooks()
        try:
            one_chunk = run_first_chunk_for_all(self.allocations)
            one_thread = torch.autograd.set_multithreading_enabled(False)
            with one_thread, self.fakes, self.integers, self.allocations, one_chunk:
                self._ignore_existing_tensors(batch)
                result = loss(self.model, batch)
                value = result[0] if isinstance(result, tuple) else result
                self.allocations.kind, self._backward_began = "loss", True
                value.backward()
                for index in self._units_without_post_backward():
                    self._post_backward(index)
                self.allocations.start_phase("end_backward", -1)
                del result, value
        finally:
            for handle in handles:
                handle.remove()
        return self.allocations.recorded

    def allocate_gradients(self) -> None:
        """Allocates the unsharded gradient of every trained parameter, as after an earlier microbatch."""
        with self.fakes, torch.no_grad():
            for unit in self.units:
                for parameter in unit.parameters.values():
                    if parameter.requires_grad:
                        parameter.grad = torch.empty_like(parameter)

    def _ignore_existing_tensors(self, batch: Any) -> None:
        for tensor in [*self.model.parameters(), *self.model.buffers(), *list_tensors(batch)]:
            self.allocations.ignore_storage(tensor)
            if tensor.grad is not None:
                self.allocations.ignore_storage(tensor.grad)

    # Hooks #
    def _register_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for index, unit in enumerate(self.units):
            before, after = self._make_pre_forward_hook(index), self._make_post_forward_hook(index)
            for module in unit.modules:
                handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
            trained = [parameter for parameter in unit.parameters.values() if parameter.requires_grad]
            count = self._mark_storage_as_gradient
            handles += [parameter.register_post_accumulate_grad_hook(count) for parameter in trained]
        return handles

    def _make_pre_forward_hook(self, index: int) -> Callable[..., Any]:
        unit = self.units[index]
        precision = unit.settings(self.plan).precision
        dtype = TORCH_DTYPE[precision.param] if precision.cast_inputs else None

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:  # signature: torch's forward pre-hook
            args, kwargs = _cast_floating_tensors(args, dtype), _cast_floating_tensors(kwargs, dtype)
            if self._to_run[index]:
                return args, kwargs
            self._to_run[index] = set(unit.modules)
            self.allocations.start_phase("pre_forward", index)
            inputs = (args, kwargs)
            return self._start_post_backward_at_input_gradients(index, inputs) if unit.parameters else inputs

        return hook

    def _make_post_forward_hook(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, _args: Any, result: Any) -> None:  # signature: torch's forward hook
            self._to_run[index].discard(module)
            # As `gather_before_backward_of_each_module`: the last module may have no backward.
            for tensor in list_tensors(result):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self._pre_backward(index))
            if not self._to_run[index]:
                self._post_forward(index)

        return hook

    def _post_forward(self, index: int) -> None:
        again = self._backward_began  # recomputed: FSDP2 does not reshard
        if not again:
            self.allocations.start_phase("post_forward", index)
        if again and not any(self._to_run):  # for FSDP2, a unit inside a recomputed region is a root
            self.allocations.start_phase("end_forward", -1)
        if self.units[index].is_root and not again:
            for other, left in enumerate(self._to_run):
                if left:  # part of the unit did not run: FSDP2 ends its forward here
                    left.clear()
                    self.allocations.start_phase("post_forward", other)
            self.allocations.start_phase("end_forward", -1)
            self.allocations.kind = "loss"

    def _start_post_backward_at_input_gradients(self, index: int, inputs: tuple[Any, Any]) -> Any:
        """Returns `inputs` with a backward that opens the unit's post-backward phase."""
        leaves, spec = tree_flatten(inputs)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not where or not torch.is_grad_enabled():
            return inputs
        inner = [leaves[i] for i in where]
        watched = _NotifyWhenInputGradientsComplete.apply(lambda: self._post_backward(index), *inner)
        for i, leaf in zip(where, watched, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, spec)

    def _pre_backward(self, index: int) -> None:
        if index in self._in_backward:
            return
        self._in_backward.add(index)
        self._to_run[index].clear()  # recompute may stop early, once it has what backward needs
        self.allocations.start_phase("pre_backward", index)
        self.allocations.kind = "backward"

    def _mark_storage_as_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.allocations.change_storage_kind(parameter.grad, "gradients")

    def _post_backward(self, index: int) -> None:
        """Opens the unit's post-backward phase and drops its gradients, as FSDP2 does."""
        self._in_backward.discard(index)
        self._finished.add(index)
        self.allocations.start_phase("post_backward", index)
        for parameter in self.units[index].parameters.values():
            parameter.grad = None
        phase = self.allocations.recorded[-1]
        phase.event_change_count = len(phase.changes)

    def _units_without_post_backward(self) -> list[int]:
        """Returns the units whose backward no input gradient has ended, in the order of their modules."""
        position = {module: i for i, module in enumerate(self.model.modules())}
        left = [i for i, u in enumerate(self.units) if u.parameters and i not in self._finished]
        return sorted(left, key=lambda i: position[self.units[i].modules[0]])


class _NotifyWhenInputGradientsComplete(torch.autograd.Function):
    """Identity on tensors; its backward runs when the gradients of all of them are complete."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ended = ended
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ended()
        return (None, *gradients)


def _cast_floating_tensors(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


@contextmanager
def training_mode(model: nn.Module) -> Generator[None]:
    """Puts the model into training mode, as `train` does, and restores the mode of each module afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
