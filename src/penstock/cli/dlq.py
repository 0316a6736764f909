"""`penstock dlq`: what channels refused; to list it, to look at it, and to send it once more."""

import base64
import heapq
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli.channels import found
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_time
from penstock.cli.standard import console
from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.core.text import did_you_mean, printable
from penstock.operate.dead_letters import DEAD, Letter, Outcome, Selection, Tally, Verdict, letter_at, letters, tallied
from penstock.operate.dead_letters import redrive as send_again

SHOWN_BYTES = 4096
"""So much of a value is shown."""
NAMED = 50
"""So many letters are named; then it is said how many more there are."""

Dead = Annotated[str, typer.Argument(help="The channel, with or without .dead.", show_default=False)]
Reason = Annotated[str, typer.Option(help="Only letters whose reason contains this.", show_default=False)]
Sender = Annotated[str | None, typer.Option(help="Only letters of this sender.", show_default=False)]
Since = Annotated[
    str | None, typer.Option(help="Only what was refused in this last time, such as 10m.", show_default=False)
]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def dlq() -> None:
    """List, show and redrive what channels have refused: their dead letters."""


@app.command("list")
def list_(
    channel: Annotated[str | None, typer.Argument(help="A channel; otherwise all.", show_default=False)] = None,
    each: Annotated[bool, typer.Option("--each", help="Show each letter, the newest last.")] = False,
    most: Annotated[int, typer.Option(min=1, help="Show at most so many reasons, or of the newest letters.")] = NAMED,
    reason: Reason = "",
    sender: Sender = None,
    since: Since = None,
    folder: Folder = Path(),
    profile: Profile = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Count the dead letters by their reasons, or show each of them."""
    channels, chosen = found(folder, profile, servers), Selection(reason, sender, _after(since))
    names = channels.names()
    wanted = [name for name in names if name.endswith(DEAD)] if channel is None else [_dead(channel, names)]
    if each:
        newest, total = _newest(chain.from_iterable(letters(channels, name, chosen) for name in wanted), most)
        if as_json:
            typer.echo(json.dumps({"matching": total, "letters": [letter.told for letter in newest]}))
        else:
            show_each(newest, total)
    else:
        counted = {name: tallied(letters(channels, name, chosen)) for name in wanted}
        if as_json:
            typer.echo(json.dumps({"channels": [_counts(name, tallies) for name, tallies in counted.items()]}))
        else:
            show_reasons(counted, most)


@app.command()
def show(
    channel: Dead,
    place: Annotated[
        str, typer.Argument(help="Where the letter lies, PARTITION:OFFSET; or where its record lay, CHANNEL:0:17.")
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Write the value and nothing else, byte by byte.")] = False,
    folder: Folder = Path(),
    profile: Profile = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: reason, origin, headers and value."""
    if raw and as_json:
        raise Misconfigured("--raw, --json", "both are given", "choose one of them")
    channels = found(folder, profile, servers)
    dead = _dead(channel, channels.names())
    letter = letter_at(channels, dead, _place(dead, place))
    if raw:
        typer.echo(letter.value or b"", nl=False)
    elif as_json:
        typer.echo(json.dumps({**letter.told, **_content(letter)}))
    else:
        for line in letter_lines(letter):
            typer.echo(line)


@app.command()
def redrive(
    channel: Dead,
    places: Annotated[
        list[str] | None, typer.Argument(help="PARTITION:OFFSET of each letter.", show_default=False)
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every letter of the channel.")] = False,
    reason: Reason = "",
    sender: Sender = None,
    since: Since = None,
    into: Annotated[str | None, typer.Option(help="Another channel to send them into.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be sent; send nothing.")] = False,
    folder: Folder = Path(),
    profile: Profile = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Send dead letters into their channel once more.

    They keep their identity. What was redriven before is not sent twice, and what came back is not sent again. Exits
    with 0 when all that was chosen is in the channel, 1 when something is not, 2 when the question was wrong.
    """
    selected = bool(places or reason or sender is not None or since)
    if selected == all_:
        problem = "this is everything and a selection, too" if all_ else "it is not said which letters"
        fix = "give PARTITION:OFFSET, --reason, --sender or --since; or --all for every letter"
        raise Misconfigured("dlq redrive", problem, fix)
    channels = found(folder, profile, servers)
    names = channels.names()
    dead = _dead(channel, names)
    # Into dead letters it would be a circle, and the pipeline's own channels hold no records.
    target = _known(into or dead.removesuffix(DEAD), [name for name in names if not _special(name)])
    chosen = Selection(reason, sender, _after(since), frozenset(_place(dead, place) for place in places or ()))
    outcomes = send_again(channels, dead, chosen, target, dry_run, channels.since)
    if as_json:
        typer.echo(json.dumps(_account(dead, target, dry_run, outcomes)))
    else:
        for line in redrive_lines(target, dry_run, outcomes):
            typer.echo(line)
    good = {Verdict.SENT, Verdict.BEFORE}
    raise typer.Exit(0 if all(outcome.verdict in good for outcome in outcomes) else 1)


# --- what is asked ----------------------------------------------------------------------------------------------------


def _dead(channel: str, names: Collection[str]) -> str:
    return _known(channel.removesuffix(DEAD) + DEAD, [name for name in names if name.endswith(DEAD)])


def _special(name: str) -> bool:
    return name.endswith(DEAD) or name.startswith("penstock.")


def _known(name: str, names: Collection[str]) -> str:
    if name in names:
        return name
    others = f"there are {', '.join(sorted(names))}" if names else "there is none of its kind"
    fix = did_you_mean(name, names, others)
    raise Misconfigured(f"channel {printable(name)}", "there is no such channel", fix)


def _place(channel: str, text: str) -> str:
    """A place in full. A bare one is that of a letter."""
    match = re.fullmatch(r"(?:([A-Za-z0-9._-]+):)?([0-9]{1,9}):([0-9]{1,18})", text)
    if match is None:
        raise Misconfigured(f'"{printable(text)}"', "this is no place", "write PARTITION:OFFSET, such as 0:17")
    return f"{match[1] or channel}:{int(match[2])}:{int(match[3])}"


def _after(since: str | None) -> Micros | None:
    return None if since is None else parse_time("--since", since)


# --- what is told -----------------------------------------------------------------------------------------------------


def _newest(found: Iterable[Letter], most: int) -> tuple[list[Letter], int]:
    """The newest letters, the newest last, and how many there are in all; no more than those are held."""
    total = 0

    def age(letter: Letter) -> tuple[Micros, str, int, int]:
        nonlocal total
        total += 1
        entry = letter.entry
        return entry.appended, entry.channel, entry.partition, entry.offset

    newest = heapq.nlargest(most, found, key=age)[::-1]
    return newest, total


def _counts(channel: str, tallies: Sequence[Tally]) -> dict[str, object]:
    count = sum(tally.count for tally in tallies)
    return {"channel": channel, "letters": count, "reasons": [asdict(tally) for tally in tallies]}


def _content(letter: Letter) -> dict[str, object]:
    return {
        "key": _coded(letter.entry.key),
        "value": _coded(letter.value),
        "headers": [{"name": name, "value": _coded(value)} for name, value in letter.entry.headers],
    }


def _coded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _account(channel: str, into: str, dry: bool, outcomes: Sequence[Outcome]) -> dict[str, object]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return {
        "channel": channel,
        "into": into,
        "dry_run": dry,
        "counts": {verdict: counts[verdict] for verdict in Verdict},
        "letters": [asdict(outcome) for outcome in outcomes],
    }


# --- dead letters as text ---------------------------------------------------------------------------------------------


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
    why = ", ".join(f"{counts[verdict]:,} {label}" for verdict, label in _SKIPPED.items() if counts[verdict])
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
