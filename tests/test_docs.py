"""The documentation is complete, its links work, and its reference is generated from the code."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from penstock.cli import app
from penstock.collect.registry import source_at
from penstock.pipeline.config import SECTIONS

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


def test_the_rules_for_prometheus_use_metrics_that_exist() -> None:
    rules = yaml.safe_load((DOCS / "prometheus-rules.yml").read_text())["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"penstock_\w+", rule["expr"])}
    documented = set(re.findall(r"`(penstock_\w+)`", (DOCS / "metrics.md").read_text()))
    assert {re.sub(r"_(sum|count)$", "", name) for name in used} <= documented


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


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES if not page.startswith("reference/")), *OUTSIDE])
def test_python_examples_parse_and_import_what_exists(page: str) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == [], page


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES if not page.startswith("reference/")), *OUTSIDE])
def test_commands_and_their_options_exist(page: str) -> None:
    root: Any = typer.main.get_command(app)
    for line in commands(page):
        command, words = root, shlex.split(line, comments=True)[1:]
        context = typer.Context(root)
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, f"{page}: {line}"
            context = typer.Context(command, parent=context)
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert given <= known, f"{page}: {line}"


def test_options_in_the_text_exist() -> None:
    known = set(options(typer.Context(typer.main.get_command(app))))
    for page in PAGES:
        text = (DOCS / page).read_text() if not page.startswith("reference/") else ""
        named = set(re.findall(r"[`(, ](--[a-z][a-z-]+)[^`\n]*`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        assert named <= known, page


def test_settings_in_the_tables_exist() -> None:
    text, section = (DOCS / "settings.md").read_text(), ""
    rows = re.findall(r"^\| (?:`\[(\w+)\]`)? ?\| (`[^|]*`) \|", text, flags=re.MULTILINE)
    assert rows
    for name, keys in rows:
        section = name or section
        known = SECTIONS[section].model_fields
        assert [key for key in re.findall(r"`(\w+)`", keys) if key not in known] == [], section
    for page, name in [("alarms", "audit"), ("gateway", "gateway"), ("deliver", "page")]:
        table = (DOCS / f"{page}.md").read_text().partition("## Settings")[2]
        listed = {
            key
            for row in re.findall(r"^\| (`[^|]*`) \|", table, flags=re.MULTILINE)
            for key in re.findall(r"`(\w+)`", row)
        }
        every = set(SECTIONS[name].model_fields)
        assert listed & every == every - {"host", "port"}, page


@pytest.mark.parametrize(
    ("page", "address"),
    [
        ("websocket", "ws://h/p"), ("websocket-server", "listen+ws://h:1/p"), ("sse", "sse+http://h/p"),
        ("polling", "poll+http://h/p"), ("http", "listen+http://h:1/p"), ("tcp", "listen+tcp://h:1"),
        ("webhook", "listen+webhook://h:1/p"), ("files", "file:///p"), ("stdin", "stdin://"),
    ],
)  # fmt: skip
def test_the_page_of_a_source_lists_its_options(page: str, address: str) -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (DOCS / "sources" / f"{page}.md").read_text(), flags=re.MULTILINE)
    listed = {option.strip("`") for row in rows for option in row.split(", ")}
    options = {"secret": "secret"} if page == "webhook" else {}
    known = set(inspect.signature(type(source_at(address, "source", options))).parameters)
    assert listed == known - {"url", "name", "clock", "shared", "context", "stream"}, page


def test_the_functions_of_the_architecture_exist() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE
    )
    assert rows
    for name, file in rows:
        value: Any = importlib.import_module(f"penstock.{file.removesuffix('.py').replace('/', '.')}")
        for part in name.split("."):
            value = getattr(value, part, None)
        assert value is not None, f"{name} in {file}"


def options(context: typer.Context) -> Iterator[str]:
    """The options of a command, and of all its commands."""
    command: Any = context.command
    for parameter in command.get_params(context):
        yield from parameter.opts
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from options(typer.Context(command.get_command(context, name), parent=context))


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    found = re.findall(rf"^```{language}[^\n]*\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [str(code) for code in found]


def commands(page: str) -> Iterator[str]:
    """Each `penstock …` of a page, up to a pipe or a placeholder."""
    text = (ROOT / page).read_text()
    lines = [line for block in blocks(page, "(?:console)?") for line in block.splitlines()]
    for line in [*lines, *re.findall(r"`(penstock [^`]+)`", text)]:
        for one in re.findall(r"^(?:\$ )?(penstock [^|…<>\[&]*)", line.strip()):
            if one.count('"') % 2 == 0 and one.count("'") % 2 == 0 and not one.startswith("penstock: "):
                yield one


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
