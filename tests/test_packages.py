"""The import table of docs/architecture.md is true."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

SRC = Path(penstock.__file__).parent
CORE = {"core"}
TIERS = {"collect", "channels", "analysis", "stores", "deliver"}
BASE = CORE | {"audit"}
RUNNING = {"pipeline", "plan", "run", "operate"}
MAY_IMPORT = {
    "core": set(),
    "audit": CORE,
    "simulate": CORE,
    "web": CORE,
    **dict.fromkeys(TIERS, BASE),
    "collect": BASE | {"web"},
    "deliver": BASE | {"web"},
    "supervise": CORE,
    "pipeline": BASE | TIERS | {"gateway", "supervise"},
    "plan": BASE | TIERS | {"supervise", "simulate", "pipeline"},
    "run": BASE | TIERS | {"web", "gateway", "supervise", "simulate", "pipeline", "plan"},
    "operate": BASE | TIERS | {"supervise", "pipeline", "run"},
    "push": CORE | {"collect", "channels", "web"},
    "testing": BASE | {"collect", "channels", "analysis", "pipeline", "supervise"},
    "demo": {"penstock"},
    "sources": {"collect"},
    "gateway": BASE | {"web"},
    "cli": BASE
    | TIERS
    | {"web", "gateway", "supervise", "simulate", "pipeline", "plan", "run", "operate", "push", "testing", "demo"},
    "penstock": {"sources", "pipeline", "analysis", "collect", "channels", "core", "cli"},
}
STANDS_ALONE = {"pyspark": {"analysis"}, "py4j": {"analysis"}}


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def package_of(path: Path) -> str:
    first = path.relative_to(SRC).parts[0].removesuffix(".py")
    return "penstock" if first in {"__init__", "__main__"} else first


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import from the module that defines the thing, not relatively"
            if node.module == "penstock":
                yield from (
                    f"penstock.{name.name}" if (SRC / name.name).exists() else "penstock" for name in node.names
                )
            else:
                yield node.module or ""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_a_package_imports_only_what_the_table_allows(path: Path) -> None:
    package = package_of(path)
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "penstock":
            target = rest[0] if rest else "penstock"
            assert target == package or target in MAY_IMPORT[package], f"{package} imports {name}"
        elif top in STANDS_ALONE:
            assert package in STANDS_ALONE[top] | {"demo", "testing"}, f"{package} imports {name}"


def test_every_package_is_in_the_table() -> None:
    assert {package_of(path) for path in modules()} <= set(MAY_IMPORT)
