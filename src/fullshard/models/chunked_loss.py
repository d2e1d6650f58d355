"""Cross entropy whose logits are computed in chunks of rows, and never exist as a whole.

[Note: gradients in forward]
For each chunk, the head's logits, the loss, and the gradients of the chunk's hidden states and of the head's
parameters are computed at once, and the logits are freed. Backward only scales the gradients. So it costs the
same matmuls as whole logits. Gradients of parameters in half precision are summed over chunks in fp32.

[Note: a chunk stands for all]
A trace (see `planner.describe.trace`) runs one chunk and multiplies its work, so that its structure does not
depend on the size of the microbatch. So no chunk is longer than a sequence, and all count as equally long.

[Note: divided vocabulary]
If the head's vocabulary is divided over ranks, each rank computes its own part of each chunk's logits. The
softmax needs a maximum and a sum over these ranks per chunk, of one number per row, and the loss one sum in
all. Without chunks, all rows are one chunk.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from fullshard.distributed.sequence_parts import reduce_over_ranks
from fullshard.errors import TrainError
from fullshard.models import deferred_logits
from fullshard.spec.settings.data_section import IGNORED_LABEL

AUTO_ROWS = 2048
"""Rows of a chunk by default: with fewer, reading the head's weights takes longer than the matmuls."""
_WORTHWHILE_BYTES = 64 << 20
"""Size of a sequence's logits in fp32 from which on they are computed in chunks by default."""

Rows = int | Literal["auto"]


class ChunkTracer(Protocol):
    """Records the work of one chunk for all chunks."""

    def scale_work_of_chunk(self, rows: int, *, of: int) -> AbstractContextManager[None]:
        """While active, records the work of a chunk of `rows` rows as that of `of` rows."""
        ...

    def record_kernels_as_backward(self) -> AbstractContextManager[None]:
        """While active, records work as that of a backward."""
        ...


_tracer: ContextVar[ChunkTracer | None] = ContextVar("chunk tracer", default=None)


@contextmanager
def run_first_chunk_for_all(tracer: ChunkTracer) -> Generator[None]:
    """While active, runs only the first chunk of each loss. See [Note: a chunk stands for all]."""
    before = _tracer.set(tracer)
    try:
        yield
    finally:
        _tracer.reset(before)


def chunked_cross_entropy(
    model: nn.Module,
    call: Callable[[], Any],
    *,
    labels: Tensor,
    weights: Tensor | None = None,
    chunk_rows: Rows = "auto",
) -> tuple[Tensor, Any]:
    """Returns (summed cross entropy in nats, output of the model), without ever holding all logits.

    The model must say which module computes its logits, by `get_output_embeddings()`, as models of
    transformers do. Scalings and caps that it applies to the logits are applied to each chunk. If it does
    anything else with them (WholeLogitsWarning), or has no such method, the logits are computed whole.
    Otherwise the output has `DeferredLogits` in their place.

    model: the model, sharded or not
    call: calls the model once and returns its output, such as `lambda: model(tokens)`
    labels: int64 (microbatch, sequence), the token that each position predicts; -100 does not count
    weights: factors of the loss of each label, of the shape of `labels`; unset, 1
    chunk_rows: rows of logits computed at once, at most a sequence; 0 computes them whole. "auto" is 2,048
        if a rank's logits of a sequence take more than 64 MiB in fp32, else 0. In fp16 they are always
        whole, because small gradients would vanish before they are scaled.

    >>> loss, _ = fs.chunked_cross_entropy(model, lambda: model(tokens), labels=labels, chunk_rows=8)
    >>> (loss / labels.numel()).backward()
    """
    head, length = deferred_logits.find_head(model), labels.shape[-1]
    targets = _Targets(labels.flatten(), None if weights is None else weights.flatten())
    divided = None if head is None else deferred_logits.find_divided_head(head)
    if head is not None and chunk_rows == "auto":
        count = deferred_logits.count_logits_per_row(head) if divided is None else divided.part.largest_size
        chunk_rows = AUTO_ROWS if 4 * length * count > _WORTHWHILE_BYTES else 0
    if head is None or not (chunk_rows or divided):
        output = call()
        return _loss_without_chunks(_logits_of(output, model, labels=labels), targets), output
    rows = min(int(chunk_rows), length) if chunk_rows else labels.numel()
    finish = partial(_call_head_for_loss, targets=targets, rows=rows)
    with deferred_logits.defer_head(model, head, finish=finish) as found:
        call()
    if found.value is None:
        logits = getattr(found.output, "logits", found.output)
        if isinstance(logits, deferred_logits.DeferredLogits):
            logits = logits.call.compute_whole_logits("the loss")
        return _loss_without_chunks(_logits_of(logits, model, labels=labels), targets), found.output
    return found.value, found.output


class _Targets(NamedTuple):
    """Labels and their weights, each (rows,)."""

    labels: Tensor
    weights: Tensor | None


def _logits_of(output: Any, model: nn.Module, *, labels: Tensor) -> Tensor:
    """Returns the logits in a model's output. Raises TrainError without any, as in (logits, loss)."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.ndim and logits.shape[:-1].numel() == labels.numel():
        return logits
    raise TrainError(
        f"{type(model).__name__.removeprefix('FSDP')} does not return logits for each token.",
        got=f"{type(logits).__name__} {list(getattr(logits, 'shape', ''))}",
        why=f"the default loss reads logits {[*labels.shape, 'vocabulary']} or an object with such `logits`",
        fix='set train.loss = "package.module:function". If the model returns (logits, loss): '
        'def function(model, batch): return model(batch["tokens"], batch["labels"])[1]',
    )


def _loss_without_chunks(logits: Tensor, targets: _Targets) -> Tensor:
    rows = logits.flatten(0, -2).to(_loss_dtype(logits))
    if targets.weights is None:
        return F.cross_entropy(rows, targets.labels, ignore_index=IGNORED_LABEL, reduction="sum")
    each = F.cross_entropy(rows, targets.labels, ignore_index=IGNORED_LABEL, reduction="none")
    return (each * targets.weights).sum()


def _call_head_for_loss(call: deferred_logits.HeadCall, *, targets: _Targets, rows: int) -> Tensor:
    """Calls the head as a module, so that its hooks run, with the loss in place of its forward."""
    head, forward = call.head, call.head.forward
    divided = deferred_logits.find_divided_head(head)

    def compute_loss(hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float16:
            return _loss_without_chunks(call.apply_steps(forward(hidden)), targets)
        own = [parameter for parameter in head.parameters() if parameter.requires_grad]
        trained = dict.fromkeys((*own, *call.trained))
        logits_of, part = (forward, None) if divided is None else (divided.forward, divided.part)
        work = _ChunkedLossInputs(lambda chunk: call.apply_steps(logits_of(chunk)), targets, rows, part)
        return _ChunkedCrossEntropy.apply(work, hidden, *trained)

    with deferred_logits.replace_forward(head, compute_loss):
        return head(call.hidden)


class _ChunkedLossInputs(NamedTuple):
    """Inputs of a chunked loss that have no gradient: how to compute logits, labels, rows of a chunk.

    part: this rank's part of the vocabulary; None for all. See [Note: divided vocabulary].
    """

    logits_of: Callable[[Tensor], Tensor]
    targets: _Targets
    rows: int
    part: deferred_logits.VocabularyPart | None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy. See [Note: gradients in forward]."""

    @staticmethod
    def forward(ctx: Any, work: _ChunkedLossInputs, hidden: Tensor, *trained: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        needs_hidden = ctx.needs_input_grad[1]
        hidden_gradient = torch.empty_like(flat) if needs_hidden else None
        needed = [one for one, needs in zip(trained, ctx.needs_input_grad[2:], strict=True) if needs]
        sums = [torch.zeros_like(one, dtype=_loss_dtype(one)) for one in needed]
        total = flat.new_zeros((), dtype=_loss_dtype(flat))
        for part in _iterate_chunks(len(flat), work.rows):
            chunk = flat[part].detach().requires_grad_(needs_hidden)
            inputs = [chunk, *needed] if needs_hidden else needed
            with torch.set_grad_enabled(bool(inputs)):
                logits = work.logits_of(chunk)
            edge = get_gradient_edge(logits) if inputs else None
            labels, weights = work.targets
            targets = _Targets(labels[part], None if weights is None else weights[part])
            loss, gradient = _loss_and_gradient(logits, targets, part=work.part, wanted=bool(inputs))
            total += loss
            del logits
            if edge is None:
                continue
            tracer = _tracer.get()
            with nullcontext() if tracer is None else tracer.record_kernels_as_backward():
                found = list(torch.autograd.grad([edge], inputs, [gradient], materialize_grads=True))
                del gradient
                if hidden_gradient is not None:
                    hidden_gradient[part] = found.pop(0)
                while found:  # each is freed once it is added
                    sums[-len(found)] += found.pop(0)
        if work.part is not None:
            total = reduce_over_ranks(total, False, work.part.group)
        ctx.gradients = [sums.pop(0).to(one.dtype) for one in needed]  # each sum is freed once it is cast
        if hidden_gradient is not None:
            ctx.gradients.insert(0, hidden_gradient.view_as(hidden))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a chunked loss can run backward only once: its gradients are scaled in place")
        scaled = (gradients.pop(0).mul_(factor) if needs else None for needs in ctx.needs_input_grad[1:])
        return (None, *scaled)


def _loss_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _loss_and_gradient(
    logits: Tensor, targets: _Targets, *, part: deferred_logits.VocabularyPart | None, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the summed loss, and if `wanted`, its gradient of the logits (rows, vocabulary or `part`).

    With `part`, the loss is the sum over the labels in this part.
    """
    (labels, weights), logits, dtype = targets, logits.detach(), _loss_dtype(logits)
    counted = here = labels != IGNORED_LABEL
    if part is None:
        target = torch.where(counted, labels, 0).unsqueeze(1)
        softmax = torch.softmax(logits, dim=-1, dtype=dtype)
        # The logarithm of the sum of exponentials, from the largest: a pass less than by log_softmax.
        largest, at = logits.max(dim=-1, keepdim=True)
        found = logits.gather(1, target).to(dtype) - (largest.to(dtype) - softmax.gather(1, at).log())
    else:
        tokens, here = part.local_rows_and_mask(labels)
        target = tokens.unsqueeze(1)
        log_softmax = part.log_softmax(logits, dtype=dtype)
        found, softmax = log_softmax.gather(1, target), log_softmax.exp_()
    each = torch.where(here, found.squeeze(1), 0.0)
    total = -(each if weights is None else each * weights).sum()
    if not wanted:
        return total, None
    softmax.scatter_add_(1, target, here.unsqueeze(1).to(dtype).neg_())
    factors = counted.to(dtype) if weights is None else torch.where(counted, weights.to(dtype), 0.0)
    gradient = softmax if logits.dtype == dtype else torch.empty_like(logits)
    return total, torch.mul(softmax, factors.unsqueeze(1), out=gradient)  # one pass scales, masks and casts


def _iterate_chunks(count: int, rows: int) -> Iterator[slice]:
    """Yields the rows of each chunk of `count` rows, or only of the first in `run_first_chunk_for_all`."""
    tracer = _tracer.get()
    if tracer is None:
        yield from (slice(start, min(start + rows, count)) for start in range(0, count, rows))
        return
    with tracer.scale_work_of_chunk(rows, of=count):
        yield slice(0, rows)
