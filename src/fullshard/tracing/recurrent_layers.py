"""Recurrent layers of torch (nn.RNN, nn.GRU, nn.LSTM) in a trace.

[Note: time is folded]
Most of these layers run a loop over time, some ten operations a step, which takes minutes to trace for a
thousand tokens. So a trace cuts a sequence into parts, and runs them as further rows of the microbatch: the
FLOP, and the bytes that are saved for backward, stay the same. Tensors that live for one step are larger,
each by at most 1 / `_STEPS` of the layer's output, and the cost of launching each step is not counted.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fullshard.torch_private.tensors import variable_functions

_STEPS = 32  # least number of steps of time that are traced one by one
_LOOPS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
LSTM_LAYER = "mkldnn_rnn_layer"


@contextmanager
def fold_time_of_recurrent_layers() -> Generator[None]:
    """Makes torch's recurrent layers fold time while active. See [Note: time is folded]."""
    functions = variable_functions
    for name in _LOOPS:
        setattr(functions, name, _with_folded_time(getattr(functions, name)))
    try:
        yield
    finally:
        for name in _LOOPS:
            delattr(functions, name)  # torch's own, which it looks up elsewhere, is found again


def lstm_layer_flops(arguments: dict[str, Any]) -> int:
    """Returns the FLOP of one LSTM layer in one direction, as oneDNN runs it: two matmuls to four gates."""
    steps, rows, inputs = arguments["input"].shape
    hidden = arguments["hidden_size"]
    return 2 * steps * rows * (inputs + hidden) * 4 * hidden


def with_lstm_workspace(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the results of one LSTM layer, of which the last is the workspace that backward needs.

    Fake tensors have an empty one. oneDNN's holds, per token, six states as wide as the input or the output,
    five as wide as the output, and the four gates (measured with torch 2.13, in fp32; the first step's states
    and padding, below 3 % at 64 steps and more, are left out).
    """
    steps, rows, inputs = arguments["input"].shape
    hidden = arguments["hidden_size"]
    numel = steps * rows * (6 * max(inputs, hidden) + 9 * hidden) if arguments["train"] else 0
    return (*result[:3], result[3].new_empty(4 * numel, dtype=torch.uint8))


def lstm_backward_scratch_bytes(arguments: dict[str, Any]) -> int:
    """Returns the bytes that oneDNN's backward of one LSTM layer allocates and frees (measured, as above).

    The gradients of the gates of all steps, and two copies of the weights in other layouts.
    """
    steps, rows, inputs = arguments["input"].shape
    hidden = arguments["hidden_size"]
    return 4 * (steps * rows * 4 * hidden + 2 * 4 * hidden * (inputs + hidden))


def _with_folded_time(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_folded(x: Tensor, hidden: Any, *rest: Any) -> Any:  # signature: torch's recurrent functions
        if isinstance(hidden, Tensor) and not hidden.is_floating_point():
            return run(x, hidden, *rest)  # a packed sequence, and the rows of each step
        time = 1 if rest[-1] else 0
        rows, parts = x.shape[1 - time], _count_parts(x.shape[time])
        folded = _fold(x, time=time, parts=parts)
        wide = [state.repeat(1, parts, 1) for state in ([hidden] if isinstance(hidden, Tensor) else hidden)]
        result = run(folded, wide[0] if isinstance(hidden, Tensor) else wide, *rest)
        output, states = result[0], result[1:]
        shape = (*x.shape[:2], output.shape[2])
        return (output.reshape(shape), *(state[:, :rows] for state in states))

    return run_folded


def _fold(x: Tensor, *, time: int, parts: int) -> Tensor:
    """Returns (rows, time, features), or (time, rows, features), with `parts` times the rows."""
    rows, steps = x.shape[1 - time], x.shape[time] // parts
    return x.reshape((rows * parts, steps, -1) if time == 1 else (steps, rows * parts, -1))


def _count_parts(length: int) -> int:
    """Returns the most parts of equal length, of `_STEPS` or more."""
    return next((parts for parts in range(max(length // _STEPS, 1), 0, -1) if length % parts == 0), 1)
