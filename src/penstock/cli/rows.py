"""From a row of a result to a line of text. No I/O, but for the width of the terminal."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
from rich.cells import cell_len, set_cell_size

from penstock.analysis.interactive import exactly
from penstock.core.text import printable


@dataclass(frozen=True)
class Shown:
    """How rows are shown: as they come, in JSON; or for people, within the width of their terminal."""

    as_json: bool = False
    terminal: bool = False

    def line(self, row: str, keys: Sequence[str] = ()) -> bytes:
        """A row, which comes as a JSON object, with its end of line."""
        if self.as_json:
            return row.encode() + b"\n"
        text = told(exactly(row), keys)
        if self.terminal and cell_len(text) > (width := shutil.get_terminal_size().columns):
            text = set_cell_size(text, max(1, width - 1)) + "…"
        return text.encode() + b"\n"


def told(row: Mapping[str, object], keys: Sequence[str]) -> str:
    """`city=Oslo, n=3`; of an aggregation the values by which it groups in front: `Oslo → n=3`."""
    rest = ", ".join(f"{printable(name)}={_value(value)}" for name, value in row.items() if name not in keys)
    if not keys:
        return rest
    return f"{', '.join(_value(row[name]) for name in keys)} → {rest}"


def _value(value: object) -> str:
    match value:
        case str():
            return printable(_moment(value))
        case {"start": str(start), "end": str(end), **more} if not more:
            return f"{printable(_moment(start))} – {printable(_moment(end))}"
        case None | bool() | dict() | list():
            return printable(orjson.dumps(value).decode())
    return str(value)


def _moment(text: str) -> str:
    """Times end in whole seconds more often than not."""
    return text.replace(".000Z", "Z")
