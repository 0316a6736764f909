"""The README shows the example pipeline and the commands as they are."""

import re
from pathlib import Path

from penstock.cli import COMMANDS
from penstock.pipeline.load import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_pipeline_is_the_example() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert shown == (ROOT / "examples" / "people" / "pipeline.py").read_text()


def test_the_example_can_be_read() -> None:
    description = load(ROOT / "examples" / "people" / "pipeline.py")
    assert [query.name for query in description.queries] == ["people_by_country"]
    assert {store.channel for store in description.stores} == {"by_country", "rsvps"}


def test_the_commands_that_it_names_are_there() -> None:
    named = set(re.findall(r"^penstock (\w+)", README, flags=re.MULTILINE))
    assert named
    assert named <= set(COMMANDS)


def test_the_files_that_it_links_to_are_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
