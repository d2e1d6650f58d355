"""Runs a model's forward up to its output head, so that a loss can compute the logits in chunks of rows.

[Note: the head runs last]
Logits are the largest tensor of a language model: 8,192 tokens of a vocabulary of 128,256 take 2 GiB in bf16,
and their gradients and fp32 copies several times as much. So a stand-in takes the head's place while forward
runs. It returns `DeferredLogits`: the hidden states, and a record of what forward does to the logits (soft
caps, scalings, casts). Once forward is done, the head is called once, as a module, so that FSDP2 gathers its
unit as always, and computes the loss instead of the logits. It runs inside the model's own call, because the
head may belong to the root unit.

Anything else that forward does with the logits needs them whole: they are computed on the spot, with a
WholeLogitsWarning that names the operation.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import gather_sequence, reduce_over_ranks
from fullshard.torch_private.fake_tensors import DisableTorchFunctionSubclass, make_wrapper_subclass
from fullshard.torch_private.tensors import registered_modules


@dataclass(frozen=True)
class VocabularyPart:
    """Part of a vocabulary: consecutive tokens whose rows of an embedding or head one of `ranks` ranks has.

    vocabulary_size: tokens of all parts, which are equal, except that the last ones may be smaller or empty
    group: name of the process group of the ranks that share it
    """

    vocabulary_size: int
    ranks: int
    rank: int
    group: str

    @property
    def largest_size(self) -> int:
        """Number of tokens of the first part, which no part exceeds."""
        return -(-self.vocabulary_size // self.ranks)

    @property
    def first_token(self) -> int:
        return self.rank * self.largest_size

    @property
    def tokens(self) -> range:
        return range(self.first_token, min(self.first_token + self.largest_size, self.vocabulary_size))

    def local_rows_and_mask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of `tokens` in this rank's part (0 if not in it), and which are in it."""
        rows = tokens - self.first_token
        own = (rows >= 0) & (rows < len(self.tokens))
        return torch.where(own, rows, 0), own

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits (..., sequence, vocabulary) of all parts.

        All ranks must compute the same from them, because their gradients are not summed over ranks.
        """
        return _GatherLogits.apply(logits, self)  # pyright: ignore[reportReturnType]

    def log_softmax(self, logits: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of the log-softmax over the whole vocabulary. No gradient. Collective.

        logits: this rank's (rows, part of the vocabulary)
        """
        logits = logits.detach().to(dtype)
        greatest = reduce_over_ranks(logits.amax(-1), True, self.group)
        shifted = logits - greatest.unsqueeze(-1)
        sums = reduce_over_ranks(shifted.exp().sum(-1), False, self.group)
        return shifted.sub_(sums.log_().unsqueeze(-1))


class _GatherLogits(torch.autograd.Function):
    """Gathers logits from all ranks. The gradient is the same on all, and each takes its part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart) -> Tensor:
        ctx.part, ctx.count = part, logits.shape[-1]
        padded = F.pad(logits, (0, part.largest_size - logits.shape[-1]))
        whole = gather_sequence(padded.transpose(-1, -2), part.ranks, 1, part.group)
        return whole.transpose(-1, -2)[..., : part.vocabulary_size]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.narrow(-1, ctx.part.first_token, ctx.count), None


Step = Callable[[Tensor], Tensor]
_DIVIDED = "_fullshard_divided_head"


class WholeLogitsWarning(UserWarning):
    """A model applies an operation to its logits that cannot be applied in chunks."""


@dataclass
class HeadCall:
    """A call of a head that has not been computed.

    head: the head
    hidden: (..., width)
    steps: operations that the model applied to the logits, in order
    trained: tensors with gradients that the steps read, such as a learnt temperature
    whole: the logits, once something needed them whole
    """

    head: nn.Module
    hidden: Tensor
    steps: tuple[Step, ...] = ()
    trained: tuple[Tensor, ...] = ()
    whole: Tensor | None = None

    def apply_steps(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits

    def compute_whole_logits(self, operation: str) -> Tensor:
        """Returns the logits, which `operation` needs whole. Warns once per operation and line of code."""
        if self.whole is None:
            warnings.warn(
                f"the logits are computed whole, not in chunks: {type(self.head).__name__}'s output goes "
                f"through {operation}",
                WholeLogitsWarning,
                stacklevel=4,
            )
            self.whole = self.apply_steps(self.head(self.hidden))
        return self.whole


class DeferredLogits(Tensor):
    """Logits (..., vocabulary) that are not computed: shape, dtype, device, and the call of the head."""

    call: HeadCall

    @staticmethod
    def of_call(call: HeadCall, *, vocabulary: int, dtype: torch.dtype | None = None) -> "DeferredLogits":
        shape, device = (*call.hidden.shape[:-1], vocabulary), call.hidden.device
        made: Any = make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype or call.hidden.dtype, device=device
        )
        made.call = call
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        if name in _METADATA or (name == "__get__" and func in _METADATA_GETTERS):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = next((one for one in args if isinstance(one, DeferredLogits)), None)
        pointwise = name in _POINTWISE and _are_arguments_independent_of_rows(args, kwargs)
        if own is not None and own.call.whole is None and pointwise:
            return own._add_step(func, args=args, kwargs=kwargs)
        with DisableTorchFunctionSubclass():
            return func(*_with_whole_logits(args, name), **_with_whole_logits(kwargs, name))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes the logits whole for operations that torch starts without `__torch_function__`."""
        name = str(func)
        return func(*_with_whole_logits(args, name), **_with_whole_logits(kwargs or {}, name))

    def _add_step(self, func: Any, *, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "DeferredLogits":
        where = next(index for index, one in enumerate(args) if one is self)

        def apply_to_chunk(logits: Tensor) -> Tensor:
            return func(*args[:where], logits, *args[where + 1 :], **kwargs)

        call, (*_, vocabulary) = self.call, self.shape
        read = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one is not self]
        trained = (*call.trained, *(one for one in read if one.requires_grad))
        added = HeadCall(call.head, call.hidden, (*call.steps, apply_to_chunk), trained)
        with torch.no_grad():
            dtype = apply_to_chunk(call.hidden.new_empty((0, vocabulary), dtype=self.dtype)).dtype
        return DeferredLogits.of_call(added, vocabulary=vocabulary, dtype=dtype)


_PLAIN = (type(None), bool, int, float, torch.dtype)
# Questions about a tensor that need no values.
_METADATA = {"dim", "size", "numel", "is_floating_point", "is_complex", "ndimension", "element_size"}
_METADATA_GETTERS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_meta", "layout")
}
# Operations on each logit alone, if their other arguments are the same for all rows.
_POINTWISE = {
    *("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide", "tanh"),
    *("__imul__", "__itruediv__", "add", "__add__", "__radd__", "sub", "__sub__", "clamp", "neg", "__neg__"),
    *("to", "float", "bfloat16", "half", "double", "type", "contiguous"),
}


def _are_arguments_independent_of_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if all arguments but one are numbers, dtypes, scalars, or vectors over the vocabulary."""
    others = [one for one in (*args, *kwargs.values()) if not isinstance(one, DeferredLogits)]
    return len(others) == len(args) + len(kwargs) - 1 and all(
        one.ndim <= 1 if isinstance(one, Tensor) else isinstance(one, _PLAIN) for one in others
    )


def _with_whole_logits(nest: Any, operation: str) -> Any:
    if isinstance(nest, DeferredLogits):
        return nest.call.compute_whole_logits(operation)
    if isinstance(nest, tuple | list):
        parts = [_with_whole_logits(one, operation) for one in cast(list[Any], nest)]
        return tuple(parts) if isinstance(nest, tuple) else parts
    if isinstance(nest, dict):
        return {k: _with_whole_logits(one, operation) for k, one in cast(dict[Any, Any], nest).items()}
    return nest


class _DeferringHead(nn.Module):
    """Takes the place of a head; its output is deferred. Other attributes are the head's."""

    def __init__(self, head: nn.Module, *, vocabulary: int) -> None:
        super().__init__()
        self.__dict__["stands_for"], self.__dict__["vocabulary"] = head, vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        call = HeadCall(self.__dict__["stands_for"], hidden)
        return DeferredLogits.of_call(call, vocabulary=self.__dict__["vocabulary"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)


@dataclass(frozen=True)
class DividedHead:
    """A head whose vocabulary is divided over ranks. `forward` computes this rank's part of the logits."""

    part: VocabularyPart
    forward: Callable[[Tensor], Tensor]


def set_divided_head(head: nn.Module, divided: DividedHead) -> None:
    """Marks `head`, so that losses can do without whole logits. Its own forward returns whole logits."""
    head.__dict__[_DIVIDED] = divided


def find_divided_head(head: nn.Module) -> DividedHead | None:
    """Returns how the vocabulary of `head` is divided; None if it is not."""
    return head.__dict__.get(_DIVIDED)


def count_logits_per_row(head: nn.Module) -> int:
    """Returns the number of logits that a head computes for each row."""
    return cast(int, head.out_features)


def find_head(model: nn.Module) -> nn.Module | None:
    """Returns the module that computes the logits; None if the model names none or is compiled as a whole."""
    if hasattr(model, "_orig_mod"):  # compiled as a whole, with its head
        return None
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) and hasattr(found, "out_features") else None


@dataclass
class OutputAndFinishedValue:
    """Result of a forward whose head was deferred.

    output: the model's output, with DeferredLogits instead of logits
    value: what `finish` returned; None if the logits were computed whole, or the head was not called
    """

    output: Any = None
    value: Tensor | None = None


@contextmanager
def defer_head(
    model: nn.Module, head: nn.Module, *, finish: Callable[[HeadCall], Tensor]
) -> Generator[OutputAndFinishedValue]:
    """While active, a call of `model` ends with `finish(call)` instead of the call of its head.

    The call returns the output and the value that it sets in the yielded OutputAndFinishedValue. `finish`
    must call the head exactly once. See [Note: the head runs last].
    """
    found, forward = OutputAndFinishedValue(), model.forward

    @wraps(forward)
    def forward_and_finish(*args: Any, **kwargs: Any) -> Any:  # signature: the model's own
        with _replace_head(model, head):
            output = forward(*args, **kwargs)
        logits = getattr(output, "logits", output)
        found.output = output
        if isinstance(logits, DeferredLogits) and logits.call.whole is None:
            found.value = finish(logits.call)
        # FSDP2 gathers the root unit for backward when a tensor of its outputs gets a gradient.
        return output, found.value

    with replace_forward(model, forward_and_finish):
        yield found


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """While active, a call of `module` runs its hooks and `forward`."""
    before, own = module.forward, "forward" in module.__dict__
    module.forward = forward
    try:
        yield
    finally:
        if own:
            module.forward = before
        else:
            del module.__dict__["forward"]


@contextmanager
def _replace_head(model: nn.Module, head: nn.Module) -> Generator[None]:
    stand_in = _DeferringHead(head, vocabulary=count_logits_per_row(head))
    places = [
        (cast(dict[str, Any], slots), name)
        for slots in map(registered_modules, model.modules())
        for name, child in slots.items()
        if child is head
    ]
    for modules, name in places:
        modules[name] = stand_in
    try:
        yield
    finally:
        for modules, name in places:
            modules[name] = head
