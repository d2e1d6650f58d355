"""A source that is broken, mixed or hostile is refused by name, and nothing in it runs."""

import json
import os
import pickle
import re
import shutil
import tomllib
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from fullshard.cli.main import main
from fullshard.errors import CheckpointError, SpecError
from fullshard.takeover.formats import open_foreign_checkpoint
from fullshard.takeover.names import match_names
from fullshard.takeover.source import LazyTensor, SavedBox
from fullshard.takeover.write import ImportTarget, read_all
from tests.takeover.deepspeed_model import SmallModel
from tests.takeover.test_formats import run_of, taken_over
from tests.takeover.tiny import RUN, initial
from tests.takeover.unpacked import FIXTURES

FLAG = Path("ran")
SGD = RUN.replace("[optimizer]", '[optimizer]\nname = "sgd"').replace("betas = [0.9, 0.999]", "")


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


HOSTILE = {
    "posix.system": Calls(os.system, f"touch {FLAG}"),
    "builtins.getattr": Calls(getattr, "text", "upper"),
    "builtins.eval": Calls(eval, f"open('{FLAG}', 'w')"),
}


def write_metadata(path: Path, hostile: Calls) -> Path:
    (path / ".metadata").write_bytes(pickle.dumps(hostile))
    return path


def write_value_of_dcp(path: Path, hostile: Calls) -> Path:
    state = {"model": {"w": torch.ones(2)}, "train_state": {"step": hostile}}
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    return path


def write_file(path: Path, hostile: Calls) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, "x": hostile}, path / "one.pt")
    return path / "one.pt"


def write_legacy_file(path: Path, hostile: Calls) -> Path:
    torch.save({"model": {}, "x": hostile}, path / "one.pt", _use_new_zipfile_serialization=False)
    return path / "one.pt"


def write_rank_file(path: Path, hostile: Calls) -> Path:
    torch.save({"model": {"w": hostile}}, path / "rank0.pt")
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "write", [write_metadata, write_value_of_dcp, write_file, write_legacy_file, write_rank_file]
)
def test_nothing_in_a_hostile_pickle_runs(
    write: Callable[[Path, Calls], Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, HOSTILE[name])
    with pytest.raises(CheckpointError, match=re.escape(name.removeprefix("builtins."))):
        open_foreign_checkpoint(path)
    assert not FLAG.exists()


def edit_metadata(path: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def point_outside(metadata: Any) -> None:
    for one in metadata.storage_data.values():
        one.relative_path = f"../{one.relative_path}"


def remove_a_chunk(metadata: Any) -> None:
    del metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == "model.embed.weight")]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap(path: Path) -> None:
    (path / "rank0.pt").rename(path / "x")
    (path / "rank1.pt").rename(path / "rank0.pt")
    (path / "x").rename(path / "rank1.pt")


def claim_step_6(path: Path) -> None:
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps(state | {"global_step": 6}))


def add_an_optimizer(path: Path) -> None:
    shutil.copy(path / "optimizer.bin", path / "optimizer_1.bin")


def set_entry(key: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = torch.load(path / "source.pt", weights_only=True)
        torch.save(content | {key: value}, path / "source.pt")

    return change


STRUCTURES: list[dict[str, Any]] = [{"state": {"x": 3}}, {"state": []}]
STRUCTURES += [{"param_groups": [3]}, {"param_groups": [{"params": 3}]}]
BROKEN: list[tuple[str, str, Callable[[Path], object], str]] = [
    ("fsdp2_dcp/source", "", lambda p: (p / "__1_0.distcp").unlink(), r"__1_0.distcp is missing"),
    ("fsdp2_dcp/source", "", lambda p: cut(p / "__1_0.distcp"), r"__1_0.distcp is truncated"),
    ("fsdp2_dcp/source", "", lambda p: cut(p / ".metadata"), r"metadata cannot be read"),
    ("fsdp2_dcp/source", "", lambda p: edit_metadata(p, point_outside), r"'\.\./__._0.distcp'"),
    ("fsdp2_dcp/source", "", lambda p: edit_metadata(p, remove_a_chunk), r"do not hold all of model.embed"),
    ("fsdp1_flat/source", "", lambda p: (p / "rank1.pt").unlink(), r"rank 1 is missing"),
    ("fsdp1_flat/source", "", lambda p: (p / "rank0.pt").unlink(), r"rank 0 is missing"),
    ("fsdp1_flat/source", "", lambda p: cut(p / "rank1.pt"), r"rank1.pt cannot be read"),
    ("fsdp1_flat/source", "", swap, r"rank0.pt is a file of another rank"),
    (
        "fsdp1_flat/local",
        "",
        lambda _: None,
        r"flat_param of a local state dict[\s\S]*, 0 in moments by name",
    ),
    ("trainer/source", "", claim_step_6, r"6 steps reported, .* 3 updates of the optimizer"),
    (
        "trainer/source",
        "",
        lambda p: (p / "optimizer.pt").unlink(),
        r"no state of an optimizer[^$]*model.hf = ",
    ),
    ("fsdp1_flat/source", "", lambda p: (p / "rank4000000000.pt").touch(), r"rank 2 is missing"),
    ("torch_names", "source.pt", lambda p: cut(p / "source.pt"), r"source.pt cannot be read"),
    ("torch_names", "source.pt", set_entry("optimizer_1", {}), r"several models or optimizers"),
    ("accelerate_full/source", "", add_an_optimizer, r"several models or optimizers"),
    *(
        ("torch_names", "source.pt", set_entry("optimizer", value), r"not as its trainer writes")
        for value in STRUCTURES
    ),
]


@pytest.mark.parametrize(("name", "inside", "breaks", "match"), BROKEN)
def test_a_broken_source_is_refused_by_name(
    name: str, inside: str, breaks: Callable[[Path], object], match: str, tmp_path: Path
) -> None:
    path = shutil.copytree(FIXTURES / name, tmp_path / "source")
    breaks(path)
    with pytest.raises(CheckpointError, match=match):
        open_foreign_checkpoint(path / inside)


def test_whole_tensors_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        model = initial().state_dict() | {"seen": torch.full((3,), float(rank))}
        torch.save({"model": model, "step": 0, "rng": torch.ones(rank + 1)}, tmp_path / f"rank{rank}.pt")
    _, snapshot, _ = taken_over(tmp_path, run_of(tmp_path))
    with pytest.raises(CheckpointError, match="seen differs between"):
        read_all(snapshot)


@pytest.mark.parametrize(
    ("places", "sizes", "is_whole"),
    [
        ([(0, 0), (2, 0), (2, 1)], [(2, 2), (1, 1), (1, 1)], True),
        ([(0, 0), (1, 0), (0, 0)], [(1, 2), (2, 2), (1, 2)], True),
        ([(0, 0), (1, 0)], [(2, 2), (1, 2)], False),
        ([(0, 0), (1, 0), (2, 1)], [(2, 2), (1, 1), (1, 1)], False),
        ([(-1, 0), (2, 0)], [(2, 2), (1, 2)], False),
    ],
)
def test_boxes_that_overlap_or_lie_outside_are_no_tensor(
    places: list[tuple[int, int]], sizes: list[tuple[int, int]], is_whole: bool
) -> None:
    whole = torch.arange(6).view(3, 2)
    boxes = [
        SavedBox((y, x), (h, w), lambda y=y, x=x, h=h, w=w: whole[y : y + h, x : x + w])
        for (y, x), (h, w) in zip(places, sizes, strict=True)
    ]
    if is_whole:
        found = LazyTensor.from_boxes("w", boxes, shape=(3, 2), dtype=torch.int64)
        assert torch.equal(found.read(), whole)
        with pytest.raises(CheckpointError, match="another tensor is in the place of w"):
            LazyTensor.from_boxes("w", boxes, shape=(3, 2), dtype=torch.int32).read()
    else:
        with pytest.raises(CheckpointError, match="do not hold all of w"):
            LazyTensor.from_boxes("w", boxes, shape=(3, 2), dtype=torch.int64)


def test_second_moments_that_are_a_copy_of_the_first_are_refused(tmp_path: Path) -> None:
    """FSDP1 itself wrote this file, with use_orig_params and a full state dict."""
    _, snapshot, _ = taken_over(FIXTURES / "fsdp1_full/source.pt", run_of(tmp_path))
    with pytest.raises(CheckpointError, match=r"exp_avg of .* and exp_avg_sq of .* are equal"):
        read_all(snapshot)


def test_numbered_moments_need_an_order_that_fits_their_shapes(tmp_path: Path) -> None:
    source = FIXTURES / "torch_numbers/source.pt"
    with pytest.raises(SpecError, match="--order"):
        taken_over(source, run_of(tmp_path))
    with pytest.raises(CheckpointError, match="not in this order"):
        taken_over(source, run_of(tmp_path), order="parameters")


def saved(path: Path, **entries: Any) -> Path:
    torch.save({"model": initial().state_dict(), "step": 3, **entries}, path / "one.pt")
    return path / "one.pt"


def test_tensors_that_the_source_lacks_are_named(tmp_path: Path) -> None:
    content = {name: one for name, one in initial().state_dict().items() if name != "norm.bias"}
    with pytest.raises(CheckpointError, match="norm.bias"):
        taken_over(saved(tmp_path, model=content), run_of(tmp_path))


def test_state_without_a_parameter_and_state_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    state = {"exp_avg": torch.ones(11, 6), "exp_avg_sq": torch.ones(11, 6), "step": torch.tensor(1.0)}
    group = {"params": ["embed.weight"], "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5}
    for moments, groups, options in (
        (state, [], {}),
        (state | {"max_exp_avg_sq": torch.ones(11, 6)}, [group], {"amsgrad": True}),
    ):
        one = {"state": {"embed.weight": moments}, "param_groups": groups}
        with pytest.raises(CheckpointError, match="another than the run's") as refused:
            taken_over(saved(tmp_path, optimizer=one), run_of(tmp_path, SGD))
        found = tomllib.loads(str(refused.value).partition("Its settings:\n")[2])["optimizer"]
        assert (found["name"], found.get("options", {})) == ("adamw", options)
    assert (found["learning_rate"], found["betas"]) == (0.01, [0.8, 0.9])
    other = {"state": {"wqkv": state}, "param_groups": []}
    with pytest.raises(CheckpointError, match="wqkv"):
        taken_over(saved(tmp_path, optimizer=other), run_of(tmp_path))


def optimizer_state(**changed: Any) -> dict[str, Any]:
    """The state of AdamW after a step, with some parameters' state changed; None removes it."""
    state: dict[str, Any] = {}
    for name, one in initial().named_parameters():
        state[name] = {
            "exp_avg": one.detach(),
            "exp_avg_sq": one.detach().square(),
            "step": torch.tensor(3.0),
        }
    state |= {name.replace("__", "."): one for name, one in changed.items()}
    return {"state": {n: one for n, one in state.items() if one is not None}, "param_groups": []}


def test_trained_parameters_without_state_are_named_and_those_frozen_there_are_not_missed(
    tmp_path: Path,
) -> None:
    for optimizer in ({}, optimizer_state(embed__weight=None)):
        with pytest.raises(CheckpointError, match=r"no optimizer state[\s\S]*embed\.weight"):
            taken_over(saved(tmp_path, optimizer=optimizer), run_of(tmp_path))
    optimizer = optimizer_state(embed__weight=None)
    for more in ([], ["embed.weight"]):  # frozen there, or never updated
        optimizer["param_groups"] = [{"params": [*optimizer["state"], *more]}]
        _, snapshot, _ = taken_over(saved(tmp_path, optimizer=optimizer), run_of(tmp_path))
        assert {name for name in snapshot.tensors if "embed" in name} == {"model.embed.weight"}
        assert snapshot.values["parameter_groups"] is None


def test_each_parameter_has_its_own_number_of_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = optimizer_state()
    optimizer["state"]["embed.weight"]["step"] = 2
    del optimizer["state"]["norm.bias"]
    entries = {"lr": "fast", "weight_decay": None, "correct_bias": True, "final_lr": 0.1}
    optimizer["param_groups"] = [{"params": [*optimizer["state"]], **entries}]
    path = saved(tmp_path, optimizer=optimizer)
    found, snapshot, _ = taken_over(path, run_of(tmp_path))
    counts = {
        name.split(".")[1]: one.item() for name, one in snapshot.tensors.items() if name.endswith(".step")
    }
    assert (found.step, counts) == (3, {"embed": 2, "blocks": 3, "norm": 3, "head": 3})
    main(
        ["ckpt", "import", str(path), str(tmp_path / "out"), "--run", str(tmp_path / "run.toml"), "--dry-run"]
    )
    report = capsys.readouterr().err
    assert re.findall(r"(\S+) .*updated in 2 steps", report) == ["embed.weight"]
    report = " ".join(report.split())
    assert "group of embed.weight not read: lr = fast, final_lr = 0.1 " in report
    assert "note 1 of 9 parameters were updated in fewer than 3 steps, the fewest in 2 " in report
    assert "note 1 of 10 trained parameters begin with new optimizer state " in report
    with pytest.raises(CheckpointError, match="4 steps reported, .* 3 updates of the optimizer"):
        open_foreign_checkpoint(saved(tmp_path, optimizer=optimizer, step=4))


def test_weights_alone_begin_a_run_if_their_file_says_step_0(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="how many steps"):
        open_foreign_checkpoint(saved(tmp_path, step=None))
    _, snapshot, _ = taken_over(saved(tmp_path, step=0), run_of(tmp_path))
    assert (snapshot.step, [name for name in snapshot.tensors if name.startswith("optimizer.")]) == (0, [])


def test_state_of_another_shape_and_weights_that_are_codes_are_refused(tmp_path: Path) -> None:
    other = optimizer_state()["state"]["head.weight"] | {"exp_avg": torch.ones(6, 11)}
    with pytest.raises(CheckpointError, match="exp_avg is \\[6, 11\\]"):
        taken_over(saved(tmp_path, optimizer=optimizer_state(head__weight=other)), run_of(tmp_path))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        model = initial().state_dict()
        model |= {"head.weight": model["head.weight"].to(dtype)}
        with pytest.raises(CheckpointError, match=r"head\.weight is quantised"):
            taken_over(saved(tmp_path, model=model, optimizer=optimizer_state()), run_of(tmp_path))


def with_group(name: str = "AdamW", **entries: Any) -> dict[str, Any]:
    """The state of AdamW, with a group as the optimizer `name` of torch has it, and other entries."""
    group = getattr(torch.optim, name)(initial().parameters(), weight_decay=0.1).state_dict()["param_groups"][
        0
    ]
    state = optimizer_state()
    return state | {"param_groups": [group | entries | {"params": [*state["state"]]}]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("name", "entries", "match"),
    [
        *(("Adam", {}, "gradient"), ("RAdam", {}, "got: a group of RAdam"), ("NAdam", {}, "NAdam")),
        *(("AdamW", {key: value}, key) for key, value in (("maximize", True), ("bias_correction", False))),
        ("AdamW", {"grad_averaging": True}, "LAMB"),
    ],
)
def test_optimizers_whose_steps_are_not_those_of_adamw_are_refused(
    name: str, entries: dict[str, Any], match: str, tmp_path: Path
) -> None:
    optimizer = with_group(name, **entries)
    dcp.save(
        {"model": initial().state_dict(), "optim": optimizer},
        checkpoint_id=str(tmp_path / "dcp"),
        no_dist=True,
    )
    for path in (saved(tmp_path, optimizer=optimizer), tmp_path / "dcp"):
        with pytest.raises(CheckpointError, match=rf"otherwise than AdamW[\s\S]*{match}"):
            open_foreign_checkpoint(path)


@pytest.mark.parametrize("key", ["master_param", "exp_avg_sq_row", "__bnb_optimizer_quant_state__"])
def test_state_of_other_optimizers_is_refused_before_a_run_is_offered(key: str, tmp_path: Path) -> None:
    optimizer = optimizer_state()
    value = {"absmax1": torch.ones(1)} if key.startswith("__") else torch.ones(11, 6)
    optimizer["state"]["embed.weight"][key] = value
    with pytest.raises(CheckpointError, match=f"otherwise than AdamW[^$]*state {key}"):
        open_foreign_checkpoint(saved(tmp_path, optimizer=optimizer))


def test_groups_of_sgd_without_state_have_numbers_and_need_an_order(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(initial().parameters(), lr=0.5)
    path = saved(tmp_path, optimizer=optimizer.state_dict())
    with pytest.raises(SpecError, match="--order"):
        taken_over(path, run_of(tmp_path, SGD))
    source, _, target = taken_over(path, run_of(tmp_path, SGD), order="parameters")
    found = target.compare_settings(match_names(source, target.model, order="parameters"), step=3)
    assert {one.key for one in found if one.differs} == {"lr", "weight_decay"}


def twice(values: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    return {f"{prefix}{name}": one for prefix in ("", *prefixes) for name, one in values.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("content", "is_dcp", "match"),
    [
        ({"model": twice(initial().state_dict(), "_orig_mod.")}, False, "and _orig_mod.seen"),
        ({"optimizer": {"state": twice(optimizer_state()["state"], "module.")}}, False, "and module.embed"),
        (
            {"model": initial().state_dict(), **initial().state_dict()},
            True,
            "model.seen and seen",
        ),
        ({"optim": optimizer_state(), "optimizer": optimizer_state()}, True, "optim.* and optimizer.*"),
        ({"state_dict": initial().state_dict()}, False, "model, state_dict"),
    ],
)
def test_two_tensors_of_one_name_are_refused(
    content: dict[str, Any], is_dcp: bool, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "dcp" if is_dcp else saved(tmp_path, **content)
    if is_dcp:
        dcp.save({"step": 0} | content, checkpoint_id=str(path), no_dist=True)
    with pytest.raises(CheckpointError, match=match):
        taken_over(path, run_of(tmp_path))


def test_tied_tensors_that_differ_in_the_source_are_refused(tmp_path: Path) -> None:
    model = SmallModel(tied=True)
    for factor in (1, 2):
        content = model.state_dict() | {"head.weight": factor * model.head.weight.detach()}
        source = open_foreign_checkpoint(saved(tmp_path, model=content, step=0))
        tied = match_names(source, model).weights["embed.weight"]
        with nullcontext() if factor == 1 else pytest.raises(CheckpointError, match="and head.weight differ"):
            assert torch.equal(tied.read(), model.head.weight)


def test_values_of_programs_are_neither_run_nor_taken_and_have_a_note(tmp_path: Path) -> None:
    beside = {"args": Namespace(lr=1), "numpy": np.random.default_rng(0).bytes(3), "best": np.float64(3)}
    path = saved(tmp_path, rng=np.random.get_state(), **beside, optimizer=optimizer_state(), step=7)
    found = open_foreign_checkpoint(path)
    assert (found.step, found.notes[1]) == (3, "not taken: rng, args, numpy, best")
    assert "the program's step 7 is not taken: the optimizer counted 3" in found.notes[0]


@pytest.mark.parametrize("of_type", [int, float, np.int64, np.float32, np.dtype(">f8").type])
def test_numbers_of_numpy_are_read_as_those_of_python(of_type: Callable[[int], Any], tmp_path: Path) -> None:
    optimizer = optimizer_state()
    for one in optimizer["state"].values():
        one["step"] = of_type(0)
    optimizer["param_groups"] = [{"params": [], "lr": of_type(2), "betas": (of_type(0), of_type(1))}]
    found = open_foreign_checkpoint(saved(tmp_path, optimizer=optimizer, step=of_type(0)))
    assert (found.step, {*found.optimizer.updates.values()}) == (0, {0})
    settings = found.optimizer.groups[0].settings
    assert {key: one for key, one in settings.items() if one} == {"lr": (2,), "betas": (0, 1)}


def test_a_count_of_updates_that_is_no_number_is_refused(tmp_path: Path) -> None:
    for count in ("3", torch.ones(2)):
        optimizer = {"state": {"norm.bias": {"step": count}}, "param_groups": []}
        with pytest.raises(CheckpointError, match="count of updates is not a number"):
            open_foreign_checkpoint(saved(tmp_path, optimizer=optimizer))


def test_state_of_a_parameter_that_the_run_freezes_has_a_row(tmp_path: Path) -> None:
    source = open_foreign_checkpoint(saved(tmp_path, optimizer=optimizer_state()))
    model = initial()
    model.embed.requires_grad_(False)
    found = match_names(source, model)
    assert found.frozen == ("embed.weight",)
    assert (found.left_over_state, "embed.weight" in found.moments) == ((), False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tensors_beside_the_model_do_not_hide_its_names(tmp_path: Path) -> None:
    content = {"model": initial().state_dict(), "optim": optimizer_state(), "rng_state": torch.ones(3)}
    dcp.save(content, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    source, snapshot, target = taken_over(tmp_path / "dcp", run_of(tmp_path))
    assert "rng_state" in match_names(source, target.model).left_over
    assert "optimizer.embed.weight.exp_avg" in snapshot.tensors


def test_names_of_a_map_are_those_of_the_model(tmp_path: Path) -> None:
    content = {f"old.{name.replace('blocks', 'h')}": one for name, one in initial().state_dict().items()}
    source = open_foreign_checkpoint(saved(tmp_path, model=content))
    target = ImportTarget.of_run(run_of(tmp_path))
    with pytest.raises(CheckpointError):
        match_names(source, target.model, names={"old.seen": "head.weight", "old.head.weight": "seen"})
    found = match_names(source, target.model, names={"old.h.*": "blocks.*", "old.*": "*"})
    assert found.sources["blocks.1.down.weight"] == ("old.h.1.down.weight",)
    assert (found.missing, found.left_over) == ((), ())
