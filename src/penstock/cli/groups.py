"""`penstock groups`: who shares channels, how far they are, and how far they lag behind."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.audit.lag import GroupLag
from penstock.cli.channels import OURS, found, there
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_time
from penstock.cli.standard import console
from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, did_you_mean, printable


def groups(
    list_: Annotated[bool, typer.Option("--list", help="List the groups.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Tell members, positions and lag.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Move a group that has no members.")] = False,
    group: Annotated[str | None, typer.Option(help="The group.", show_default="all, for --describe")] = None,
    topic: Annotated[
        list[str] | None, typer.Option(help="Only this channel; may be given several times.", show_default="all")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="beginning|end|OFFSET", help="Where --reset moves the group to.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="MOMENT", help="Move it to what came since then: 10m ago, or 2026-11-15T10:00."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what --reset would do; do nothing.")] = False,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show the groups that share channels: their members, what is committed, and the lag.

    Lag counts offsets up to the end of now. --reset moves what a group has committed, while it has no members.
    Exits with 0 whatever the lag is, 2 when the question was wrong.
    """
    if [list_, describe, reset].count(True) != 1:
        fix = "give one of --list, --describe and --reset"
        raise Misconfigured("groups", "it is not said what to do, or more than one thing is", fix)
    if not reset and (to is not None or since is not None or dry_run):
        raise Misconfigured("--to, --since, --dry-run", "they are for --reset", "add --reset, or leave them out")
    if list_ and (group is not None or topic):
        fix = "add --describe in the place of --list, or leave them out"
        raise Misconfigured("--group, --topic", "they say nothing to --list", fix)
    channels = found(folder, profile, servers)
    if list_:
        names = channels.groups()
        typer.echo(json.dumps({"groups": names}) if as_json else "\n".join(map(printable, names)), nl=bool(names))
    elif describe:
        chosen = [_known(channels, group)] if group is not None else channels.groups()
        standings = [GroupLag.of(channels, channels.group(name), topic) for name in chosen]
        if as_json:
            typer.echo(json.dumps({"groups": [_told(standing) for standing in standings]}))
        else:
            for standing in standings:
                _show(standing)
    else:
        _reset(channels, group, topic or (), _target(to, since), dry_run, as_json)


def _known(channels: Channels, group: str) -> str:
    names = channels.groups()
    if group not in names:
        fix = (
            did_you_mean(group, names, f"there are {', '.join(names)}")
            if names
            else f"there is no group at {channels.where}"
        )
        raise Misconfigured(f"group {printable(group)}", "there is none of that name", fix)
    return group


# --- describe ---------------------------------------------------------------------------------------------------------


def _told(standing: GroupLag) -> dict[str, object]:
    return {
        "group": standing.group.name,
        "state": standing.group.state,
        "members": {
            member: [{"channel": channel, "partition": partition} for channel, partition in sorted(places)]
            for member, places in standing.group.members.items()
        },
        "partitions": [row.to_json() for row in standing.rows],
        "lag": standing.lag,
    }


def _show(standing: GroupLag) -> None:
    who = counted(len(standing.group.members), "member")
    typer.echo(f"{printable(standing.group.name)}: {printable(standing.group.state)}, {who}, lag {standing.lag:,}")
    table = Table("channel", "partition", "committed", "end", "lag", "member")
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in standing.rows:
        figures = (_figure(row.committed), _figure(row.end), _figure(row.lag))
        table.add_row(printable(row.place[0]), str(row.place[1]), *figures, printable(row.member or "-"))
    for member, places in sorted(standing.group.members.items()):
        if not places:
            table.add_row("-", "-", "-", "-", "-", printable(member))
    if table.row_count:
        console().print(table)


def _figure(value: int | None) -> str:
    return "-" if value is None else str(value)


# --- reset ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    at: Micros


Target = str | int | Moment
"""`beginning`, `end`, an offset, or what came since a moment."""


def _target(to: str | None, since: str | None) -> Target:
    if (to is None) == (since is None):
        raise Misconfigured("--reset", "it is not said where to, or twice", "give --to or --since")
    if since is not None:
        return Moment(parse_time("--since", since))
    assert to is not None
    if to in ("beginning", "end"):
        return to
    if not to.isdecimal():
        raise Misconfigured("--to", f'"{to}" is no place to go to', "write beginning, end, or an offset")
    return int(to)


def _reset(channels: Channels, name: str | None, only: Sequence[str], target: Target, dry: bool, as_json: bool) -> None:
    if name is None:
        raise Misconfigured("--reset", "it is not said which group", "give --group NAME")
    if name.startswith(OURS):
        problem = "it only shows how far a tier of a pipeline is: nobody begins there, and the audit writes it over"
        raise Misconfigured(f"group {printable(name)}", problem, "move a group of your own")
    committed = _committed(channels, name, only)
    names = list(dict.fromkeys(only)) or sorted({channel for channel, _ in committed})
    if not names:
        problem = "it has committed nothing, so its channels are not known"
        raise Misconfigured(f"group {printable(name)}", problem, "give --topic NAME")
    there(channels, names)
    moves = {channel: _positions(channels, channel, target) for channel in names}
    if not dry:
        channels.move(name, moves)
    _tell_moves(name, moves, committed, dry, as_json)


def _committed(channels: Channels, name: str, only: Sequence[str]) -> Mapping[ChannelPartition, int]:
    """What a group has committed so far; Misconfigured while it has members. One that is not there can be begun."""
    if name not in channels.groups():
        if not only:
            _known(channels, name)
        return {}
    group = channels.group(name)
    if count := len(group.members):
        are = "is 1 member" if count == 1 else f"are {count} members"
        problem = f"there {are} in it, who would go on where they are"
        raise Misconfigured(f"group {printable(name)}", problem, "stop them first")
    return group.committed


def _positions(channels: Channels, channel: str, target: Target) -> Offsets:
    if isinstance(target, Moment):
        return channels.since(channel, target.at)
    bounds = channels.bounds(channel)
    if isinstance(target, str):
        which = 0 if target == "beginning" else 1
        return {partition: bound[which] for partition, bound in bounds.items()}
    for partition, (low, end) in bounds.items():
        if not low <= target <= end:
            problem = f"{channel}/{partition} does not hold {target}"
            raise Misconfigured("--to", problem, f"it holds {low} to {end}, the next one")
    return dict.fromkeys(bounds, target)


def _tell_moves(
    name: str, moves: Mapping[str, Offsets], before: Mapping[ChannelPartition, int], dry: bool, as_json: bool
) -> None:
    rows = [
        {"channel": channel, "partition": partition, "from": before.get((channel, partition)), "to": offset}
        for channel, positions in moves.items()
        for partition, offset in sorted(positions.items())
    ]
    if as_json:
        typer.echo(json.dumps({"group": name, "dry_run": dry, "moved": rows}))
        return
    table = Table("channel", "partition", "from", "to")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(printable(str(row["channel"])), *("-" if row[at] is None else str(row[at]) for at in _COLUMNS))
    console().print(table)
    typer.echo(f"{printable(name)} {'would be' if dry else 'was'} moved")


_COLUMNS = ("partition", "from", "to")
