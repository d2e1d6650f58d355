"""No file and no text takes more memory, stack or time than a small one may."""

import json
import os
import sys
from pathlib import Path

import pytest

from fullshard.errors import DamagedCheckpointError, SpecError
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import check_config_limits
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import MOST_LAYERS
from fullshard.system.small_files import check_nesting_depth, parse_json, parse_toml, read_bytes
from fullshard.weights.files import read_header
from tests.fakes.specs import Shape, decoder_spec


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_bytes(path, most_bytes=10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 B"):
        read_bytes(path, most_bytes=9)


def test_a_device_a_fifo_and_a_directory_are_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/zero"), tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_bytes(path, most_bytes=10)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"])
def test_a_path_that_no_file_has_is_an_error_of_the_system(name: str) -> None:
    with pytest.raises(OSError, match=r"such a name|too long"):
        read_bytes(name, most_bytes=10)


def test_json_that_is_nested_too_deep_or_has_too_many_digits_is_no_json() -> None:
    for text in ("[" * 100_000, "[" * 101 + "]" * 101, "1" * 5000, '"\\ud800"', b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011  # of five kinds
            parse_json(text)
    assert parse_json("[" * 99 + "]" * 99)
    assert parse_json(b'\xef\xbb\xbf"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


def test_toml_that_is_nested_too_deep_or_has_too_many_digits_is_no_toml() -> None:
    large = ("0x" + "f" * 5000, "1" * 5000, str(2**63), str(-(2**63) - 1))
    keys = (
        "a." * 500_000 + "b = 1",
        f"x = {{{'.'.join(['a'] * 101)} = 1}}",
        '["\\""' + " . '='" * 100_000 + "]",
    )
    for text in ("a = " + "[" * 5000, *keys, *(f"a.b = [{one}]" for one in large)):
        with pytest.raises(ValueError, match=r"deep|(it has|a\.b is) an integer of more than 64 bits"):
            parse_toml(text)
    assert parse_toml(f"a = {2**63 - 1}") == {"a": 2**63 - 1}
    assert parse_toml("\ufeffa = 1") == {"a": 1}  # Windows' mark of UTF-8


def test_values_that_refer_to_one_another_are_not_counted_out() -> None:
    value: list[object] = ["x"]
    for _ in range(50):
        value = [value, value]
    with pytest.raises(ValueError, match="more values than it has characters"):
        check_nesting_depth(value, most_per_level=1000)


@pytest.mark.parametrize(
    "setting",
    [
        "run.seed=100000000000000000000000",
        "run.seed=" + "1" * 5000,
        "run.seed=" + "[" * 5000,
        "run.ranks=1000000000",
        "fault_tolerance.watchdog_timeout_seconds=1e300",
        "optimizer.eps=1e300",
        "model.layers=1000000000",
        "model.vocabulary=10_000_000_000",
        "train.steps=10_000_000_000",
        "run.dir=" + "a" * 300,
        "run.dir=" + "a/" * 2100,
        'data.paths=["a\0b"]',
        'model.hf="a\\u0000b"',
        "optimizer.options." + "a." * 500 + "b=1",
    ],
    ids=lambda setting: setting[:40],
)
def test_a_run_has_numbers_and_names_that_a_machine_can_have(setting: str) -> None:
    with pytest.raises(SpecError) as raised:
        Run.load(overrides=[setting])
    assert setting.partition(".")[0] in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_message_shows_a_long_value_in_short_and_one_that_cannot_be_shown_by_its_type() -> None:
    deep: list[object] = []
    for _ in range(5 * sys.getrecursionlimit()):
        deep = [deep]
    for value, shown in (
        ("x" * 10_000, "… (10,002 characters)"),
        (10**6000, "type int"),
        (deep, "type list"),
    ):
        with pytest.raises(SpecError, match="train.steps") as raised:
            Run.parse({"train": {"steps": value}}, source="it")
        assert shown in str(raised.value)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", "1" * 5000, '{"world_size": 1' + "0" * 30 + "}", "\xff"]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="not a saved plan"):
        Plan.load(path)


def test_a_config_has_no_number_that_no_model_has() -> None:
    check_config_limits(
        {"num_hidden_layers": MOST_LAYERS, "vocab_size": 2**63 - 1, "rope_theta": 1e300, "n_ctx": 2**30},
        source="it",
    )
    for config, name in (
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"text_config": {"n_layer": 10**9}}, "text_config.n_layer"),
        ({"depths": [2, 10**9]}, "depths"),
        ({"num_local_experts": 10**8}, "num_local_experts"),
        ({"text_config": {"moe_num_experts": [10**8]}}, "text_config.moe_num_experts"),
        ({"num_labels": 10**8}, "num_labels"),
        ({"n_head": 10**8}, "n_head"),
        ({"max_position_embeddings": 10**10}, "max_position_embeddings"),
        ({"x": 10**5000}, "x"),
    ):
        with pytest.raises(SpecError, match=f"it: {name} is too large"):
            check_config_limits(config, source="it")


def test_a_saved_spec_repeats_no_block_a_billion_times(tmp_path: Path) -> None:
    tree = json.loads(decoder_spec(Shape(layers=4)).model_dump_json())
    tree["traces"][0]["repeats"] = [{"first": 1, "units": 1, "times": 10**9}]
    (tmp_path / "spec.json").write_text(json.dumps(tree))
    with pytest.raises(SpecError, match=r"times.* 65536"):
        ModelSpec.load(tmp_path / "spec.json")


def test_a_header_of_weights_has_a_largest_size(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(1 << 40)
    with pytest.raises(DamagedCheckpointError, match="a header of 1,073,741,824 bytes"):
        read_header(tmp_path / "model.safetensors")
