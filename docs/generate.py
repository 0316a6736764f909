"""Write docs/reference/ from the code: the API, the settings and the commands. Run it with `make docs`."""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

import penstock
from penstock.cli import COMMANDS, app
from penstock.pipeline.config import SECTIONS

FOLDER = Path(__file__).parent / "reference"
HEAD = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"


def pages() -> dict[str, str]:
    """Each page by its file name."""
    return {
        "api.md": HEAD + "# API\n\nAll names are imported from `penstock`.\n\n" + "\n".join(_api()),
        "settings.md": HEAD + "# Settings\n\n" + "\n".join(_settings()),
        "commands.md": HEAD + "# Commands\n\n" + "\n".join(_commands()),
    }


def _api() -> Iterator[str]:
    for name in sorted(penstock.__all__, key=str.lower):
        value = getattr(penstock, name)
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("penstock"):
            yield f"## {name}\n"
            yield from _documented(name, value)
            for attribute, member in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(member) and not attribute.startswith("_") and inspect.getdoc(member):
                    yield f"### {name}.{attribute}\n"
                    yield from _documented(attribute, member)


def _documented(name: str, value: Any) -> Iterator[str]:
    with suppress(ValueError):  # exceptions have no signature
        # A function that is a default value has an address, which differs in each process.
        signature = re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.signature(value)))
        yield f"```python\n{name}{signature}\n```\n"
    yield (inspect.getdoc(value) or "") + "\n"


def _settings() -> Iterator[str]:
    yield "In `penstock.toml` beside the pipeline, or as an environment variable: `PENSTOCK_SECTION_KEY`.\n"
    for name, section in SECTIONS.items():
        yield f"## [{name}]\n"
        yield f"{inspect.cleandoc(vars(section).get('__doc__') or '')}\n"
        if section.model_fields:
            yield "| key | default | |\n|---|---|---|"
            for key, field in section.model_fields.items():
                default = field.get_default(call_default_factory=True)
                shown = f"`{default}`" if default or default == 0 else ""
                yield f"| `{key}` | {shown} | {field.description or ''} |"
        yield ""


def _commands() -> Iterator[str]:
    root: Any = typer.main.get_command(app)
    context = typer.Context(root, info_name="penstock")
    for name in COMMANDS:
        command = root.get_command(context, name)
        yield from _command(command, typer.Context(command, info_name=name, parent=context))


def _command(command: Any, context: typer.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n\n{inspect.cleandoc(command.help or '')}\n"
    rows = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    rows = [row for row in rows if row[0] != "--help"]
    if rows:
        yield "| option | |\n|---|---|"
        yield from (f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows)
        yield ""
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        yield from _command(inner, typer.Context(inner, info_name=name, parent=context))


def _cell(text: str) -> str:
    """A text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
