"""Compiles blocks with torch.compile, counts what the compiler does, and runs eagerly what it cannot
compile.

[Note: graphs of blocks]
A block without units inside is compiled as one graph (`fullgraph`), for the shapes that it gets (not
`dynamic`). Equal blocks run the same code object with the same guards, so that torch compiles one graph
for all of them. A block that holds units is compiled in pieces, since gathering breaks the graph.

[Note: eager fall-back]
Compilation may fail on one rank only. No rank waits for another because of it: FSDP2's collectives are
outside of a graph, so that a rank whose block runs eagerly issues the same ones. A whole block whose
forward fails to compile has not computed anything yet, and is run again from its beginning. Of a block in
pieces, only the piece that fails runs eagerly, where it stands (`suppress_errors`). torch would compile
backward when it is first needed, where a failure ends the run. `force_non_lazy_backward_lowering` compiles it
together with forward.
"""

import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fullshard.parallel.recompute import BufferSnapshot, is_recomputed
from fullshard.spec.records.measurement import Compilation
from fullshard.torch_private.compiler import dynamo, functorch_config

_ATTRIBUTE = "_fullshard_compiled"  # attribute of the model
_COMPILER_ERRORS: tuple[type[Exception], ...] = (
    dynamo.exc.TorchDynamoException,
    dynamo.exc.FailOnRecompileLimitHit,
)
_config: Any = dynamo.config
_LONGEST_REASON = 200  # characters
_most_graphs: ContextVar[int] = ContextVar("graphs that the compiler may make of a code object", default=0)


class EagerBlockWarning(UserWarning):
    """Warning that a block, or a piece of it, could not be compiled and runs eagerly."""


def compile_blocks(blocks: Sequence[nn.Module], *, pieces: Collection[nn.Module]) -> list["CompiledForward"]:
    """Replaces the `forward` of each block by a compiled one, and returns these.

    See [Note: graphs of blocks]. The `forward` is replaced, not the block, so that names in the state dict
    do not change.

    pieces: the blocks with units inside
    """
    # Blocks that differ share a code object, and the compiler's limit is for each code object.
    most, failures = len(blocks) + 8, dict[type[nn.Module], bool]()
    _set_up_compiler(most)
    compiled = [
        CompiledForward(block, whole=block not in pieces, most_graphs=most, failures=failures)
        for block in blocks
    ]
    for block, forward in zip(blocks, compiled, strict=True):
        block.forward = forward
    return compiled


class CompiledForward:
    """The compiled `forward` of a block. It runs eagerly once compiling it has failed, and without gradients.

    Validation and generation compute no gradients, and come in many lengths: a graph for each would take
    longer to compile than it saves.

    whole: the block is one graph; otherwise it is compiled in pieces
    most_graphs: number of graphs that the code of the block may have
    failures: class of blocks -> whether a whole block failed to compile, or a piece; for classes that were
        warned of; shared by all blocks
    """

    def __init__(
        self, block: nn.Module, *, whole: bool, most_graphs: int, failures: dict[type[nn.Module], bool]
    ) -> None:
        self.kind, self.whole, self._block = type(block), whole, block
        self._recomputed = is_recomputed(block)
        self.eager: Callable[..., Any] = block.forward
        self.is_eager = False
        self._failures, self._has_run, self._most_graphs = failures, False, most_graphs
        shapes = False if whole else None  # of pieces, such as experts, they may differ with the tokens
        self._compiled: Callable[..., Any] = torch.compile(block.forward, fullgraph=whole, dynamic=shapes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # signature: the block's own
        if not self._has_run and self._failures.get(self.kind):
            self.is_eager = True
        if self.is_eager or not torch.is_grad_enabled():
            return self.eager(*args, **kwargs)
        _set_up_compiler(self._most_graphs)
        run = self._run_as_one_graph if self.whole else self._run_in_several_graphs
        result = run(args, kwargs)
        self._has_run = True
        return result

    def _run_as_one_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph; eagerly from now on, if that fails, or it is recomputed and changes buffers."""
        is_first = self._recomputed and not self._has_run
        buffers = BufferSnapshot(self._block) if is_first else None
        try:
            result = self._compiled(*args, **kwargs)
            changed = (
                [] if buffers is None else [*buffers.find_old_values_of_changed_buffers(statistics=False)]
            )
            if buffers is None or not changed:
                return result
            buffers.restore()
            self._note_failure_and_warn_once(
                f"it is recomputed, and its forward changes the buffer {changed[0][1]!r}"
            )
        except _COMPILER_ERRORS as error:
            failure = error.__cause__ if isinstance(error, dynamo.exc.FailOnRecompileLimitHit) else error
            self._note_failure_and_warn_once(
                _shorten_to_first_line(f"{type(failure or error).__name__}: {failure or error}")
            )
        self.is_eager = True
        return self.eager(*args, **kwargs)

    def _run_in_several_graphs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _config.patch(suppress_errors=True):
            if self._has_run:
                return self._compiled(*args, **kwargs)
            before = dynamo.utils.get_compilation_metrics()  # kept, so that no id is used again
            result = self._compiled(*args, **kwargs)
        known = set(map(id, before))
        for one in dynamo.utils.get_compilation_metrics():
            if one.fail_type is not None and id(one) not in known:
                reason = _shorten_to_first_line(one.fail_reason or one.fail_type)
                self._note_failure_and_warn_once(f"a piece of it ({one.co_name}): {reason}")
                break
        return result

    def _note_failure_and_warn_once(self, reason: str) -> None:
        if self.kind not in self._failures:
            warnings.warn(f"{self.kind.__name__} runs eagerly: {reason}", EagerBlockWarning, stacklevel=2)
        self._failures[self.kind] = self.whole


def _set_up_compiler(most_graphs: int) -> None:
    """Allows as many graphs of a code object, and compiles backward with forward, in the calling thread.

    Since torch 2.13, settings of the compiler are those of a thread, and a GPU's backward, which runs the
    forwards of recomputed blocks, has a thread of its own.
    """
    if _most_graphs.get() >= most_graphs:
        return
    _most_graphs.set(most_graphs)
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(_config, name, max(getattr(_config, name), most_graphs))
    functorch_config.force_non_lazy_backward_lowering = True


def _shorten_to_first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_LONGEST_REASON] if lines else "no reason given"


# Counts #
@dataclass
class CompilerTally:
    """Counts of what the compiler did in this process since `count_compilation` began.

    compilations: number of times that it compiled, usually forward and backward together
    recompilations: of these, graphs for code that had one for other shapes or settings
    seconds: seconds in the compiler
    """

    compilations: int = 0
    recompilations: int = 0
    seconds: float = 0.0
    _first: dict[str, int] = field(default_factory=lambda: _count_graphs_and_breaks())

    def compilation_of_blocks(self, forwards: Sequence[CompiledForward]) -> Compilation:
        """Returns the counts so far, with the number of blocks that run compiled and eagerly."""
        now, eager = _count_graphs_and_breaks(), sum(one.is_eager for one in forwards)
        return Compilation(
            blocks=len(forwards) - eager,
            eager_blocks=eager,
            graphs=now["graphs"] - self._first["graphs"],
            graph_breaks=now["breaks"] - self._first["breaks"],
            recompilations=self.recompilations,
            seconds=self.seconds,
        )


@contextmanager
def count_compilation() -> Generator[CompilerTally]:
    """Yields a tally of what the compiler does in this process, which is kept up to date while active."""
    tally, began = CompilerTally(), list[float]()
    handler: Any = dynamo.callback.callback_handler

    def start(*arguments: Any) -> None:
        began.append(perf_counter())
        tally.compilations += 1
        # An id `frame/number`: the number of earlier graphs for the same code.
        identity = str(getattr(arguments[0], "compile_id", "")) if arguments else ""
        lazy = "BACKWARD" in str(getattr(arguments[0], "callback_trigger", "")) if arguments else False
        tally.recompilations += not lazy and identity.rpartition("/")[2] not in ("", "0")

    def end(*_arguments: Any) -> None:
        if began:
            tally.seconds += perf_counter() - began.pop()

    handler.register_start_callback(start)
    handler.register_end_callback(end)
    try:
        yield tally
    finally:
        handler.remove_start_callback(start)
        handler.remove_end_callback(end)


def _count_graphs_and_breaks() -> dict[str, int]:
    counters: Any = dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def store_compiled_forwards(model: nn.Module, forwards: list[CompiledForward]) -> None:
    """Stores the compiled forwards as an attribute of their model, for `find_compiled_forwards`."""
    if forwards:
        setattr(model, _ATTRIBUTE, forwards)


def find_compiled_forwards(model: nn.Module) -> list[CompiledForward]:
    """Returns the compiled forwards of a model's blocks; none if it was not compiled."""
    return getattr(model, _ATTRIBUTE, [])
