"""Errors of models that cannot be traced."""

from torch import nn

from fullshard.errors import TraceError
from fullshard.torch_private.fake_tensors import DataDependentOutputException, DynamicOutputShapeException

# Raised by fake tensors where a shape or a number depends on values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# Raised by models and torch on tensors without values.
TRACE_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


def trace_error(model: nn.Module, error: Exception, *, given_batch: bool) -> TraceError:
    """Returns the error for a model that cannot be traced. `given_batch`: whether the user gave the batch."""
    name = type(model).__name__
    if isinstance(error, NEEDS_VALUES):
        return TraceError(
            f"{name} cannot be described on tensors without values.",
            got=error_text(error),
            why="its shapes, or the operations that it runs, depend on the values of tensors",
            fix="describe(..., batch=one of your microbatches, with values)",
        )
    if given_batch:
        return TraceError(f"{name} cannot be described on the given batch.", got=error_text(error))
    return TraceError(
        f"{name} cannot be described on a batch of int64 tokens and labels.",
        got=error_text(error),
        why="no batch was given, so one was made up",
        fix="describe(..., batch=one of your microbatches), and loss=your_loss if it takes more",
    )


def error_text(error: Exception) -> str:
    """Returns the error's class and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
