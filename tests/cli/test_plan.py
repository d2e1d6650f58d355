"""`fullshard plan`, of a preset whose spec is shipped."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.errors import PlanError, SpecError
from fullshard.spec.plan import Plan
from tests.fakes.architectures_hf import write_config

PRESET = "smollm2-135m"  # whose spec is shipped


def planned(capsys: Any, *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_page_fits_a_hundred_columns(capsys: Any) -> None:
    assert main(["plan", PRESET, "--on", "8xH100", "--compare", "--budget", "15T"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    labels = {line.split("  ")[0].strip() for line in lines}
    assert lines[0].startswith("plan  ")
    assert "; 15.0T tokens in " in lines[0]
    assert {"model", "hardware", "strategy", "memory", "step", "speed", "MFU", "15.0T tokens"} <= labels
    assert sum(line.endswith("chosen") for line in lines) == 1


def test_a_run_that_counts_epochs_is_planned(capsys: Any) -> None:
    data = planned(capsys, PRESET, "--on", "2xH100", "--set", "train.epochs=2")
    assert data["best"]["run"]["train"]["epochs"] == 2  # type: ignore[index]


def test_the_degree_of_a_hybrid_strategy_is_planned(capsys: Any) -> None:
    arguments = ["llama3-8b", "--on", "2x8xH100", "--set", "sharding.strategy=hybrid_shard"]
    assert main(["plan", *arguments]) == 0
    assert "hybrid_shard over 8 ranks, in 2 replicas" in capsys.readouterr().out


def test_a_run_of_a_model_of_its_own_without_data_is_not_planned(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.toml").write_text(f'[model]\nhf = "{write_config("llama", tmp_path)}"\n')
    assert main(["plan", str(tmp_path / "run.toml"), "--on", "2xH100"]) == SpecError.exit_code
    assert "the run has no data" in capsys.readouterr().err


def test_the_number_of_ranks_overrides_that_of_the_hardware(capsys: Any) -> None:
    for arguments in (["--ranks", "4"], ["--set", "run.ranks=4"]):
        data = planned(capsys, PRESET, "--on", "8xH100", *arguments)
        assert data["hardware"]["ranks"] == 4  # type: ignore[index]


def test_saved_plan_equals_the_printed_one(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "plan.json"
    data = planned(capsys, PRESET, "--on", "8xH100", "--save", str(path))
    assert Plan.load(path).model_dump(mode="json") == data["best"]
    assert Plan.load(path).prediction is not None


# A model that cannot be built, so that errors before its trace alone name the batch.
UNTRACEABLE = ("--set", "model.python=absent:Model", "--set", "data.source=python")
UNTRACEABLE = (*UNTRACEABLE, "--set", "data.factory=absent:batches", "--set", "run.ranks=2")
UNDIVIDED = ("--set", "sharding.tensor_parallel=1", "--set", "sharding.context_parallel=1")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["lama3-8b"], SpecError, "llama3-8b"),
        ([PRESET, "--on", "8xH1000"], SpecError, "H100"),
        ([PRESET, "--on", "8xH100", "--ranks", "12"], SpecError, "a multiple of 8"),
        ([PRESET, "--on", "8xH100", "--fewest-gpus-in-days", "2"], SpecError, "--budget 15T"),
        ([PRESET, "--on", "8xH100", "--budget", "lots"], SpecError, "not a count"),
        (
            [PRESET, "--set", "run.device=cpu", "--budget", "1B", "--fewest-gpus-in-days", "2"],
            SpecError,
            "counts GPUs",
        ),
        ([PRESET, "--on", "8xH100", "--tokens-per-step", "100"], PlanError, "too few for 8 ranks"),
        ([PRESET, "--on", "8xH100", "--save", "absent/plan.json"], SpecError, "cannot be written"),
        ([PRESET, "--on", "8xH100", "--set", "train.globl_batch=8"], SpecError, "train.global_batch"),
        (["--set", "run.ranks=2", "--set", "sharding.tensor_parallel=8"], PlanError, "one of [1, 2]"),
        (
            [*UNTRACEABLE, *UNDIVIDED, "--set", "train.global_batch=3"],
            PlanError,
            "train.global_batch = 2 or 4",
        ),
        ([PRESET, "--set", "data.sequence_length=1_000_000"], SpecError, "combination of settings"),
        ([PRESET, "--machines", "8xH100", "--compare"], SpecError, "does not go with --compare"),
        ([PRESET, "--machines", "8xH100", "--on", "8xH100"], SpecError, "does not go with --on"),
        ([PRESET, "--machines", "8xH101"], SpecError, "not a chip of the catalog"),
    ],
)
def test_mistakes_have_a_remedy(arguments: list[str], error: type[SpecError], said: str, capsys: Any) -> None:
    capsys.readouterr()
    assert main(["plan", *arguments]) == error.exit_code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_reason_and_other_strategies_are_printed(capsys: Any) -> None:
    assert main(["plan", PRESET, "--on", "2xH100", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "\nwhy " in out
    assert "kernels take " in out
    data = planned(capsys, PRESET, "--on", "2xH100")
    assert {"binds", "lever"} <= set(data["why"])  # type: ignore[call-overload]


def test_machines_are_rows_with_ranks_and_prices(capsys: Any) -> None:
    asked = ["--machines", "2xH100@3, 2x8xA100", "--budget", "1B"]
    rows = planned(capsys, PRESET, *asked)["machines"]
    assert [row["ranks"] for row in rows] == [2, 16]  # type: ignore[attr-defined]
    first, second = (row["budget"] for row in rows)  # type: ignore[attr-defined]
    assert first["dollars"] == pytest.approx(3 * first["rank_hours"])
    assert second["dollars"] is None


def test_a_price_alone_is_dollars_for_a_billion_tokens(capsys: Any) -> None:
    spent = planned(capsys, PRESET, "--on", "8xH100", "--price", "2")["budget"]
    assert spent["dollars_per_hour"] == 16  # type: ignore[index]
    rows = planned(capsys, PRESET, "--machines", "8xH100@2, 4xH100@3")["machines"]
    each = [row["budget"]["dollars_per_billion_tokens"] for row in rows]  # type: ignore[attr-defined]
    assert each[0] == pytest.approx(spent["dollars_per_billion_tokens"])  # type: ignore[index]
    assert main(["plan", PRESET, "--machines", "8xH100@2, 4xH100"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "$ per 1B" in table[2]
    assert table[3].endswith(f"{each[0]:.2f}")
    assert table[4].endswith(" -")


def test_the_fewest_gpus_are_planned_and_named_in_the_first_line(capsys: Any) -> None:
    asked = [PRESET, "--on", "8xH100", "--tokens-per-step", "1M", "--set", "run.compile=false"]
    asked += ["--budget", "100B", "--fewest-gpus-in-days", "2"]
    assert main(["plan", *asked]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    found = re.match(r"plan +fewest for 2 days: (\d+) GPUs?; fits; .* tokens in (.*)", first)
    assert found is not None, first
    assert int(found[1]) in (1, 2, 4, 8)


def test_presets_and_chips_are_listed(capsys: Any) -> None:
    assert main(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("llama3-8b ", "mixtral-8x7b ", "qwen3-30b-a3b ", "gpt-oss-120b ", "deepseek-v3 ", "8xh100 "):
        assert f"\n{name}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_drive_has_the_rate_of_a_hardware_file(capsys: Any, tmp_path: Path) -> None:
    pins = ("offload.tier=optimizer:nvme", "sharding.strategy=full_shard", "train.global_batch=2")
    settings = [part for pin in pins for part in ("--set", pin)]
    assert main(["plan", PRESET, "--on", "2xH100", *settings]) == 3
    assert "disk_bytes_per_second" in capsys.readouterr().err
    hardware = tmp_path / "hardware.toml"

    def planned_with_rate(rate: str) -> dict[str, object]:
        hardware.write_text(f'chip = "H100"\nranks_per_node = 2\ndisk_bytes_per_second = {rate}\n')
        return planned(capsys, PRESET, "--on", str(hardware), *settings)

    slow, fast = map(planned_with_rate, ("1e6", "2e6"))
    seconds = [
        Plan.parse(one["best"], source="--json").prediction.offload.disk_seconds  # type: ignore[arg-type,union-attr]
        for one in (slow, fast)
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=1e-4)  # type: ignore[operator]


def test_a_saved_plan_replaces_plans_alone(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("years of work")
    arguments = ["plan", PRESET, "--on", "2xH100", "--save", str(target)]
    assert main(arguments) == SpecError.exit_code
    assert target.read_text() == "years of work"
    assert main([*arguments, "--force"]) == 0
    assert main(arguments) == 0
