"""Each recipe is planned, and recipes/README.md shows what is printed."""

import math
import os
import re
from typing import Any

import pytest
import torch
from recipes.images_with_text import ImagesWithText

import fullshard as fs
from bench.recipe_plans import PAGE, RECIPES, Recipe, plan_lines, section, shown_sections
from fullshard.cli.main import main
from fullshard.models.build import build_model
from fullshard.planner.describe.describe_run import SHIPPED_FILE, read_shipped_specs, version_without_build
from fullshard.spec.run import Run
from tests.command_line import parse_arguments

# Of presets, whose specs come with the package. Other models are traced, for up to minutes.
QUICK = {"hsdp", "offload-24gb", "pretrain-1b"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(one, id=one.name, marks=[] if one.name in QUICK else [pytest.mark.long])
        for one in RECIPES
    ],
)
def test_the_page_shows_the_plan_of_the_recipe(recipe: Recipe) -> None:
    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(torch.__version__)):
        pytest.skip("the page was written with another torch")
    assert shown_sections()[recipe.name] == section(recipe, plan_lines(recipe)), (
        "python bench/recipe_plans.py"
    )


def test_the_readme_shows_lines_of_the_plan_of_8b(capsys: pytest.CaptureFixture[str]) -> None:
    page = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\$ fullshard (plan llama3-8b --on 8xH100)\n(.+?)^```", page, re.M | re.S)
    assert main(shown[0].split()) == 0
    expected = [line for line in shown[1].splitlines() if line != "…"]
    assert [line for line in capsys.readouterr().out.splitlines() if line in expected] == expected


def test_the_page_has_a_section_for_each_recipe_and_its_comment() -> None:
    sections = shown_sections()
    assert list(sections) == [one.name for one in RECIPES]
    assert len(RECIPES) >= 16
    for one in RECIPES:
        for command in one.commands:
            assert f"\n$ {command}\n" in sections[one.name]
        assert one.title in sections[one.name]
        assert one.source in sections[one.name].translate({ord(mark): "" for mark in "<>"})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.name)
def test_the_file_of_a_recipe_is_valid_and_its_commands_parse(recipe: Recipe) -> None:
    run = Run.load(recipe.path)
    assert run.run.dir == f"runs/{recipe.name}"
    assert run.precision.mode in ("bf16", "fp8")
    for command in recipe.commands:
        name, *arguments = command.partition("    ")[0].split()
        if name == "fullshard":
            parse_arguments(arguments)
        else:
            assert name == "sbatch"


TINY = "hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2"
TINY_PALIGEMMA = [
    "model.options={projection_dim=32, "
    f"text_config={{{TINY}, head_dim=16}}, vision_config={{{TINY}, projection_dim=32}}}}",
    "train.microbatch=2",
    "precision.mode=fp32",
]


def loss_of_made_up_images() -> float:
    os.chdir(PAGE.parents[1])  # where the recipe finds its config
    run = Run.load(PAGE.parent / "vision-language.toml", overrides=TINY_PALIGEMMA)
    plan = fs.Plan.from_run(run, world_size=1, device="cpu")
    model = fs.shard(build_model(run), plan)
    loss = model(**next(ImagesWithText(run).microbatches(0, rank=0, plan=plan))).loss
    loss.backward()
    return loss.item()


@pytest.mark.long
def test_the_made_up_images_are_what_the_vision_language_model_takes(ranks: Any) -> None:
    (loss,) = ranks(1).run(loss_of_made_up_images)
    assert math.isfinite(loss)
