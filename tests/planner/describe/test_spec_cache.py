"""The cache of described models: what an entry is known by, and what is not taken for one."""

import json
import lzma
import os
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from fullshard.planner.describe.describe_run import (
    SHIPPED_FILE,
    SHIPPED_LENGTHS_FILE,
    SpecKey,
    build_spec_key,
    cache_directory,
    describe_run,
    read_shipped_or_cached_spec,
    read_shipped_specs,
    trim_cache,
    version_without_build,
    write_cached_spec,
)
from fullshard.planner.describe.sequence_lengths import settings_for_any_length
from fullshard.planner.search.parallel_degrees import iterate_tensor_degrees
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.model import (
    Kernel,
    LinearInMicrobatch,
    LiveTensorBytes,
    MicrobatchTrace,
    ModelSpec,
    TracePhase,
    UnitSpec,
)
from fullshard.spec.plan import Plan, Precision
from fullshard.spec.pretrained import read_presets
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.settings.train_section import RecomputeSection

SPEC = ModelSpec(
    name="Tiny",
    sequence_length=8,
    precision=Precision.from_mode("fp32"),
    units=(UnitSpec(name="", position=0, parameters=()),),
    buffer_bytes=3,
    kernels=(Kernel(kind="matmul", dtype="fp32", flops=LinearInMicrobatch(1 / 3, 1e300)),),
    traces=(
        MicrobatchTrace(
            recompute=RecomputeSection(mode="none"),
            batch_bytes=LinearInMicrobatch(0, 2**53),
            phases=(TracePhase(event="start", peaks=(LiveTensorBytes(),), end=LiveTensorBytes()),),
        ),
    ),
)


def key(*overrides: str, run: Run | None = None) -> SpecKey:
    found = build_spec_key(run or Run.load(overrides=overrides), "cpu")
    assert found is not None
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def entry(environment: dict[str, str]) -> Path:
    directory = cache_directory(environment)
    assert directory is not None
    return directory / key().file_name


def test_cached_spec_reads_back_bitwise(environment: dict[str, str]) -> None:
    assert read_shipped_or_cached_spec(key(), environment) is None
    write_cached_spec(key(), SPEC, environment=environment)
    found = read_shipped_or_cached_spec(key(), environment)
    assert found == SPEC
    assert found.model_dump_json() == SPEC.model_dump_json()
    assert [path.name for path in entry(environment).parent.iterdir()] == [key().file_name]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[:-20],
    "one digit of the spec is another": lambda data: data.replace(b'"buffer_bytes":3', b'"buffer_bytes":4'),
    "one bit of the digest is another": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "no JSON": lambda data: b"\x80\x04\x95" + data,
    "no text": lambda data: b"\xff\xfe\n\xff",
    "another kind of JSON": lambda data: b'{"weights": []}\n{}',
    "nested": lambda data: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_entry_is_rewritten(damage: Callable[[bytes], bytes], environment: dict[str, str]) -> None:
    write_cached_spec(key(), SPEC, environment=environment)
    path = entry(environment)
    path.write_bytes(damage(path.read_bytes()))
    assert read_shipped_or_cached_spec(key(), environment) is None
    write_cached_spec(key(), SPEC, environment=environment)
    assert read_shipped_or_cached_spec(key(), environment) == SPEC


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_directories_and_pipes_are_ignored(make: Callable[[Path], None], environment: dict[str, str]) -> None:
    path = entry(environment)
    path.parent.mkdir(parents=True)
    make(path)
    assert read_shipped_or_cached_spec(key(), environment) is None
    write_cached_spec(key(), SPEC, environment=environment)


def test_the_variable_names_a_directory_or_switches_the_cache_off(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unwritable = {"FULLSHARD_CACHE": str(tmp_path / "file" / "below")}
    write_cached_spec(key(), SPEC, environment=unwritable)
    assert read_shipped_or_cached_spec(key(), unwritable) is None
    named = {"FULLSHARD_CACHE": str(tmp_path / "here"), "XDG_CACHE_HOME": str(tmp_path / "there")}
    write_cached_spec(key(), SPEC, environment=named)
    assert (tmp_path / "here" / "fullshard" / "specs" / key().file_name).is_file()
    assert not (tmp_path / "there").exists()
    assert cache_directory({"FULLSHARD_CACHE": "off"}) is None
    preset = shipped_key("llama3-8b")
    assert read_shipped_or_cached_spec(preset, {"FULLSHARD_CACHE": "off"}) is None


def test_cache_evicts_least_recently_used_entries(environment: dict[str, str]) -> None:
    keys = [key(f"data.sequence_length={length}") for length in (16, 32, 48)]
    for age, one in enumerate(keys):
        write_cached_spec(one, SPEC, environment=environment)
        os.utime(entry(environment).with_name(one.file_name), (age, age))
    size = entry(environment).with_name(keys[0].file_name).stat().st_size
    assert read_shipped_or_cached_spec(keys[0], environment) == SPEC  # used: the newest
    directory = entry(environment).parent
    theirs = [directory / name for name in ("train.json", "0" * 32 + ".json", f".{'0' * 32}.json.tmp-0")]
    for age, path in enumerate(theirs):
        path.write_text("")
        os.utime(path, (age - 9, age - 9))
    trim_cache(directory, most_bytes=2 * size + 10)
    assert all(path.exists() for path in theirs)
    assert [read_shipped_or_cached_spec(one, environment) is not None for one in keys] == [True, False, True]


CHANGES = [
    *("model.layers=5", "model.tied=true", "model.rope_theta=500000", "data.sequence_length=32"),
    *("data.document_mask=true", "train.microbatch=2", "precision.mode=bf16"),
    *("precision.fp8_min_features=16", "recompute.mode=none", "recompute.save_matmuls=2"),
    *("sharding.units.min_parameters=10000000", "adapter.rank=4"),
]


def test_each_setting_that_a_spec_depends_on_is_in_the_key() -> None:
    keys = [key(), *map(key, CHANGES)]
    assert len({one.file_name for one in keys}) == len(keys)
    device, plan = build_spec_key(Run(), "cuda"), build_spec_key(Plan.from_run(Run(), world_size=2), "cpu")
    assert device != key() != plan


def test_versions_sources_and_the_processor_are_in_the_key() -> None:
    plain, adapted = key(), key("adapter.rank=4")
    assert plain.torch == version("torch")
    assert {"fullshard", "sources", "machine"} == set(plain.made_by)
    assert adapted.made_by["transformers"] == version("transformers")
    for name in plain.made_by:
        other = plain.model_copy(update={"made_by": plain.made_by | {name: "another"}})
        assert other.file_name != plain.file_name
    assert plain.model_copy(update={"torch": "2.0.0"}).file_name != plain.file_name


def test_a_config_counts_by_its_bytes_not_by_its_path(tmp_path: Path) -> None:
    keys: list[SpecKey] = []
    for name, text in (
        ("a.json", '{"n_layer": 2}'),
        ("b.json", '{"n_layer": 2}'),
        ("c.json", '{"n_layer": 3}'),
    ):
        (tmp_path / name).write_text(text)
        keys.append(key(f"model.hf={json.dumps(str(tmp_path / name))}"))
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].made_by["transformers"] == version("transformers")


@pytest.mark.parametrize(
    "overrides",
    [
        ('model.python="package.module:factory"',),
        ('train.loss="package.module:loss"',),
        ("data.source=python", 'data.factory="package.module:make"'),
        ('model.hf="config.json"', "model.trust_remote_code=true"),
    ],
)
def test_code_from_elsewhere_is_not_cached(overrides: tuple[str, ...]) -> None:
    assert build_spec_key(Run.load(overrides=overrides), "cpu") is None


def shipped_key(name: str, *settings: str, kernel: AttentionKernel = "flash") -> SpecKey:
    run = resolve_model_to_plan(name).load_run(["precision.mode=bf16", *settings])
    found = build_spec_key(run, "cuda", attention_kernel=kernel)
    assert found is not None
    return found


def divisions_of_matmuls(name: str) -> list[int]:
    """Numbers of ranks that share the matmuls of a preset's shipped specs: also those over 1, from 8B on."""
    spec = read_shipped_or_cached_spec(shipped_key(name), {"XDG_CACHE_HOME": "/nonexistent"})
    assert spec is not None, "bench.preset_specs"
    run = resolve_model_to_plan(name).load_run(["sharding.tensor_parallel=auto"])
    return [1, *(iterate_tensor_degrees(run, per_node=8) if spec.numel > 8e9 else ())]


def test_every_preset_and_the_default_run_are_shipped() -> None:
    specs = read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch")))
    if not specs:
        pytest.skip("shipped for another torch")
    keys: set[str] = set()
    for preset in read_presets():
        kernels = get_args(AttentionKernel) if isinstance(preset.model, HuggingFaceModel) else ("flash",)
        keys |= {shipped_key(preset.name, kernel=kernel).settings for kernel in kernels}
        for ranks in divisions_of_matmuls(preset.name)[1:]:
            divided = f"sharding.tensor_parallel={ranks}"
            keys.add(shipped_key(preset.name, divided, kernel=kernels[-1]).settings)
    for run in default_runs_on_cpu():
        key = build_spec_key(run, "cpu")
        assert key is not None
        keys.add(key.settings)
    assert set(specs) == keys, "bench.preset_specs"


def test_specs_of_dense_decoders_for_long_sequences_are_shipped_at_all_lengths() -> None:
    specs = read_shipped_specs(SHIPPED_LENGTHS_FILE, torch=version_without_build(version("torch")))
    if not specs:
        pytest.skip("shipped for another torch")
    keys: set[str] = set()
    for preset in read_presets():
        model = preset.model
        if isinstance(model, DecoderConfig) and not model.is_mixture and model.max_sequence > 8192:
            for ranks, shared in product(divisions_of_matmuls(preset.name), (1, 2)):
                own = [f"sharding.tensor_parallel={ranks}", f"sharding.context_parallel={shared}"]
                keys.add(settings_for_any_length(json.loads(shipped_key(preset.name, *own).settings)))
    assert set(specs) == keys, "bench.preset_specs"


@pytest.mark.parametrize(("length", "shared"), [(3 << 14, 1), (1 << 20, 32)])
def test_a_shipped_spec_is_derived_for_a_length(length: int, shared: int) -> None:
    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch"))):
        pytest.skip("shipped for another torch")
    own = [f"data.sequence_length={length}", f"model.max_sequence={length}"]
    own += ["sharding.tensor_parallel=8", f"sharding.context_parallel={shared}"]
    spec = read_shipped_or_cached_spec(shipped_key("llama3.1-405b", *own), {"XDG_CACHE_HOME": "/nonexistent"})
    assert spec is not None, "bench.preset_specs"
    assert (spec.sequence_length, spec.context_parallel) == (length, shared)


def default_runs_on_cpu() -> list[Run]:
    """The default run, as a first run on CPU ranks describes it: first without recompute."""
    return [
        Run.load(overrides=["precision.mode=fp32", f"recompute.mode={mode}"]) for mode in ("none", "auto")
    ]


def test_the_default_run_is_shipped_as_this_code_describes_it() -> None:
    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch"))):
        pytest.skip("shipped for another torch")
    run, _ = default_runs_on_cpu()
    fresh = describe_run(run, "cpu", cached=False)
    assert describe_run(run, "cpu").model_dump_json() == fresh.model_dump_json(), "bench.preset_specs"


def test_shipped_specs_are_for_the_versions_of_torch_that_their_file_names(tmp_path: Path) -> None:
    path = tmp_path / "specs.xz"
    path.write_bytes(lzma.compress(f"2.12.1 2.14.0\n{{}}\n{SPEC.model_dump_json()}".encode()))
    for one in ("2.12.1", "2.14.0"):
        assert read_shipped_specs(path, torch=one) == {"{}": SPEC.model_dump_json()}
    assert read_shipped_specs(path, torch="2.12.2") == {}
    assert read_shipped_specs(tmp_path / "none", torch="2.12.1") == {}
