"""Writes recipes/README.md from the comments of recipes/*.toml and from what `fullshard plan` prints.

python bench/recipe_plans.py              all recipes; models without a shipped spec are traced for minutes
python bench/recipe_plans.py fp8 lora     these alone; the others keep their sections

tests/test_recipes.py compares the page with the plans.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from fullshard.cli.main import main as fullshard

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "recipes" / "README.md"
SHOWN_LINES = 14
HEAD = """# Recipes

Runs to start from. Copy a file, set its paths, and begin with its plan:

```console
$ fullshard plan recipes/one-node.toml --on 8xH100         # fits, how long, and why; needs no GPU
$ fullshard check recipes/one-node.toml                    # on the machine that will run it
$ fullshard train recipes/one-node.toml
```

Paths of data and tokenizers are examples. A recipe pins what its source gives, and leaves open what the
planner decides. None of them was trained to its end here. The plans below are what the first command of each
file prints, written by `python bench/recipe_plans.py`.

Scripts that start a run on a cluster: [deploy](../deploy/README.md).

"""


@dataclass(frozen=True)
class Recipe:
    """The comment at the top of a run.toml: a title, commands, and the source of its values."""

    path: Path
    title: str
    commands: list[str]
    source: str

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        comment = path.read_text(encoding="utf-8").partition("\n\n")[0]
        title, commands, source = re.sub(r"^# ?", "", comment, flags=re.MULTILINE).split("\n\n")
        return cls(
            path, title, [line.strip() for line in commands.splitlines()], " ".join(source.splitlines())
        )

    @property
    def name(self) -> str:
        return self.path.stem


RECIPES = [Recipe.read(path) for path in sorted((ROOT / "recipes").glob("*.toml"))]


def plan_lines(recipe: Recipe) -> list[str]:
    """Returns the first lines that the recipe's first command prints. It is a `fullshard plan`."""
    arguments = shlex.split(recipe.commands[0].partition("    ")[0])
    before = Path.cwd()
    os.chdir(ROOT)  # recipes name files from there
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = fullshard(arguments[1:])
    finally:
        os.chdir(before)
    if code:
        raise SystemExit(f"{recipe.name}: exit code {code}")
    return out.getvalue().splitlines()[:SHOWN_LINES]


def section(recipe: Recipe, lines: list[str]) -> str:
    """Returns the page's section about a recipe."""
    commands = "\n".join(f"$ {command}" for command in recipe.commands)
    plan = "\n".join(lines)
    source = re.sub(r"(https://[^\s,;)]+[^\s,;).])", r"<\1>", recipe.source)
    return (
        f"## {recipe.name}\n\n[{recipe.path.name}]({recipe.path.name}): {recipe.title}\n\n"
        f"```console\n{commands}\n```\n\n```text\n{plan}\n…\n```\n\nSource: {source}\n"
    )


def shown_sections() -> dict[str, str]:
    """Returns the sections of the page as it is, by recipe."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part[3 : part.index("\n")]: part.rstrip("\n") + "\n" for part in parts}


def main(names: list[str]) -> None:
    chosen = [one for one in RECIPES if one.name in names or not names]
    sections = {one.name: section(one, plan_lines(one)) for one in chosen}
    sections = shown_sections() | sections
    table = "| recipe | what it is |\n|---|---|\n"
    table += "".join(f"| [{one.name}](#{one.name}) | {one.title} |\n" for one in RECIPES)
    page = HEAD + table + "\n" + "\n".join(sections[one.name] for one in RECIPES if one.name in sections)
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: {len(chosen)} plans")


if __name__ == "__main__":
    main(sys.argv[1:])
