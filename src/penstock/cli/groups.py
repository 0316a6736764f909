"""`penstock groups`: consumer groups, their committed offsets and their lag."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.audit.lag import GroupLag
from penstock.audit.writers import INTERNAL
from penstock.cli.consume import check_offset
from penstock.cli.options import AsJson, Folder, Profile, Servers, find_channels, parse_time, require_channels
from penstock.cli.standard import print_table
from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, did_you_mean, printable


def groups(
    list_: Annotated[bool, typer.Option("--list", help="List the groups.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Show members, offsets and lag.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Move the committed offsets of a group.")] = False,
    group: Annotated[
        str | None, typer.Option(help="The group to describe or reset.", show_default="all, for --describe")
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only this channel. May be repeated.")] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="beginning|end|OFFSET", help="The new offset, for --reset.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The new offset, by time: 10m (ago), or 2026-11-15T10:00."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what --reset would do, and do nothing.")] = False,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """List, describe and reset consumer groups.

    The lag is the number of offsets between the committed offset and the end of the partition. A group can be reset
    only while it has no members.

    Exit code: 0 on success, 2 on an error.
    """
    if [list_, describe, reset].count(True) != 1:
        raise Misconfigured("groups", "one action is required", "give one of --list, --describe and --reset")
    if not reset and (to is not None or since is not None or dry_run):
        raise Misconfigured("--to, --since, --dry-run", "they need --reset", "add --reset, or leave them out")
    if list_ and (group is not None or topic):
        fix = "use --describe instead of --list, or leave them out"
        raise Misconfigured("--group, --topic", "--list does not use them", fix)
    channels = find_channels(folder, profile, servers)
    if list_:
        names = channels.groups()
        typer.echo(json.dumps({"groups": names}) if as_json else "\n".join(map(printable, names)), nl=bool(names))
    elif describe:
        names = channels.groups() if group is None else [_existing(channels, group)]
        lags = [GroupLag.of(channels, channels.group(name), topic) for name in names]
        if as_json:
            typer.echo(json.dumps({"groups": [_lag_json(lag) for lag in lags]}))
        else:
            for lag in lags:
                _show(lag)
    else:
        _reset(channels, group, topic or (), _target(to, since), dry_run, as_json)


def _existing(channels: Channels, group: str) -> str:
    names = channels.groups()
    if group not in names:
        otherwise = f"existing groups: {', '.join(names)}" if names else f"there are no groups at {channels.where}"
        raise Misconfigured(f"group {printable(group)}", "not found", did_you_mean(group, names, otherwise))
    return group


# --- describe ---------------------------------------------------------------------------------------------------------


def _lag_json(lag: GroupLag) -> dict[str, object]:
    return {
        "group": lag.group.name,
        "state": lag.group.state,
        "members": {
            member: [{"channel": channel, "partition": partition} for channel, partition in sorted(assigned)]
            for member, assigned in lag.group.members.items()
        },
        "partitions": [row.to_json() for row in lag.rows],
        "lag": lag.lag,
    }


def _show(lag: GroupLag) -> None:
    members = counted(len(lag.group.members), "member")
    typer.echo(f"{printable(lag.group.name)}: {printable(lag.group.state)}, {members}, lag {lag.lag:,}")
    table = Table("channel", "partition", "committed", "end", "lag", "member")
    for row in lag.rows:
        figures = (_figure(row.committed), _figure(row.end), _figure(row.lag))
        table.add_row(printable(row.location[0]), str(row.location[1]), *figures, printable(row.member or "-"))
    for member, assigned in sorted(lag.group.members.items()):
        if not assigned:
            table.add_row("-", "-", "-", "-", "-", printable(member))
    if table.row_count:
        print_table(table, right=range(1, 5))


def _figure(value: int | None) -> str:
    return "-" if value is None else str(value)


# --- reset ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timestamp:
    at: Micros


Target = str | int | Timestamp
"""`beginning`, `end`, an offset, or a time."""


def _target(to: str | None, since: str | None) -> Target:
    if (to is None) == (since is None):
        raise Misconfigured("--reset", "one new offset is required", "give --to or --since")
    if since is not None:
        return Timestamp(parse_time("--since", since))
    assert to is not None
    if to in ("beginning", "end"):
        return to
    if not to.isdecimal():
        raise Misconfigured("--to", f'"{to}" is not an offset', "write beginning, end, or an offset")
    return int(to)


def _reset(channels: Channels, name: str | None, only: Sequence[str], target: Target, dry: bool, as_json: bool) -> None:
    if name is None:
        raise Misconfigured("--reset", "a group is required", "give --group NAME")
    where = f"group {printable(name)}"
    if name.startswith(INTERNAL):
        problem = "it only reports the progress of a pipeline, and is overwritten"
        raise Misconfigured(where, problem, "reset a group of your own")
    committed = _committed(channels, name, only)
    names = list(dict.fromkeys(only)) or sorted({channel for channel, _ in committed})
    if not names:
        raise Misconfigured(where, "it has no committed offsets, so its channels are unknown", "give --topic NAME")
    require_channels(channels, names)
    moves = {channel: _offsets(channels, channel, target) for channel in names}
    if not dry:
        channels.move(name, moves)
    _show_moves(name, moves, committed, dry, as_json)


def _committed(channels: Channels, name: str, only: Sequence[str]) -> Mapping[ChannelPartition, int]:
    """The committed offsets of a group. Misconfigured while it has members. With --topic, the group may be new."""
    if name not in channels.groups():
        if not only:
            _existing(channels, name)
        return {}
    group = channels.group(name)
    if group.members:
        problem = f"it has {counted(len(group.members), 'member')}, and can only be reset without members"
        raise Misconfigured(f"group {printable(name)}", problem, "stop its members first")
    return group.committed


def _offsets(channels: Channels, channel: str, target: Target) -> Offsets:
    if isinstance(target, Timestamp):
        return channels.since(channel, target.at)
    bounds = channels.bounds(channel)
    if isinstance(target, str):
        which = 0 if target == "beginning" else 1
        return {partition: bound[which] for partition, bound in bounds.items()}
    for partition, (first, end) in bounds.items():
        check_offset("--to", f"{channel}/{partition}", target, first, end)
    return dict.fromkeys(bounds, target)


def _show_moves(
    name: str, moves: Mapping[str, Offsets], before: Mapping[ChannelPartition, int], dry: bool, as_json: bool
) -> None:
    rows = [
        {"channel": channel, "partition": partition, "from": before.get((channel, partition)), "to": offset}
        for channel, offsets in moves.items()
        for partition, offset in sorted(offsets.items())
    ]
    if as_json:
        typer.echo(json.dumps({"group": name, "dry_run": dry, "moved": rows}))
        return
    table = Table("channel", "partition", "from", "to")
    for row in rows:
        table.add_row(*("-" if value is None else printable(str(value)) for value in row.values()))
    print_table(table, right=range(1, 4))
    typer.echo(f"{printable(name)} {'would be' if dry else 'was'} moved")
