"""Dead letters on a terminal. What would move the cursor or colour the screen is spelled out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import typer
from rich.table import Table

from penstock.cli.console import console
from penstock.core.clock import Micros
from penstock.core.record import Origin
from penstock.core.text import printable
from penstock.pipeline.letters import Letter, Tally
from penstock.pipeline.redrive import Outcome, Verdict

SHOWN_BYTES = 4096
"""So much of a value is shown."""
NAMED = 50
"""So many letters are named; then it is said how many more there are."""


def show_reasons(found: Mapping[str, Sequence[Tally]], most: int) -> None:
    """A table of the reasons in each channel; a channel without letters has a row, too."""
    table = Table("channel", "letters", "came back", "first (UTC)", "last (UTC)", "reason")
    for column in table.columns[1:3]:
        column.justify = "right"
    rows = 0
    for channel, tallies in found.items():
        for one in tallies[: max(most - rows, 0)]:
            back = f"{one.came_back:,}" if one.came_back else ""
            table.add_row(channel, f"{one.count:,}", back, _when(one.first), _when(one.last), printable(one.reason))
        rows += len(tallies)
        if not tallies:
            table.add_row(channel, "0", "", "", "", "")
    console().print(table)
    if rows > most:
        typer.echo(f"and {rows - most:,} more; --most {rows} shows them all")


def show_each(newest: Sequence[Letter], total: int) -> None:
    """A table of letters, a row for each."""
    table = Table("letter", "refused (UTC)", "sender/epoch: number", "bytes", "record", "reason")
    table.columns[3].justify = "right"
    for letter in newest:
        back = "came back: " if letter.came_back else ""
        table.add_row(
            letter.at,
            _when(letter.entry.appended),
            _who(letter.origin),
            f"{letter.size:,}",
            printable(letter.place or ""),
            back + printable(letter.reason),
        )
    console().print(table)
    if total > len(newest):
        typer.echo(f"these are the newest of {total:,} letters; --most {total} shows them all")


def letter_lines(letter: Letter) -> Iterator[str]:
    """All that is known of one letter; of its value, the beginning."""
    origin, entry = letter.origin, letter.entry
    yield f"letter:   {letter.at}"
    yield f"reason:   {printable(letter.reason)}"
    yield f"refused:  {_when(entry.appended)} UTC"
    yield f"record:   {printable(letter.place) if letter.place else 'it never came into its channel'}"
    yield f"origin:   {f'{_who(origin)}, sent {_when(origin.time)} UTC' if origin else 'it carries no identity'}"
    if letter.came_back:
        yield "redriven: once, and refused again"
    yield f"key:      {'none' if entry.key is None else _brief(entry.key)}"
    yield "headers:"
    for name, value in entry.headers:
        yield f"  {printable(name)}: {_brief(value)}"
    if letter.value is None:
        yield "value:    null"
        return
    kept = f", of which {len(letter.value):,} were kept" if letter.cut else ""
    yield f"value:    {letter.size:,} bytes{kept}"
    yield from _lines(letter.value)
    if len(letter.value) > SHOWN_BYTES:
        yield f"these are the first {SHOWN_BYTES:,} bytes; --raw writes them all"


def _lines(value: bytes) -> Iterator[str]:
    shown = value[:SHOWN_BYTES]
    try:
        value.decode()
    except UnicodeDecodeError:
        for at in range(0, len(shown), 16):
            row = shown[at : at + 16]
            text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
            yield f"  {at:08x}  {row.hex(' '):47}  {text}"
    else:
        # Only a character that the cut went through is left out.
        yield from (f"  {printable(line)}" for line in shown.decode(errors="ignore").split("\n") if shown)


def _brief(value: bytes) -> str:
    more = f" … ({len(value):,} bytes)" if len(value) > SHOWN_BYTES else ""
    return printable(value[:SHOWN_BYTES].decode(errors="backslashreplace")) + more


def redrive_lines(into: str, dry: bool, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What became of the letters: first those that are named, which would be sent or are not; then the sum."""
    named = [one for one in outcomes if one.verdict is not Verdict.BEFORE and (dry or one.verdict is not Verdict.SENT)]
    for one in named[:NAMED]:
        who = f"{one.letter} ({_who(one.origin)})"
        yield f"{who} would be sent" if one.verdict is Verdict.SENT else f"{who} is not sent: {printable(one.why)}"
    if len(named) > NAMED:
        yield f"and {len(named) - NAMED:,} more; --json names them all"
    counts = Counter(one.verdict for one in outcomes)
    skipped = len(outcomes) - counts[Verdict.SENT]
    why = ", ".join(f"{counts[verdict]:,} {words}" for verdict, words in _SKIPPED.items() if counts[verdict])
    done = "would be sent" if dry else "sent"
    yield f"{into}: {counts[Verdict.SENT]:,} {done}, {skipped:,} skipped{f': {why}' if why else ''}"


_SKIPPED = {
    Verdict.BEFORE: "redriven before",
    Verdict.BACK: "came back",
    Verdict.LATE: "too late for a query",
    Verdict.EXCLUDED: "excluded by a query that fails with it",
    Verdict.CUT: "kept only in part",
    Verdict.FAILED: "not taken by the channel",
}


def _who(origin: Origin | None) -> str:
    return f"{printable(origin.sender)}/{origin.epoch}: {origin.seq}" if origin else "no identity"


def _when(at: Micros) -> str:
    if at <= 0:
        return "at no told time"
    try:
        return datetime.fromtimestamp(at // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{at} µs"
