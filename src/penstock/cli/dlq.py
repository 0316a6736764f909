"""`penstock dlq`: what channels refused; to list it, to look at it, and to send it once more."""

import base64
import heapq
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.channels import found
from penstock.cli.letters import NAMED, letter_lines, redrive_lines, show_each, show_reasons
from penstock.cli.moments import moment
from penstock.cli.options import AsJson, Folder, Profile, Servers
from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, printable
from penstock.pipeline.letters import DEAD, Letter, Selection, Tally, letter_at, letters, tallied
from penstock.pipeline.redrive import Outcome, Verdict
from penstock.pipeline.redrive import redrive as send_again

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
        way_out = "give PARTITION:OFFSET, --reason, --sender or --since; or --all for every letter"
        raise Misconfigured("dlq redrive", problem, way_out)
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
    way_out = did_you_mean(name, names, others)
    raise Misconfigured(f"channel {printable(name)}", "there is no such channel", way_out)


def _place(channel: str, text: str) -> str:
    """A place in full. A bare one is that of a letter."""
    match = re.fullmatch(r"(?:([A-Za-z0-9._-]+):)?([0-9]{1,9}):([0-9]{1,18})", text)
    if match is None:
        raise Misconfigured(f'"{printable(text)}"', "this is no place", "write PARTITION:OFFSET, such as 0:17")
    return f"{match[1] or channel}:{int(match[2])}:{int(match[3])}"


def _after(since: str | None) -> Micros | None:
    return None if since is None else moment("--since", since)


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
