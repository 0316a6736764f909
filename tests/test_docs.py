"""The documentation is complete, its links work, and its reference is generated from the code."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = [
    "README.md",
    "CONTRIBUTING.md",
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/*.md")),
]
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_reference_is_generated_from_the_code() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, text in generate.pages().items():
        assert (DOCS / "reference" / name).read_text() == text.rstrip() + "\n", "run `make docs`"


def test_the_site_has_every_page_once() -> None:
    nav = re.findall(r"[\w/-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == PAGES


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES), *OUTSIDE])
def test_links_have_a_target(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), f"{page} links to {link}"
        if anchor:
            assert anchor in anchors(file), f"{page} links to {link}"


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
