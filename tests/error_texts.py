"""The texts of all errors that Penstock raises, from its source. `python -m tests.error_texts` writes errors.txt."""

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

GOLDEN = Path(__file__).with_name("errors.txt")
_SRC = Path(penstock.__file__).parent
_FAMILIES = ("Misconfigured", "Unavailable", "Refused", "Unaccounted")


def texts() -> str:
    """One line for each place that makes an error: its module, its family and the templates of its facts."""
    found = [line for path in sorted(_SRC.rglob("*.py")) for line in sorted(set(_errors(path)))]
    return "".join(f"{line}\n" for line in found)


def _errors(path: Path) -> Iterator[str]:
    module = path.relative_to(_SRC).with_suffix("").as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FAMILIES:
            facts = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield f"{module}: {node.func.id}: {' | '.join(map(_template, facts))}"


def _template(fact: ast.expr) -> str:
    """A literal text with its variable parts in braces; the expression itself where it is not a literal."""
    if isinstance(fact, ast.Constant):
        return str(fact.value).replace("\n", "\\n")
    if isinstance(fact, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in fact.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ).replace("\n", "\\n")
    return f"{{{ast.unparse(fact)}}}"


if __name__ == "__main__":
    GOLDEN.write_text(texts())
