"""A checkpoint that another trainer loads with its own functions trains on there as it would have here."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError, SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.schedule import learning_rate_factor
from fullshard.weights.export_state import StateFormat, export_state
from fullshard.weights.tensor_source import Weights
from tests.checkpoint.states import State
from tests.training.runs import BATCH, Regression, advance, mean_square, pairs, run_of, sharded, whole

SAVED, STEPS = 3, 6
GROUPS = 'optimizer.groups=[{match=["head*"], lr_factor=0.5, betas=[0.8, 0.9], weight_decay=0.3}]'
OPTIMIZERS = {
    "adamw": (GROUPS, "optimizer.clip_norm=0.5"),
    "offloaded": (GROUPS, "optimizer.clip_norm=0.5", "offload.tier=optimizer:cpu"),
    "sgd": ("optimizer.name=sgd", "optimizer.options={momentum=0.9}", "optimizer.clip_norm=0.5"),
}
MUON = ("optimizer.name=muon", 'optimizer.muon={momentum=0.8, steps=4, scale="original", dtype="bf16"}')
MUON += (
    "optimizer.weight_decay=2.0",
    "schedule.kind=constant",
    "schedule.warmup_steps=0",
    "optimizer.clip_norm=0.5",
)


def run_for(optimizer: str) -> Run:
    return run_of(f"train.steps={STEPS}", *(OPTIMIZERS | {"muon": MUON})[optimizer])


def losses_around_save(directory: Path, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Saves after step SAVED. Returns the losses of the steps after it, and the last weights."""
    state, plan = sharded(run_for(optimizer))
    advance(state, plan, to=SAVED)
    save(state, directory, plan=plan)
    return advance(state, plan, to=STEPS), whole(state.model)


def make_peer(
    optimizer: str, model: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer and scheduler as a peer's program makes them. All numbers are other than those saved."""
    named = dict(model.named_parameters())
    wanted = [
        lambda name: named[name].ndim == 2 and not name.startswith("head"),
        lambda name: named[name].ndim == 1 and not name.startswith("head"),
        lambda name: name.startswith("head"),
    ]
    if optimizer == "sgd":
        wanted = [lambda name: named[name].ndim == 2, lambda name: named[name].ndim == 1]
    groups = [{"params": [one for name, one in named.items() if chosen(name)]} for chosen in wanted]
    made = (
        torch.optim.SGD(groups, lr=7.0, momentum=0.1)
        if optimizer == "sgd"
        else torch.optim.AdamW(groups, lr=7.0)
    )
    run = run_for(optimizer)
    return made, torch.optim.lr_scheduler.LambdaLR(
        made, lambda step: learning_rate_factor(run.schedule, step=step, steps=STEPS)
    )


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    """The steps after SAVED in a plain loop of torch, on all ranks of this world."""
    count, number = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses: list[float] = []
    for step in range(SAVED, STEPS):
        x, y = (one.chunk(count)[number] for one in pairs(step, BATCH))
        loss = mean_square(model, (x, y))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach() / count
        if count > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def random_model() -> Regression:
    torch.manual_seed(99)
    return Regression()


def fsdp_model() -> nn.Module:
    model = random_model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def assert_as_here(found: tuple[list[float], dict[str, Tensor]], expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=list(OPTIMIZERS))
def trained(ranks: Any, request: Any, tmp_path_factory: Any) -> tuple[str, Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, ranks(2).run(losses_around_save, directory, request.param)[0]


def exported(directory: Path, target: Path, form: StateFormat, *, optimizer: bool = True) -> Path:
    export_state(location_of(directory), target, form=form, optimizer=optimizer, weights="model")
    return target


def test_a_torch_file_resumes_in_a_plain_loop(trained: Any, tmp_path: Path) -> None:
    optimizer, directory, expected = trained
    saved = torch.load(exported(directory, tmp_path / "state.pt", "torch"), weights_only=True)
    model = random_model()
    own, scheduler = make_peer(optimizer, model)
    model.load_state_dict(saved["model"])
    own.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["lr_scheduler"])
    assert saved["step"] == SAVED
    assert [group["param_names"] for group in saved["optimizer"]["param_groups"]]
    assert_as_here((train_on(model, own, scheduler), whole(model)), expected)


def resume_with_dcp(target: Path, optimizer: str, *, flat: bool, sharded: bool) -> Any:
    """Loads by torch's functions alone: `get_state_dict`, `dcp.load`, `set_state_dict`."""
    model = fsdp_model() if sharded else random_model()
    own, scheduler = make_peer(optimizer, model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, own, options=options)
    state = {"model": of_model, "optimizer": of_optimizer, "lr_scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=target, no_dist=not sharded)
    set_state_dict(
        model, own, model_state_dict=of_model, optim_state_dict=state["optimizer"], options=options
    )
    scheduler.load_state_dict(state["lr_scheduler"])
    assert state["step"] == SAVED
    return train_on(model, own, scheduler), whole(model)


def on_ranks(target: Path, optimizer: str, flat: bool) -> Any:
    return resume_with_dcp(target, optimizer, flat=flat, sharded=True)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_directory_resumes_by_the_functions_of_torch(
    ranks: Any, trained: Any, tmp_path: Path, flat: bool
) -> None:
    optimizer, directory, expected = trained
    target = exported(directory, tmp_path / "dcp", "dcp")
    assert_as_here(ranks(2).run(on_ranks, target, optimizer, flat)[0], expected)
    assert_as_here(resume_with_dcp(target, optimizer, flat=flat, sharded=False), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_muon_and_adamw_of_torch_resume_from_one_directory(ranks: Any, tmp_path: Path) -> None:
    """Torch's Muon sums its products in another order, in bf16."""
    losses, weights = ranks(2).run(losses_around_save, tmp_path / "run", "muon")[0]
    target = exported(tmp_path / "run", tmp_path / "dcp", "dcp")
    model = random_model()
    named = dict(model.named_parameters())
    matrices = {name for name, one in named.items() if one.ndim == 2 and not name.startswith("head")}
    groups = [{"params": [one]} for name, one in named.items() if name not in matrices]
    pair = [torch.optim.Muon([named[name] for name in matrices], lr=7.0), torch.optim.AdamW(groups, lr=7.0)]
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_model, of_optimizers = get_state_dict(model, pair, options=options)
    state = {"model": of_model, "optimizer": of_optimizers}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    set_state_dict(
        model, pair, model_state_dict=of_model, optim_state_dict=state["optimizer"], options=options
    )
    both = SimpleNamespace(step=lambda: [one.step() for one in pair], zero_grad=model.zero_grad)
    found = train_on(model, cast(Any, both), SimpleNamespace(step=lambda: None))
    torch.testing.assert_close(found, losses, rtol=1e-3, atol=0)
    for name, tensor in whole(model).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=3e-3 if name in matrices else 2e-4)


class Position:
    """As torchtitan's Trainer keeps its own state."""

    step, ntokens_seen = 0, -1

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.__dict__ |= state


def resume_by_torchtitan(target: Path) -> Any:
    """Loads by torchtitan's own checkpointer into its containers. Rates are those of its settings."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    model, run, position = fsdp_model(), run_for("adamw"), Position()
    rate = run.optimizer.learning_rate
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": one})
        for pattern, one in [("^head", rate / 2), ("bias$", rate), (".*", rate)]
    ]
    settings = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = settings.build(model_parts=[model])
    schedulers = LRSchedulersContainer(
        optimizers, lambda step: learning_rate_factor(run.schedule, step=step, steps=STEPS)
    )
    settings = CheckpointManager.Config(
        enable=True, folder=target.parent.name, exclude_from_loading=["dataloader"]
    )
    manager = settings.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": position},
        sd_adapter=None,
        base_folder=str(target.parent.parent),
    )
    assert manager.load()
    manager.close()
    assert (position.step, position.ntokens_seen > 0) == (SAVED, True)
    return train_on(model, optimizers, schedulers), whole(model)


def resume_by_names_of_torchtitan(target: Path, optimizer: str) -> Any:
    """Loads the same names without torchtitan: the model's at the top, and a flat optimizer."""
    model = fsdp_model()
    own, scheduler = make_peer(optimizer, model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, own, options=options)
    state = {
        **model.state_dict(),
        "optimizer": flat,
        "lr_scheduler": scheduler.state_dict(),  # as in 0.2; 0.3 loads its last_epoch alone
        "train_state": {"step": 0, "ntokens_seen": 0},
    }
    dcp.load(state, checkpoint_id=target)
    model.load_state_dict(state, strict=False)
    set_optimizer_state_dict(model, own, flat, options=options)
    assert state["train_state"]["step"] == SAVED
    scheduler.load_state_dict(state["lr_scheduler"])
    return train_on(model, own, scheduler), whole(model)


def test_a_directory_for_torchtitan_resumes(ranks: Any, trained: Any, tmp_path: Path) -> None:
    optimizer, directory, expected = trained
    target = exported(directory, tmp_path / "step-3", "torchtitan")
    assert_as_here(ranks(2).run(resume_by_names_of_torchtitan, target, optimizer)[0], expected)
    if optimizer == "adamw" and importlib.util.find_spec("torchtitan") is not None:
        assert_as_here(ranks(2).run(resume_by_torchtitan, target)[0], expected)


def resume_by_accelerate(target: Path) -> Any:
    """Loads by the functions that `Accelerator.load_state` calls. It does not shard on CPU ranks itself."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    model = fsdp_model()
    own, scheduler = make_peer("adamw", model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    try:
        accelerator = Accelerator(cpu=True)
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, str(target), 0)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, own, model, str(target), 0)
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    scheduler.load_state_dict(torch.load(target / "scheduler.bin", weights_only=True))
    return train_on(model, own, scheduler), whole(model)


def test_a_directory_for_accelerate_resumes(ranks: Any, trained: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    optimizer, directory, expected = trained
    if optimizer == "adamw":
        target = exported(directory, tmp_path / "state", "accelerate")
        assert_as_here(ranks(2).run(resume_by_accelerate, target)[0], expected)


# Small states #
def saved_state(directory: Path, *, plan: Plan | None = None, **values: Any) -> Path:
    """A checkpoint of a compiled model with tied weights and averages, as TrainState saves it."""
    name = "_orig_mod.embedding.weight"
    tensors = {
        f"model.{name}": torch.arange(6.0).view(2, 3).bfloat16(),
        f"ema.{name}": torch.full((2, 3), 9.0),
        f"optimizer.{name}.step": torch.tensor(4.0),
        f"optimizer.{name}.exp_avg": torch.ones(2, 3),
        f"optimizer.{name}.exp_avg_sq": torch.zeros(2, 3),
        "rng.cpu.rank0": torch.zeros(5),
    }
    group = {"params": [name], "lr": 0.25, "initial_lr": 0.5, "betas": [0.8, 0.9], "weight_decay": 0.0}
    noted = {"tied": {"_orig_mod.head.weight": name}, "optimizer": "AdamW", "parameter_groups": [group]}
    save(State(4, tensors, {**noted, **values}), directory, plan=plan)
    return directory


def read_dcp(directory: Path) -> dict[str, Any]:
    """Returns all values of a DCP directory, nested as its metadata lists them."""
    file = directory.with_suffix(".whole")
    dcp_to_torch_save(directory, file)
    return torch.load(file, weights_only=True)


FORMS: list[StateFormat] = ["dcp", "torchtitan", "accelerate", "torch"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", ["model", "ema"])
def test_without_the_optimizer_there_is_the_model_alone(
    tmp_path: Path, form: StateFormat, weights: Weights
) -> None:
    target = tmp_path / "out"
    export_state(
        location_of(saved_state(tmp_path / "run")), target, form=form, optimizer=False, weights=weights
    )
    if form == "torch":
        found = torch.load(target, weights_only=True)
    else:
        found = read_dcp(target / "pytorch_model_fsdp_0" if form == "accelerate" else target)
    model = found if form == "torchtitan" else found["model"]
    assert set(found) == ({"model"} if form != "torchtitan" else set(model))
    assert set(model) == {"embedding.weight", "head.weight"}  # peers save tied weights by both names
    expected = torch.full((2, 3), 9.0) if weights == "ema" else torch.arange(6.0).view(2, 3).bfloat16()
    for tensor in model.values():
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_groups_get_all_entries_of_the_adamw_of_torch(tmp_path: Path) -> None:
    """Fullshard's own variants of AdamW do not have all, and torch needs each."""
    directory = saved_state(tmp_path / "run", optimizer="StochasticAdamW")
    saved = torch.load(exported(directory, tmp_path / "out", "torch"), weights_only=True)
    (group,) = saved["optimizer"]["param_groups"]
    assert group.keys() >= torch.optim.AdamW([torch.zeros(1)]).param_groups[0].keys()
    assert (group["lr"], group["initial_lr"], group["betas"]) == (0.25, 0.5, (0.8, 0.9))
    assert group["param_names"] == ["embedding.weight"]
    assert saved["optimizer"]["state"][0]["exp_avg"].sum() == 6


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"optimizer": "MuonAdamW"}, r"\[optimizer.muon\] is not recorded"),
        (
            {"optimizer": "MuonAdamW", "run": {"optimizer": {"muon": {"row_decay": 0.9}}}},
            "no other optimizer",
        ),
        ({"optimizer": "SoapAdamW"}, "SoapAdamW"),
        ({"optimizer": "Adafactor"}, "Adafactor"),
        ({"parameter_groups": None}, "its groups are not recorded"),
    ],
)
def test_an_optimizer_that_nothing_else_loads_is_refused_by_name(
    tmp_path: Path, values: dict[str, Any], why: str
) -> None:
    directory = saved_state(tmp_path / "run", **values)
    with pytest.raises(CheckpointError, match=why):
        exported(directory, tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()
    exported(directory, tmp_path / "out", "dcp", optimizer=False)


def test_muon_saved_by_a_loop_of_its_own_has_the_settings_of_the_plan(tmp_path: Path) -> None:
    plan = Plan.from_run(run_for("muon"), world_size=1, device="cpu")
    group = {"params": ["_orig_mod.embedding.weight"], "kind": "muon", "lr": 0.25}
    values: dict[str, Any] = {"optimizer": "MuonAdamW", "parameter_groups": [group]}
    directory = saved_state(tmp_path / "run", plan=plan, **values)
    saved = read_dcp(exported(directory, tmp_path / "out", "dcp"))
    (one,) = saved["optimizer"]["param_groups"]
    assert (one["lr"], one["ns_steps"], one["adjust_lr_fn"]) == (0.25, 4, "original")


@pytest.mark.parametrize("form", ["torch", "accelerate"])
def test_formats_of_one_optimizer_refuse_muon_beside_adamw(tmp_path: Path, form: StateFormat) -> None:
    directory = saved_state(tmp_path / "run", optimizer="MuonAdamW")
    with pytest.raises(CheckpointError, match=r"this format holds one[\s\S]*--format dcp"):
        exported(directory, tmp_path / "out", form)


def test_a_packed_base_is_refused_by_name(tmp_path: Path) -> None:
    packing = {"format": "nf4", "block_columns": 64, "names": ["a.weight"]}
    directory = saved_state(tmp_path / "run", packed_weights=packing)
    with pytest.raises(CheckpointError, match="packed base"):
        exported(directory, tmp_path / "out", "torch", optimizer=False)


def test_averages_are_refused_with_an_optimizer(tmp_path: Path) -> None:
    place = location_of(saved_state(tmp_path / "run"))
    with pytest.raises(SpecError, match="averages"):
        export_state(place, tmp_path / "out", form="dcp", optimizer=True, weights="ema")


@pytest.mark.parametrize("form", ["dcp", "accelerate"])
def test_no_export_goes_into_an_earlier_one(tmp_path: Path, form: StateFormat) -> None:
    directory = saved_state(tmp_path / "run")
    exported(directory, tmp_path / "out", form)
    with pytest.raises(SpecError, match="taken for a checkpoint"):
        exported(directory, tmp_path / "out", form)


def test_a_damaged_checkpoint_leaves_nothing_that_loads(tmp_path: Path) -> None:
    directory = saved_state(tmp_path / "run")
    data = next(directory.glob("step-*/*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    for form in FORMS:
        with pytest.raises(CheckpointError, match="holds other bytes than were saved"):
            exported(directory / "step-00000004", tmp_path / form, form)
        assert not [one for one in tmp_path.rglob("*") if one.name == ".metadata" and "run" not in one.parts]
    assert not (tmp_path / "torch").exists()
