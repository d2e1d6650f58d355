"""TrainState: everything that a step changes and a checkpoint holds."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.manifest import (
    AVERAGE_PREFIX,
    SKIPPED_IN_A_ROW,
    SavedTensor,
    check_same_tensors,
    steps_skipped_in_a_row,
)
from fullshard.checkpoint.results import RESULTS, EvaluationResult, encode_results, read_results
from fullshard.distributed.tensors import zeros_sharded_like
from fullshard.errors import CheckpointError, TrainError
from fullshard.models.packed_weights import check_same_packing, packing_record
from fullshard.offload.adamw import StreamingAdamW
from fullshard.parallel.model_parameters import persistent_buffers
from fullshard.parallel.unit_events import reshard_unsharded_units
from fullshard.survival.phase import PhaseTracker
from fullshard.survival.spikes import RecentSteps
from fullshard.training import extra_state, learning_rates
from fullshard.training.ema import ParameterAverage, averages_to_load
from fullshard.training.figures import PendingResult
from fullshard.training.low_bit_adamw import dequantize, quantize_state_for_optimizer
from fullshard.training.offload_checkpoint import NonOffloadedState, OffloadedTensors
from fullshard.training.soap import SoapAdamW
from fullshard.weights.names import full_transformers_config


@dataclass
class LossScale:
    """Loss scale: halved (1 at least) after an overflow, doubled after `window` good steps. arXiv:1710.03740.

    Every rank passes the same `finite`, so the scales of all ranks stay equal. `window` 0 disables scaling.
    """

    scale: float = 1.0
    window: int = 0
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        if self.window == 0:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps >= self.window:
            self.scale, self.good_steps = self.scale * 2, 0


# Names of the counts in checkpoints, and the attributes of TrainState that they are.
_COUNTS = {**{name: name for name in ("step", "skipped", "rollbacks")}, "tokens": "trained_tokens"}


class TrainState:
    """A model, its optimizer, its data, and its progress.

    step: number of steps, of which the device may still be running the last one
    data: a source of microbatches by step (`data.batches.MicrobatchSource`), or an iterable of microbatches
    iterator: position of a plain iterable, from which the next `train` continues after a `break`
    rows: number of rows of the data that the steps took or passed over; the next step takes those behind.
        None, in a state that was not trained yet, stands for `step` global batches.
    trained_with: what the state was trained with so far
    counts: tokens and skipped steps; a checkpoint saved after steps that were skipped in a row is loaded only
        if there is no other
    results: the last finite result of each evaluation, by name
    best: the best result that `checkpoint.keep_best` names, by its name, or nothing
    recent: losses and norms of recent steps, from which spikes are detected
    not_acted_on: result of the last step, if `train` has not read yet whether to stop because of it
    phase: this rank's position in the step, for the watchdog
    offloaded: the offloaded tensors, or None
    average: the average of the trained parameters, which needs [ema], if the argument `ema` is True
    saved: whether checkpoints hold the whole model ("all"), or, of its parameters, only the trainable ones
        ("trained"); the frozen parameters then need their values before `load`

    A checkpoint holds everything except the data: a source by step resumes exactly, a plain iterable
    restarts. Raises TrainError for an optimizer of other parameters, or whose step needs a closure.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        data: Any = None,
        saved: Literal["all", "trained"] = "all",
        ema: bool = False,
    ) -> None:
        self.model, self.optimizer, self.data, self.saved = model, optimizer, data, saved
        self.iterator: Iterator[Any] | None = None
        self.step = self.rollbacks = 0
        self.rows: int | None = None
        self.trained_with = TrainedWith()
        self.counts = StepCounts()
        self.results, self.best = dict[str, EvaluationResult](), dict[str, EvaluationResult]()
        self.recent = RecentSteps()
        self.not_acted_on: PendingResult | None = None
        self.phase = PhaseTracker()
        self.loss_scale = LossScale()
        is_outside = isinstance(optimizer, StreamingAdamW)
        self.offloaded = OffloadedTensors(optimizer, frozen=saved == "all") if is_outside else None
        self._initial_entries = learning_rates.scalar_entries(optimizer)
        self._before_update: list[Callable[[], None]] = []
        optimizer.register_step_pre_hook(lambda *_: self.run_before_update_callbacks())
        reshard_unsharded_units(model)
        self.average = ParameterAverage(model) if ema else None
        _check_optimizer_has_model_params(model, optimizer)
        _check_step_takes_no_closure(optimizer)
        extra_state.warn_of_unsaved_optimizer_state(optimizer)
        extra_state.warn_of_unsaved_custom_state(model)

    @property
    def trained_tokens(self) -> int:
        """Tokens trained on, over all ranks: all of a step if its loss is a mean. Waits for the last step."""
        return self.counts.wait_and_count_unread().trained_tokens

    @property
    def skipped(self) -> int:
        """Number of steps skipped: loss or norm not finite, or a spike. Waits for the last step."""
        return self.counts.wait_and_count_unread().skipped

    # The methods of fullshard.checkpoint.manifest.Checkpointable.

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to save: of the model, its extra state, the optimizer, and this rank's RNGs."""
        self.wait_for_updates()
        tensors = _model_tensors(self.model, frozen=self.saved == "all")
        tensors |= _optimizer_tensors(self.model, self.optimizer) | extra_state.rank_states(self.model)
        tensors |= extra_state.encode_extra_state(self.model)[1]
        tensors |= self.average.tensors() if self.average else {}
        return tensors | (self.offloaded.tensors() if self.offloaded else {})

    def values(self) -> dict[str, JsonValue]:
        """Returns the JSON values to save: counts, recent losses and norms, and facts about the model.

        Waits for the last step. Raises TrainError if the ranks were not in the same step.
        """
        reshard_unsharded_units(self.model)
        return {
            **{name: getattr(self, field) for name, field in _COUNTS.items()},
            "rows": self.rows,
            "run": self.trained_with.run,
            "row_order": self.trained_with.row_order,
            "validation_digest": self.trained_with.validation_digest,
            SKIPPED_IN_A_ROW: self.counts.wait_and_count_unread().skipped_in_a_row,
            RESULTS: encode_results(self.results),
            "best": encode_results(self.best),
            "recent_losses": list(self.recent.losses),
            "recent_norms": list(self.recent.norms),
            "loss_scale": self.loss_scale.scale,
            "loss_scale_window": self.loss_scale.window,
            "loss_scale_good_steps": self.loss_scale.good_steps,
            "optimizer": _optimizer_name_in_checkpoint(self.optimizer),
            "learning_rates": learning_rates.rates_set_by_others(self.model, self.optimizer),
            "optimizer_groups": learning_rates.changed_group_entries(
                self.model, self.optimizer, initial=self._initial_entries
            ),
            "parameter_groups": learning_rates.describe_groups(self.model, self.optimizer),
            "extra_state": extra_state.encode_extra_state(self.model)[0],
            "tied": dict(_tied_parameter_names(self.model)),
            "huggingface": full_transformers_config(self.model),
            "packed_weights": packing_record(self.model),
        }

    def select_names_that_must_be_finite(self, names: Iterable[str]) -> set[str]:
        """Returns the `names` that must be finite: trained parameters, optimizer state. Masks need not."""
        trained = {f"model.{name}" for name, one in self.model.named_parameters() if one.requires_grad}
        return {name for name in names if name in trained or name.startswith(("optimizer.", AVERAGE_PREFIX))}

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Returns the tensors to fill from a checkpoint that holds `saved`, except `iterate_load_targets`.

        Tensors of the model are its own; those of the optimizer state are new. Raises CheckpointError if the
        model's names, shapes or dtypes differ from `saved`.
        """
        self.run_before_update_callbacks()
        tensors: dict[str, Tensor] = _model_tensors(self.model, frozen=self.saved == "all")
        check_same_tensors(tensors, {name: info for name, info in saved.items() if name.startswith("model.")})
        parameters = dict(self.model.named_parameters())
        elsewhere = self.offloaded.tensor_names if self.offloaded else set[str]()  # in `iterate_load_targets`
        for name, info in saved.items():
            if name.startswith("optimizer.") and name not in elsewhere:
                owner, _, key = name.removeprefix("optimizer.").rpartition(".")
                if owner not in parameters:
                    raise CheckpointError(
                        f"the checkpoint has optimizer state for {owner}, which the model does not have.",
                        fix="the model that wrote the checkpoint, or a new run directory",
                    )
                own = _empty_optimizer_tensor(self.optimizer, parameters[owner], key=key, info=info)
                tensors[name] = own
        tensors = {name: tensor for name, tensor in tensors.items() if name not in elsewhere}
        tensors |= extra_state.empty_rank_states_to_fill(self.model, saved)
        tensors |= averages_to_load(self.average, saved)
        of_modules = {name: info for name, info in saved.items() if name.startswith(extra_state.PREFIX)}
        return tensors | {k: torch.empty(v.shape, dtype=v.torch_dtype) for k, v in of_modules.items()}

    def load_values(self, values: Mapping[str, JsonValue], received: Mapping[str, Tensor]) -> None:
        """Sets optimizer state, RNG states and counts from saved `values` and the filled `load_targets`.

        Raises CheckpointError if an optimizer of another class was saved, or another format of the base.
        """
        check_same_packing(self.model, values.get("packed_weights"))
        own = _optimizer_name_in_checkpoint(self.optimizer)
        if values["optimizer"] != own:
            raise CheckpointError(
                "the checkpoint was written with another optimizer.",
                got=f"{values['optimizer']} in the checkpoint, {own} here",
                fix="optimizer.name as it was, or a new run directory",
            )
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in received.items():
            if name.startswith("optimizer."):
                owner, _, key = name.removeprefix("optimizer.").rpartition(".")
                states.setdefault(owner, {})[key] = tensor
        for name, parameter in self.model.named_parameters():
            self.optimizer.state.pop(parameter, None)
            if name in states:
                state = quantize_state_for_optimizer(self.optimizer, parameter, state=states[name])
                self.optimizer.state[parameter] = state
        rates = cast(dict[str, JsonValue], values.get("learning_rates", {}))
        learning_rates.restore_rates_set_by_others(self.model, self.optimizer, saved=rates)
        entries = cast(dict[str, JsonValue], values.get("optimizer_groups", {}))
        learning_rates.restore_group_entries(
            self.model, self.optimizer, saved=entries, initial=self._initial_entries
        )
        extra_state.set_rank_states(self.model, received)
        extra_state.set_extra_state(self.model, values.get("extra_state"), received=received)
        read = {name: _parse_integer(values.get(name, 0)) for name in _COUNTS}  # older checkpoints lack some
        self.step, self.rollbacks = read["step"], read["rollbacks"]
        self.trained_with = TrainedWith.from_values(values)
        self.rows = rows_taken_by_saved_state(values)
        self.counts = StepCounts(read["tokens"], read["skipped"], steps_skipped_in_a_row(values))
        self.not_acted_on = None
        if self.average:
            self.average.finish_load(received, step=self.step)
        self.results, self.best = (read_results(values.get(name)) for name in (RESULTS, "best"))
        recent = (cast(list[Any], values.get(key) or []) for key in ("recent_losses", "recent_norms"))
        self.recent = RecentSteps(*([float(str(value)) for value in one] for one in recent))
        self.loss_scale = LossScale(
            scale=float(str(values["loss_scale"])),
            window=_parse_integer(values["loss_scale_window"]),
            good_steps=_parse_integer(values["loss_scale_good_steps"]),
        )

    def iterate_load_targets(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Yields the offloaded tensors to fill, by name, which `load_targets` does not contain."""
        return self.offloaded.iterate_load_targets(saved) if self.offloaded else iter(())

    def count_step_and_commit(self, result: PendingResult) -> None:
        """Counts a step, and commits the state that is offloaded to a drive as a generation.

        Waits for the step before it, whose tokens are counted now. Raises TrainError if the ranks were not
        in the same step then.
        """
        self.counts.wait_and_count_unread().unread = result
        self.step += 1
        if self.offloaded:
            self.offloaded.commit_generation(self.step, self._non_offloaded_state)

    def restore_newest_generation(self, *, at_least: int) -> bool:
        """Restores the newest step >= `at_least` whose generation is complete on every rank. Collective.

        Returns whether there was one. Frozen parameters stay as they are.
        """
        self.run_before_update_callbacks()
        offloaded = self.offloaded
        while offloaded and (step := offloaded.newest_restorable_step(at_least=at_least)) is not None:
            beside = offloaded.restore_generation(step)
            if beside is not None:
                own = self._non_offloaded_state().tensors
                for name in own.keys() & beside.tensors.keys():
                    if name.startswith("model."):
                        own[name].copy_(beside.tensors[name])
                self.load_values(beside.values, beside.tensors)
                return True
        return False

    def wait_for_updates(self) -> None:
        """Waits until no offloaded update is running. Raises OffloadError if an update failed."""
        if self.offloaded:
            self.offloaded.wait_for_updates()

    def register_before_next_update(self, act: Callable[[], None]) -> None:
        """Registers `act` to be called once, before the next optimizer step or load."""
        self._before_update.append(act)

    def run_before_update_callbacks(self) -> None:
        """Calls the functions of `register_before_next_update`, before an optimizer step or a load."""
        acts, self._before_update = self._before_update, []
        for act in acts:
            act()

    def _non_offloaded_state(self) -> NonOffloadedState:
        """Returns all state that is not offloaded, except frozen parameters, which are loaded earlier."""
        scalars = {
            f"model.{name}": parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        }
        small = _saved_buffers(self.model) | _optimizer_tensors(self.model, self.optimizer)
        small |= extra_state.rank_states(self.model) | extra_state.encode_extra_state(self.model)[1]
        return NonOffloadedState(self.values(), scalars | small)


@dataclass(frozen=True)
class TrainedWith:
    """The settings and the data that a state was trained with.

    run: settings of the run, by section; None if unknown
    row_order, validation_digest: those of the data: see `data.batches.RowSource`
    is_loaded: whether this is from a checkpoint, with which nothing was trained since
    source: the plan and the data of this process that these are of, or None
    """

    run: dict[str, JsonValue] | None = None
    row_order: str | None = None
    validation_digest: str | None = None
    is_loaded: bool = False
    source: tuple[Any, Any] | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, JsonValue]) -> Self:
        run, order, digest = (values.get(key) for key in ("run", "row_order", "validation_digest"))
        return cls(
            run=run if isinstance(run, dict) else None,
            row_order=order if isinstance(order, str) else None,
            validation_digest=digest if isinstance(digest, str) and digest else None,
            is_loaded=True,
        )


def rows_taken_by_saved_state(values: Mapping[str, JsonValue]) -> int | None:
    """Returns how many rows the steps of a saved state took; None if its checkpoint does not record it.

    If a loop of one's own has not counted them, the steps took batches of the size in their run.
    """
    if values.get("rows") is not None:
        return _parse_integer(values["rows"])
    run = values.get("run")
    section = run.get("train") if isinstance(run, dict) else None
    batch = section.get("global_batch") if isinstance(section, dict) else None
    return _parse_integer(values["step"]) * batch if isinstance(batch, int) else None


@dataclass
class StepCounts:
    """Trained tokens and skipped steps of all steps except the last one, `unread`, until it is read."""

    trained_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    unread: PendingResult | None = None

    def wait_and_count_unread(self) -> Self:
        """Returns self, after waiting for the unread step, if any, and counting it."""
        if self.unread is not None:
            result = self.unread.read()
            trained = result.tokens if result.trained_tokens is None else result.trained_tokens
            self.trained_tokens += 0 if result.skipped else trained
            self.skipped += result.skipped
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
            self.unread = None
        return self


def _model_tensors(model: nn.Module, *, frozen: bool) -> dict[str, Tensor]:
    """Returns parameters, the frozen ones only if `frozen`, and persistent buffers by name."""
    reshard_unsharded_units(model)
    tensors: dict[str, Tensor] = {
        f"model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or frozen
    }
    return tensors | _saved_buffers(model)


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": buffer for name, buffer in persistent_buffers(model).items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                check_state_can_be_saved(optimizer, key, value=value, parameter=name)
                full = dequantize(value) if isinstance(value, Tensor) else torch.tensor(value)
                tensors[f"optimizer.{name}.{key}"] = full
    return tensors


def check_state_can_be_saved(
    optimizer: torch.optim.Optimizer, key: str, *, value: Any, parameter: str
) -> None:
    """Raises TrainError for state of `parameter` that a checkpoint cannot hold."""
    if not isinstance(value, Tensor | bool | int | float):
        raise TrainError(
            f"checkpoints cannot hold the state of {type(optimizer).__name__}.",
            got=f"state[{parameter}][{key!r}] is a {type(value).__name__}",
            why="each entry is a tensor or a number, which is sharded like its parameter",
            fix="an optimizer that keeps each tensor under a key of its own",
        )


def _empty_optimizer_tensor(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, key: str, info: SavedTensor
) -> Tensor:
    if info.shape == tuple(parameter.shape) and parameter.ndim > 0:
        return torch.empty_like(parameter.detach(), dtype=info.torch_dtype)
    if len(info.shape) == parameter.ndim > 1 and (
        isinstance(optimizer, SoapAdamW)
        or all(own in (1, size) for own, size in zip(info.shape, parameter.shape, strict=True))
    ):  # such as sums over rows
        return zeros_sharded_like(parameter.detach(), info.shape, dtype=info.torch_dtype)
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    device = parameter.device if key != "step" or fused else torch.device("cpu")
    return torch.empty(info.shape, dtype=info.torch_dtype, device=device)


def _optimizer_name_in_checkpoint(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class name that checkpoints record: only this class can load the optimizer's state."""
    if isinstance(optimizer, StreamingAdamW):
        return optimizer.optimizer_name_in_checkpoint
    return type(optimizer).__name__


def _check_optimizer_has_model_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(p) not in held for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise TrainError(
            "the optimizer holds parameters that are not the model's.",
            got=f"{strangers} of them",
            why="fullshard.shard replaced the parameters that the model had before; those of other modules, "
            "such as a loss, are neither sharded nor saved",
            fix="optimizer = fullshard.build_optimizer(model, plan), after fullshard.shard(model, plan); "
            "register other modules in the model before it is sharded",
        )


def _check_step_takes_no_closure(optimizer: torch.optim.Optimizer) -> None:
    parameters = inspect.signature(optimizer.step).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # `self` is that of the class's method, around which a scheduler or a decorator wrapped a function.
    needed = [name for name, one in parameters.items() if one.default is one.empty and name != "self"]
    if needed := [name for name in needed if parameters[name].kind not in variadic]:
        raise TrainError(
            f"the step of {type(optimizer).__name__} needs arguments.",
            got=", ".join(needed),
            why="a step computes its loss and gradients once, before the update",
            fix="an optimizer whose step needs no closure",
        )


def _tied_parameter_names(model: nn.Module) -> dict[str, str]:
    """Returns {alias: name} for parameters with several names, of which checkpoints use the first."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {alias: name for alias, name in names.items() if alias != name}


def _parse_integer(value: JsonValue) -> int:
    if not isinstance(value, int):
        raise CheckpointError("the checkpoint's manifest is not one of fullshard's.", got=repr(value))
    return value
