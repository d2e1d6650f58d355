"""Writes a foreign checkpoint as a committed checkpoint of a run, one tensor at a time.

The snapshot holds tensors that are read when their bytes are written. So memory holds one parameter, and
beside it what reading and converting it take: at most a second one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.save import CheckpointSaver, Snapshot
from fullshard.convert.conversion import nested_tables
from fullshard.distributed.host import as_memoryview
from fullshard.errors import CheckpointError, SpecError
from fullshard.models.build import build_model
from fullshard.offload.store import make_lazy_tensor
from fullshard.parallel.materialize import replace_parameters_by_meta
from fullshard.parallel.units import find_units
from fullshard.quantities import join_names
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.system.files import xxh3_digest, xxh3_digest_of_file
from fullshard.system.small_files import toml_text
from fullshard.takeover.names import MatchedCheckpoint
from fullshard.takeover.optimizer_state import MOMENTUM_SETTINGS
from fullshard.takeover.source import ForeignCheckpoint, LazyTensor
from fullshard.training.groups import make_parameter_groups
from fullshard.training.learning_rates import set_learning_rates
from fullshard.training.muon import NS_COEFFICIENTS
from fullshard.training.resume import settings_that_affect_results
from fullshard.training.state import StepCounts, TrainedWith, TrainState
from fullshard.training.whole_matrices import KIND

_ADAM, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
_RATES = ("lr", "initial_lr", "max_lr")  # the last of these that a group has is its rate before the schedule
_OPTIMIZERS = {"adamw": "AdamW", "muon": "MuonAdamW", "sgd": "SGD"}
"""`optimizer.name` of a run whose state can be taken over, and its class, by which checkpoints name it."""


@dataclass(frozen=True)
class ImportTarget:
    """A run without values: its model on the meta device, in the dtypes that it is trained in.

    groups: {name of a trained parameter: its group of the optimizer}
    """

    run: Run
    plan: Plan
    state: TrainState
    groups: Mapping[str, dict[str, Any]]

    @property
    def model(self) -> nn.Module:
        return self.state.model

    @classmethod
    def of_run(cls, run: Run) -> "ImportTarget":
        """Builds the target. Raises SpecError for optimizers and adapters that cannot be taken over."""
        section = run.optimizer
        if section.name.lower() not in _OPTIMIZERS or run.adapter.rank:
            what = "the state of this run cannot be taken over."
            got = f"optimizer.name = {section.name!r}, adapter.rank = {run.adapter.rank}"
            raise SpecError(what, got=got, fix=f"{join_names(list(_OPTIMIZERS))}, without adapters")
        # How a run is sharded changes nothing in its checkpoints.
        plain = {name: type(getattr(run, name))() for name in ("sharding", "offload")}
        plan = Plan.from_run(run.model_copy(update=plain), world_size=1, device="cpu")
        model = build_model(run)
        replace_parameters_by_meta(model, find_units(model, plan.run.sharding.units), plan=plan)
        # Of a class that needs no shards: only its groups are used.
        optimizer = torch.optim.SGD(make_parameter_groups(model, section), lr=section.learning_rate)
        groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
        named = {name: groups[id(one)] for name, one in model.named_parameters() if id(one) in groups}
        return cls(run, plan, TrainState(model, optimizer), named)

    def state_keys(self, name: str) -> tuple[str, ...]:
        """Returns the keys of the optimizer's state of the trained parameter `name`."""
        section = self.run.optimizer
        if section.name.lower() == "sgd":
            return _MOMENTUM if section.options.get("momentum") else ()
        if self.groups[name].get(KIND) == "muon":
            return (*_MOMENTUM, "row_var") if section.muon.row_decay else _MOMENTUM
        return (*_ADAM, "max_exp_avg_sq") if section.options.get("amsgrad") else _ADAM

    def compare_settings(self, matched: MatchedCheckpoint, *, step: int) -> "Iterator[SettingBeside]":
        """Yields the settings of each group of the source, and those of the run after `step` steps."""
        set_learning_rates(self.state.optimizer, self.run, step=step)
        section, muon = self.run.optimizer, self.run.optimizer.muon
        for group in matched.groups:
            known = [name for name in group.names if name in self.groups]
            for first in {id(self.groups[name]): name for name in reversed(known)}.values():
                one = self.groups[first]
                others = sum(self.groups[name] is one for name in known) - 1
                label = f"{first} and {others} more" if others else first
                here = {"lr": (float(one["lr"]),), "weight_decay": (one["weight_decay"],)}
                if self.state_keys(first)[:2] == _ADAM:
                    here |= {"betas": one.get("betas", section.betas), "eps": (section.eps,)}
                else:
                    own = section.options if section.name.lower() == "sgd" else muon.model_dump()
                    here |= {key: (float(own.get(key, 0)),) for key in MOMENTUM_SETTINGS}
                if one.get(KIND) == "muon":
                    scale = "match_rms_adamw" if muon.scale == "rms" else muon.scale
                    here |= {"ns_steps": (muon.steps,), "ns_coefficients": NS_COEFFICIENTS}
                    here |= {"adjust_lr_fn": (scale,)}
                for key, numbers in here.items():
                    yield SettingBeside(key, label, group.settings.get(key, ()), numbers)


@dataclass(frozen=True)
class SettingBeside:
    """A setting of the parameters `group`: numbers or names in the source and the run."""

    key: str
    group: str
    saved: tuple[Any, ...]
    here: tuple[Any, ...]

    @property
    def differs(self) -> bool:
        """True if a number differs by more than 1e-6, relative, or a name differs."""
        pairs = zip(self.saved, self.here, strict=False)
        return any(a != b if isinstance(a, str) else not math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)

    def __str__(self) -> str:
        saved, here = (
            ", ".join(one if isinstance(one, str) else f"{one:.8g}" for one in some)
            for some in (self.saved, self.here)
        )
        known = f"{saved} in the source" if saved else "not in the source"
        return f"{known}, {here} in the run" + ("  DIFFERS" if self.differs else "")


def make_snapshot(source: ForeignCheckpoint, matched: MatchedCheckpoint, *, target: ImportTarget) -> Snapshot:
    """Returns the state to save. Raises CheckpointError for missing tensors, and for other optimizers."""
    # With groups, a parameter without state was frozen there, or never updated, as an expert may be.
    has_groups = matched.moments and any(group.names for group in matched.groups)
    trained = target.groups if source.step and not has_groups else ()
    stateless = [name for name in trained if target.state_keys(name) and name not in matched.moments]
    as_there = "--names with the names of the same tensors there and here"
    from_weights = "a checkpoint with its optimizer; for weights alone, model.hf, or a file with step 0"
    for what, names, fix in (
        ("lacks tensors of the model", matched.missing, as_there),
        ("has state of other parameters", matched.left_over_state, as_there),
        ("has no optimizer state of trained parameters", stateless, from_weights),
    ):
        if names:
            raise CheckpointError(f"the source {what}.", got=join_names(names, most=3), fix=fix)
    wanted, state = target.state.tensors(), target.state
    tensors: dict[str, Tensor] = {}
    for name, one in matched.weights.items():
        tensors[f"model.{name}"] = _read_later(name, one, dtype=wanted[f"model.{name}"].dtype)
    for name, moments in matched.moments.items():
        keys, digests = target.state_keys(name), dict[str, str]()
        if set(moments) != set(keys):
            got = f"{join_names(sorted(moments))} of {name}; in the run {join_names([*keys]) or 'nothing'}"
            known = optimizer_toml(source, matched, target=target)
            fix = f"optimizer.name, [optimizer.muon] or [[optimizer.groups]] as there. Its settings:\n{known}"
            raise CheckpointError("the source's optimizer is another than the run's.", got=got, fix=fix)
        for key, one in moments.items():
            dtype = wanted[f"model.{name}"].dtype  # as of the state that the run's optimizer makes
            compared = digests if key in _ADAM else None
            later = _read_later(f"{key} of {name}", one, dtype=dtype, digests=compared)
            tensors[f"optimizer.{name}.{key}"] = later
        if keys[:2] == _ADAM:
            count = matched.updates.get(name, source.update_steps)
            tensors[f"optimizer.{name}.step"] = torch.tensor(float(count))
    state.step, state.rows = source.step, source.step * target.run.train.global_batch
    state.counts = StepCounts(source.tokens or 0, source.skipped_steps)
    state.trained_with = TrainedWith(run=settings_that_affect_results(target.run))
    origin = {"format": source.format, "version": source.version, "files": [*map(str, source.files)]}
    values: dict[str, Any] = dict(state.values()) | {"origin": origin}
    if source.tokens is None:  # no entry: `ckpt list` shows "?", and a resumed run counts from 0
        del values["tokens"]
    # The groups of `state` are of no optimizer that is trained with.
    name = _OPTIMIZERS[target.run.optimizer.name.lower()]
    is_stochastic = name == "AdamW" and target.plan.precision.stochastic_rounding
    values |= {"optimizer": "StochasticAdamW" if is_stochastic else name, "parameter_groups": None}
    return Snapshot(source.step, values, tensors, state.select_names_that_must_be_finite(tensors))


def _read_later(
    name: str, one: LazyTensor, *, dtype: torch.dtype, digests: dict[str, str] | None = None
) -> Tensor:
    """Returns a tensor that is read when it is saved. `digests`: of the moments of one parameter so far.

    Raises CheckpointError for integers and numbers of 8 bits that would become floating-point values.
    """
    if dtype.is_floating_point and (not one.dtype.is_floating_point or one.dtype.itemsize == 1):
        got, why = f"{one.dtype}, to be trained in {dtype}", "its numbers are codes, which scales make values"
        fix = "a checkpoint whose weights and moments are in bf16, fp16 or fp32"
        raise CheckpointError(f"{name} is quantised in the source.", got=got, why=why, fix=fix)

    def read() -> Tensor:
        found = one.read()
        if digests is not None and found.any():
            digests[name] = xxh3_digest(as_memoryview(found.contiguous().view(-1).view(torch.uint8)))
            if len(set(digests.values())) < len(digests):
                why = "FSDP1 with use_orig_params writes this into full state dicts (torch 2.13)"
                fix = "a sharded checkpoint of the same run (SHARDED_STATE_DICT)"
                raise CheckpointError(f"{' and '.join(digests)} are equal in the source.", why=why, fix=fix)
        return found.to(dtype)

    return make_lazy_tensor(torch.Size(one.shape), dtype, read=read)


def read_all(snapshot: Snapshot) -> None:
    """Reads every tensor once, and checks its numbers as a save does. Raises CheckpointError."""
    for name, tensor in snapshot.tensors.items():
        if (found := snapshot.find_unusable_number(name, tensor.cpu())) is not None:
            raise CheckpointError(f"{name} cannot be trained on.", got=f"{found:g} in it")


def write_checkpoint(snapshot: Snapshot, directory: str, *, plan: Plan) -> Path | str:
    """Writes and commits the snapshot in `directory`, with digests of the source's files.

    Returns its path. Raises CheckpointError.
    """
    origin: Any = snapshot.values["origin"]
    files = {path: xxh3_digest_of_file(Path(path)) for path in origin["files"]}
    values = {**snapshot.values, "origin": {**origin, "files": files}}
    return CheckpointSaver(location_of(directory), plan=plan).save_snapshot(replace(snapshot, values=values))


def offered_settings(source: ForeignCheckpoint) -> dict[str, Any]:
    """Returns {dotted key of run.toml: value} that the source holds, for a run that continues it."""
    keys = {key for state in source.optimizer.moments.values() for key in state}
    groups = [one.settings for one in source.optimizer.groups]
    of_sgd = [one for one in groups if one.get("dampening")]
    kind = "sgd" if of_sgd else "muon" if keys & {*_MOMENTUM} else "adamw"
    settings: dict[str, Any] = {}
    if of_sgd and any(of_sgd[0]["momentum"]):
        settings["optimizer.options"] = {key: of_sgd[0][key][0] for key in ("momentum", "nesterov")}
    if "max_exp_avg_sq" in keys:
        settings["optimizer.options"] = {"amsgrad": True}
    for key in ("weight_decay", "betas", "eps", *_RATES):
        if found := [one[key] for one in groups if one.get(key) and (key != "eps" or one.get("betas"))]:
            name = "learning_rate" if key.endswith("lr") else key
            settings[f"optimizer.{name}"] = max(found) if key == "betas" else max(found)[0]
    decays = {one.get("weight_decay") for one in groups}
    if len(decays) == 1 and any(decays):  # of all parameters, also of norms and biases
        settings["optimizer.groups"] = [{"match": ["*"], "weight_decay": settings["optimizer.weight_decay"]}]
    if not any(one.get("initial_lr") for one in groups):  # no scheduler was made
        settings |= {"schedule.kind": "constant", "schedule.warmup_steps": 0}
    return {"optimizer.name": kind} | settings | dict(source.settings)


def optimizer_toml(source: ForeignCheckpoint, matched: MatchedCheckpoint, *, target: ImportTarget) -> str:
    """Returns TOML of an [optimizer] with the source's settings for each of its groups."""
    offered = {key: one for key, one in offered_settings(source).items() if key.startswith("optimizer.")}
    made: list[dict[str, Any]] = []
    for group in matched.groups:
        known = {key: one for key, one in group.settings.items() if one}
        own = {"weight_decay": known.get("weight_decay", (None,))[0], "betas": known.get("betas")}
        for key in _RATES:
            if key in known and offered["optimizer.learning_rate"]:
                own["lr_factor"] = known[key][0] / offered["optimizer.learning_rate"]
        if names := [name for name in group.names if name in target.groups]:
            made.append({"match": names} | {key: one for key, one in own.items() if one is not None})
    made.sort(key=lambda one: len(one["match"]))
    offered["optimizer.groups"] = [*made[:-1], *({**one, "match": ["*"]} for one in made[-1:])]
    return toml_text(nested_tables(offered))
