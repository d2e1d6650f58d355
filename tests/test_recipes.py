"""Each recipe is planned, and recipes/README.md shows what is printed."""

import re

import pytest

from bench.recipes import PAGE, RECIPES, Recipe, plan_lines, section, shown_sections
from fullshard.cli.main import main
from fullshard.spec.run import Run
from tests.test_deploy import check_fullshard

# Their models are presets, whose specs come with the package. The others are traced, for up to minutes.
SHIPPED = {
    "hsdp",
    "offload-24gb",
    "one-node",
    "pretrain-1b",
    "pretrain-70b",
    "pretrain-8b",
    "resume-elsewhere",
    "two-nodes-slurm",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(one, id=one.name, marks=[] if one.name in SHIPPED else [pytest.mark.long])
        for one in RECIPES
    ],
)
def test_the_page_shows_the_plan_of_the_recipe(recipe: Recipe) -> None:
    assert shown_sections()[recipe.name] == section(recipe, plan_lines(recipe)), "python bench/recipes.py"


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
        assert one.source[:40] in sections[one.name]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.name)
def test_the_file_of_a_recipe_is_valid_and_its_commands_parse(recipe: Recipe) -> None:
    run = Run.load(recipe.path)
    assert run.run.dir == f"runs/{recipe.name}"
    assert run.precision.mode in ("bf16", "fp8")
    for command in recipe.commands:
        name, *arguments = command.partition("    ")[0].split()
        if name == "fullshard":
            check_fullshard(arguments)
        else:
            assert name == "sbatch"
