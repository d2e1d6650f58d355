"""Specs for any number of ranks that divide experts follow from the recordings for three."""

import copy
import json
from importlib.metadata import version
from pathlib import Path

import pytest
from torch.nn.modules.module import register_module_forward_hook

from fullshard.models.build import build_model
from fullshard.models.loss import choose_loss
from fullshard.planner.describe.describe import build_recorder, build_spec, record_all_settings
from fullshard.planner.describe.describe_run import (
    SHIPPED_FILE,
    build_spec_key,
    describe_run,
    read_shipped_or_cached_spec,
    read_shipped_specs,
    version_without_build,
)
from fullshard.planner.describe.expert_degrees import RunRecording, derive_recording
from fullshard.planner.describe.recordings import SettingsRecorder
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.plan import DeviceType
from fullshard.spec.run import Run
from tests.fakes.families import MIXTURES

SIZES = ["model.layers=1", "model.d_model=32", "model.heads=4", "model.experts=12", "model.vocabulary=64"]
DECODER = [*SIZES, "model.experts_per_token=3", "model.expert_d_ff=24", "data.sequence_length=32"]


def mixture_run(directory: Path, model: str, *overrides: str) -> Run:
    """A decoder of 12 experts, or a model of transformers of 12."""
    path = directory / "config.json"
    if model == "decoder":
        return Run.load(overrides=[*DECODER, "recompute.mode=full", *overrides])
    key = "n_routed_experts" if model == "deepseek_v3" else "num_local_experts"
    path.write_text(json.dumps(MIXTURES[model] | {key: 12}))
    own = [f"model.hf={json.dumps(str(path))}", "data.sequence_length=16", "recompute.mode=selective"]
    return Run.load(overrides=[*own, *overrides])


def record(run: Run, *, degree: int, device: DeviceType) -> tuple[SettingsRecorder, RunRecording]:
    own = run.with_settings({"sharding": {"expert_parallel": degree}})
    model = build_model(own)
    recorder = build_recorder(model, own, loss=choose_loss(own, model), device_type=device)
    return recorder, record_all_settings(recorder, own, attention_kernel="flash")


@pytest.mark.parametrize(
    ("model", "device", "overrides"),
    [
        ("decoder", "cuda", ["precision.mode=bf16"]),
        ("decoder", "cpu", ["precision.mode=fp32", "sharding.tensor_parallel=2"]),
        ("deepseek_v3", "cuda", ["precision.mode=bf16", "run.compile=false"]),
    ],
)
def test_recordings_for_three_numbers_of_ranks_describe_any_other(
    model: str, device: DeviceType, overrides: list[str], tmp_path: Path
) -> None:
    """Also with one expert per rank."""
    run = mixture_run(tmp_path, model, *overrides)
    known = {degree: record(run, degree=degree, device=device)[1] for degree in (2, 3, 4)}
    for degree in (6, 12) if model == "decoder" else (12,):
        recorder, traced = record(run, degree=degree, device=device)
        derived = derive_recording(known, degree)
        assert derived is not None
        assert build_spec(recorder, derived) == build_spec(recorder, traced)


@pytest.mark.parametrize(("name", "degrees"), [("gpt-oss-20b", (4, 16)), ("deepseek-v3", (2, 256))])
def test_specs_of_mixtures_are_shipped_with_divided_experts(name: str, degrees: tuple[int, ...]) -> None:
    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch"))):
        pytest.skip("shipped for another torch")
    run = resolve_model_to_plan(name).load_run(["precision.mode=bf16"])
    for degree in degrees:
        own = run.with_settings({"sharding": {"expert_parallel": degree}})
        key = build_spec_key(own, "cuda", attention_kernel="cudnn_256")
        spec = read_shipped_or_cached_spec(key, {"XDG_CACHE_HOME": "/nonexistent"})
        assert spec is not None
        assert spec.expert_parallel == degree
        assert spec.numel > 2e10


def test_two_recordings_or_other_operations_derive_nothing(tmp_path: Path) -> None:
    run = mixture_run(tmp_path, "decoder", "run.compile=false")
    known = {degree: record(run, degree=degree, device="cpu")[1] for degree in (2, 3)}
    assert derive_recording(known, 6) is None
    assert derive_recording(known | {4: known[3]}, 6) is not None
    shorter = copy.deepcopy(known[3])
    del shorter.settings[0].low.recording[-1].changes[-1:]
    assert derive_recording(known | {4: shorter}, 6) is None


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_process_traces_three_numbers_of_ranks(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It derives the spec of a fourth, without a forward, unless experts are dequantised in chunks."""
    monkeypatch.setenv("FULLSHARD_CACHE", "off")
    own = [f"adapter.base_dtype={'nf4' if is_packed else 'auto'}", f"adapter.rank={4 * is_packed}"]
    own += [f"model.{one}=64" for one in ("d_model", "d_ff", "expert_d_ff")] if is_packed else []
    run, forwards = mixture_run(tmp_path, "decoder", "recompute.mode=none", *own), list[int]()
    with register_module_forward_hook(lambda *_: forwards.append(1)):
        for degree in (2, 3, 4, 6):
            forwards.clear()
            describe_run(run.with_settings({"sharding": {"expert_parallel": degree}}), "cpu")
            assert bool(forwards) is (degree < 6 or is_packed)
