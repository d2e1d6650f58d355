"""The docs site and llms.txt list every page. `make docs` checks their links."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}


def test_each_page_of_the_docs_is_in_the_navigation_and_in_llms_txt() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = [
        page for section in sections for pages in section.values() for one in pages for page in one.values()
    ]
    named = re.findall(r"\]\(([^)]*)\): \S", (ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(shown)
    assert set(shown) >= PAGES
