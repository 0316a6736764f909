"""`penstock dlq`: list, show and redrive dead letters."""

import base64
import heapq
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

from penstock.audit.writers import INTERNAL
from penstock.cli.options import AsJson, Folder, Profile, Servers, find_channels, require_existing, time_option
from penstock.cli.standard import print_result, table
from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.core.text import printable
from penstock.operate.dead_letters import (
    DEAD,
    Letter,
    Outcome,
    ReasonCount,
    Selection,
    Verdict,
    count_reasons,
    dead_letters,
    letter_at,
)
from penstock.operate.dead_letters import redrive as send_again

PREVIEW_BYTES = 4096
"""The most bytes of a value that are shown."""
MAX_LISTED = 50
"""The most dead letters that are listed."""

Channel = Annotated[str, typer.Argument(help="The channel, with or without .dead.", show_default=False)]
Reason = Annotated[str, typer.Option(help="Only dead letters whose reason contains this text.", show_default=False)]
Sender = Annotated[str | None, typer.Option(help="Only dead letters of this sender.", show_default=False)]
Since = Annotated[Micros | None, time_option("--since", "Only dead letters since this time")]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def dlq() -> None:
    """List, show and redrive dead letters: records that a channel or a query rejected."""


@app.command("list")
def list_(
    channel: Annotated[
        str | None, typer.Argument(help="The channel, with or without .dead.", show_default="all")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Show each dead letter, the newest last.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="The most reasons to show; with --each, the most dead letters.")
    ] = MAX_LISTED,
    reason: Reason = "",
    sender: Sender = None,
    since: Since = None,
    folder: Folder = Path(),
    profile: Profile = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Count dead letters by reason, or show each one."""
    channels, selection = find_channels(folder, profile, servers), Selection(reason, sender, since)
    names = channels.names()
    wanted = [name for name in names if name.endswith(DEAD)] if channel is None else [_dead(channel, names)]
    if each:
        newest, total = _newest(chain.from_iterable(dead_letters(channels, name, selection) for name in wanted), limit)
        document = {"matching": total, "letters": [letter.to_json() for letter in newest]}
        print_result(as_json, document, _letter_table(newest, total))
        return
    reasons = {name: count_reasons(dead_letters(channels, name, selection)) for name in wanted}
    counts = [
        {"channel": name, "letters": sum(one.count for one in found), "reasons": [asdict(one) for one in found]}
        for name, found in reasons.items()
    ]
    print_result(as_json, {"channels": counts}, _reason_table(reasons, limit))


@app.command()
def show(
    channel: Channel,
    reference: Annotated[
        str, typer.Argument(help="PARTITION:OFFSET of the dead letter, or CHANNEL:PARTITION:OFFSET of its record.")
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Write only the bytes of the value.")] = False,
    folder: Folder = Path(),
    profile: Profile = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: reason, origin, headers and value."""
    if raw and as_json:
        raise Misconfigured("--raw, --json", "they exclude each other", "give one of them")
    channels = find_channels(folder, profile, servers)
    dead = _dead(channel, channels.names())
    letter = letter_at(channels, dead, _reference(dead, reference))
    if raw:
        typer.echo(letter.value or b"", nl=False)
    else:
        document = {
            **letter.to_json(),
            "key": _coded(letter.entry.key),
            "value": _coded(letter.value),
            "headers": [{"name": name, "value": _coded(value)} for name, value in letter.entry.headers],
        }
        print_result(as_json, document, letter_lines(letter))


@app.command()
def redrive(
    channel: Channel,
    references: Annotated[
        list[str] | None, typer.Argument(help="PARTITION:OFFSET of each dead letter.", show_default=False)
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All dead letters of the channel.")] = False,
    reason: Reason = "",
    sender: Sender = None,
    since: Since = None,
    into: Annotated[
        str | None, typer.Option(help="The channel to send to.", show_default="the channel that rejected them")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")] = False,
    folder: Folder = Path(),
    profile: Profile = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Send dead letters to their channel again.

    They keep their identity. A dead letter is sent only once: it is skipped if it was redriven before, or was rejected
    again after that.

    Exit code: 0 when all selected records are in the channel, 1 when some are not, 2 on an error.
    """
    selected = bool(references or reason or sender is not None or since is not None)
    if selected == all_:
        problem = "--all excludes a selection" if all_ else "a selection is required"
        fix = "give PARTITION:OFFSET, --reason, --sender or --since; or --all alone"
        raise Misconfigured("dlq redrive", problem, fix)
    channels = find_channels(folder, profile, servers)
    names = channels.names()
    dead = _dead(channel, names)
    # Not to dead letters, and not to internal channels.
    allowed = [name for name in names if not name.endswith(DEAD) and not name.startswith(INTERNAL)]
    target = require_existing("channel", into or dead.removesuffix(DEAD), allowed)
    selection = Selection(reason, sender, since, frozenset(_reference(dead, one) for one in references or ()))
    outcomes = send_again(channels, dead, selection, target, dry_run, channels.since)
    counts = Counter(outcome.verdict for outcome in outcomes)
    document = {
        "channel": dead,
        "into": target,
        "dry_run": dry_run,
        "counts": {verdict: counts[verdict] for verdict in Verdict},
        "letters": [asdict(outcome) for outcome in outcomes],
    }
    print_result(as_json, document, redrive_lines(target, dry_run, outcomes))
    raise typer.Exit(0 if counts.keys() <= {Verdict.SENT, Verdict.BEFORE} else 1)


def _dead(channel: str, names: Collection[str]) -> str:
    dead = [name for name in names if name.endswith(DEAD)]
    return require_existing("channel", channel.removesuffix(DEAD) + DEAD, dead)


def _reference(channel: str, text: str) -> str:
    """CHANNEL:PARTITION:OFFSET; the default channel is the one of the dead letters."""
    match = re.fullmatch(r"(?:([A-Za-z0-9._-]+):)?([0-9]{1,9}):([0-9]{1,18})", text)
    if match is None:
        raise Misconfigured(f'"{printable(text)}"', "it is not valid", "write PARTITION:OFFSET, such as 0:17")
    return f"{match[1] or channel}:{int(match[2])}:{int(match[3])}"


def _newest(found: Iterable[Letter], limit: int) -> tuple[list[Letter], int]:
    """The newest dead letters, the newest last, and the number of all. Only those are held in memory."""
    total = 0

    def age(letter: Letter) -> tuple[Micros, str, int, int]:
        nonlocal total
        total += 1
        entry = letter.entry
        return entry.appended, entry.channel, entry.partition, entry.offset

    newest = heapq.nlargest(limit, found, key=age)[::-1]
    return newest, total


def _coded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


# --- dead letters as text ---------------------------------------------------------------------------------------------


def _reason_table(found: Mapping[str, Sequence[ReasonCount]], limit: int) -> Iterator[Table | str]:
    """A row for each reason in each channel. A channel without dead letters has a row."""
    shown = table("channel", "dead letters", "rejected again", "first (UTC)", "last (UTC)", "reason", right=(1, 2))
    rows = 0
    for channel, reasons in found.items():
        for one in reasons[: max(limit - rows, 0)]:
            back = f"{one.came_back:,}" if one.came_back else ""
            shown.add_row(channel, f"{one.count:,}", back, _when(one.first), _when(one.last), printable(one.reason))
        rows += len(reasons)
        if not reasons:
            shown.add_row(channel, "0", "", "", "", "")
    yield shown
    if rows > limit:
        yield f"and {rows - limit:,} more; --limit {rows} shows all"


def _letter_table(newest: Sequence[Letter], total: int) -> Iterator[Table | str]:
    """A row for each dead letter."""
    columns = ("dead letter", "rejected (UTC)", "sender/epoch: number", "bytes", "record", "reason")
    shown = table(*columns, right=(3,))
    for letter in newest:
        shown.add_row(
            letter.at,
            _when(letter.entry.appended),
            _origin(letter.origin),
            f"{letter.size:,}",
            printable(letter.location or ""),
            ("rejected again: " if letter.came_back else "") + printable(letter.reason),
        )
    yield shown
    if total > len(newest):
        yield f"these are the newest of {total:,} dead letters; --limit {total} shows all"


def letter_lines(letter: Letter) -> Iterator[str]:
    """A dead letter as text, with the start of its value."""
    origin, entry = letter.origin, letter.entry
    yield f"at:       {letter.at}"
    yield f"reason:   {printable(letter.reason)}"
    yield f"rejected: {_when(entry.appended)} UTC"
    yield f"record:   {printable(letter.location) if letter.location else 'not in its channel'}"
    yield f"origin:   {f'{_origin(origin)}, sent {_when(origin.time)} UTC' if origin else 'no identity'}"
    if letter.came_back:
        yield "redriven: once, and rejected again"
    yield f"key:      {'none' if entry.key is None else _brief(entry.key)}"
    yield "headers:"
    for name, value in entry.headers:
        yield f"  {printable(name)}: {_brief(value)}"
    if letter.value is None:
        yield "value:    null"
        return
    kept = f", of which {len(letter.value):,} are stored" if letter.cut else ""
    yield f"value:    {letter.size:,} bytes{kept}"
    yield from _lines(letter.value)
    if len(letter.value) > PREVIEW_BYTES:
        yield f"these are the first {PREVIEW_BYTES:,} bytes; --raw writes all"


def _lines(value: bytes) -> Iterator[str]:
    preview = value[:PREVIEW_BYTES]
    try:
        value.decode()
    except UnicodeDecodeError:
        for at in range(0, len(preview), 16):
            row = preview[at : at + 16]
            text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
            yield f"  {at:08x}  {row.hex(' '):47}  {text}"
    else:
        # A character that is cut off at the limit is left out.
        yield from (f"  {printable(line)}" for line in preview.decode(errors="ignore").split("\n") if preview)


def _brief(value: bytes) -> str:
    more = f" … ({len(value):,} bytes)" if len(value) > PREVIEW_BYTES else ""
    return printable(value[:PREVIEW_BYTES].decode(errors="backslashreplace")) + more


def redrive_lines(into: str, dry: bool, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The outcome: the dead letters that are not sent (with --dry-run, also those that would be), then the counts."""
    named = [one for one in outcomes if one.verdict is not Verdict.BEFORE and (dry or one.verdict is not Verdict.SENT)]
    for one in named[:MAX_LISTED]:
        who = f"{one.letter} ({_origin(one.origin)})"
        yield f"{who} would be sent" if one.verdict is Verdict.SENT else f"{who} is not sent: {printable(one.why)}"
    if len(named) > MAX_LISTED:
        yield f"and {len(named) - MAX_LISTED:,} more; --json lists all"
    counts = Counter(one.verdict for one in outcomes)
    skipped = len(outcomes) - counts[Verdict.SENT]
    why = ", ".join(f"{counts[verdict]:,} {label}" for verdict, label in _SKIPPED.items() if counts[verdict])
    done = "would be sent" if dry else "sent"
    yield f"{into}: {counts[Verdict.SENT]:,} {done}, {skipped:,} skipped{f': {why}' if why else ''}"


_SKIPPED = {
    Verdict.BEFORE: "redriven before",
    Verdict.BACK: "rejected again",
    Verdict.LATE: "too late for a query",
    Verdict.EXCLUDED: "excluded by a query that fails with it",
    Verdict.CUT: "stored only in part",
    Verdict.FAILED: "rejected by the channel",
}


def _origin(origin: Origin | None) -> str:
    return f"{printable(origin.sender)}/{origin.epoch}: {origin.seq}" if origin else "no identity"


def _when(at: Micros) -> str:
    if at <= 0:
        return "unknown time"
    try:
        return datetime.fromtimestamp(at // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{at} µs"
