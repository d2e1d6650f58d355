"""A spec from the cache is the spec that describing the model anew finds."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.planner.describe.describe_run import (
    SHIPPED_FILE,
    build_spec_key,
    describe_run,
    read_shipped_specs,
    version_without_build,
    write_cached_spec,
)
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import read_presets
from fullshard.spec.run import Run
from tests.fakes.specs import phases_with_kernels

SMALL = (
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.d_ff=32"),
    *("data.sequence_length=16", "train.global_batch=12", "precision.mode=bf16"),
)
# Settings that are in no key.
OTHERS = (
    *("train.global_batch=96", "train.steps=7", "train.gradient_sync=last_microbatch"),
    *("optimizer.name=sgd", "schedule.warmup_steps=1", "sharding.strategy=hybrid_shard"),
    *("sharding.shard_degree=1", "offload.update=device", "checkpoint.keep=3"),
    *("fault_tolerance.on_spike=skip", "log.every=3", "run.dir=elsewhere", "run.seed=4"),
    *("run.device=cuda", "data.packing=best_fit", "data.validation_fraction=0.2"),
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CACHE", str(tmp_path / "specs"))


def gpt2(directory: Path) -> str:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    return f"model.hf={json.dumps(str(path))}"


def test_an_encoder_decoder_is_described_with_its_trained_bias(tmp_path: Path) -> None:
    """cuDNN's kernel has no gradient of a bias; without decoder_start_token_id, labels are not shifted."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = (
        f"model.hf={json.dumps(str(tmp_path))}",
        "recompute.mode=none",
        "run.compile=false",
        *SMALL[4:],
    )
    spec = describe_run(Run.load(overrides=settings), "cuda", attention_kernel="cudnn")
    assert spec.sequence_length == 16
    assert any(kernel.kind == "attention_backward" for kernel in spec.kernels)


def test_rows_longer_than_the_positions_are_not_described(tmp_path: Path) -> None:
    """They were traced shorter, and counted as long as asked for."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = resolve_model_to_plan(str(tmp_path)).load_run(["precision.mode=bf16"])
    with pytest.raises(SpecError, match=r"data.sequence_length = 8192 is longer .*") as raised:
        describe_run(run, "cuda")
    assert "data.sequence_length = 512" in str(raised.value)


@pytest.mark.parametrize("kind", ["run", "plan", "config"])
def test_a_cached_spec_equals_a_fresh_one(kind: str, tmp_path: Path) -> None:
    model = [gpt2(tmp_path), *SMALL[4:]] if kind == "config" else SMALL
    run = Run.load(overrides=[*model, "recompute.mode=full", "run.compile=false"])
    asked = Plan.from_run(run, world_size=2) if kind == "plan" else run
    fresh, cached = describe_run(asked, "cuda"), describe_run(asked, "cuda")
    assert fresh is not cached
    assert cached == fresh
    assert cached.model_dump_json() == fresh.model_dump_json()


@pytest.mark.long
def test_cached_spec_without_compiled_traces_misses_for_compiled_run() -> None:
    auto = Run.load(overrides=[*SMALL, "recompute.mode=none"])
    assert not any(trace.compiled for trace in describe_run(auto, "cpu").traces)
    asked = auto.with_overrides(["run.compile=true"])
    assert all(trace.compiled for trace in describe_run(asked, "cpu").traces)


def test_cached_spec_serves_eager_and_compiled_runs(tmp_path: Path) -> None:
    run = Run.load(overrides=[gpt2(tmp_path), *SMALL[4:], "recompute.mode=none"])
    eager, compiled = (run.with_overrides([f"run.compile={one}"]) for one in ("false", "true"))
    fresh = describe_run(eager, "cuda", attention_kernel="cudnn", cached=False)
    both = fresh.model_copy(update={"name": "of auto"})
    write_cached_spec(build_spec_key(run, "cuda", attention_kernel="flash"), both)
    assert describe_run(eager, "cuda") == describe_run(compiled, "cuda") == both
    assert describe_run(eager, "cuda", attention_kernel="cudnn") == fresh


def test_settings_that_are_not_in_the_key_do_not_change_the_spec() -> None:
    plain = Run.load(overrides=[*SMALL, "recompute.mode=none"])
    other = Run.load(overrides=[*SMALL, "recompute.mode=none", *OTHERS])
    assert build_spec_key(plain, "cpu") == build_spec_key(other, "cpu")
    assert (
        describe_run(plain, "cpu", cached=False).model_dump_json()
        == describe_run(other, "cpu", cached=False).model_dump_json()
    )


def test_shipped_specs_are_of_this_code() -> None:
    """One trace of one preset: the next test, which is long, compares them all."""
    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch"))):
        pytest.skip("shipped for another torch")
    run = resolve_model_to_plan("qwen2.5-0.5b").load_run(["precision.mode=bf16"])
    shipped = describe_run(run, "cuda")
    one = run.with_overrides(["recompute.mode=full", "run.compile=false"])
    fresh = describe_run(one, "cuda", cached=False)
    (trace,) = fresh.traces
    (same,) = [t for t in shipped.traces if (t.recompute, t.compiled) == (trace.recompute, trace.compiled)]
    assert phases_with_kernels(shipped, same) == phases_with_kernels(fresh, trace), "bench.preset_specs"
    own = {"kernels": (), "traces": (), "untraced": ()}
    assert shipped.model_copy(update=own) == fresh.model_copy(update=own), "bench.preset_specs"


@pytest.mark.long
@pytest.mark.parametrize("name", [preset.name for preset in read_presets()])
def test_a_shipped_spec_equals_a_fresh_one(name: str) -> None:
    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch"))):
        pytest.skip("shipped for another torch")
    run = resolve_model_to_plan(name).load_run(["precision.mode=bf16"])
    fresh = describe_run(run, "cuda", cached=False)
    assert describe_run(run, "cuda").model_dump_json() == fresh.model_dump_json(), "bench.preset_specs"
