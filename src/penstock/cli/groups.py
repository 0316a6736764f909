"""`penstock groups`: consumer groups, their committed offsets and their lag."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.audit.lag import GroupLag
from penstock.audit.writers import INTERNAL
from penstock.cli.options import (
    AsJson,
    Folder,
    Profile,
    Servers,
    check_offset,
    find_channels,
    require_channels,
    require_existing,
    time_option,
)
from penstock.cli.standard import print_result, table
from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, printable


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
    since: Annotated[Micros | None, time_option("--since", "The new offset, by time")] = None,
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
        print_result(as_json, {"groups": names}, map(printable, names))
    elif describe:
        names = channels.groups() if group is None else [_existing(channels, group)]
        lags = [GroupLag.of(channels, channels.group(name), topic) for name in names]
        parts = (part for lag in lags for part in _lag_parts(lag))
        print_result(as_json, {"groups": [_lag_json(lag) for lag in lags]}, parts)
    else:
        _reset(channels, group, topic or (), to, since, dry_run, as_json)


def _existing(channels: Channels, group: str) -> str:
    return require_existing("group", group, channels.groups(), f" at {channels.where}")


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


def _lag_parts(lag: GroupLag) -> Iterator[str | Table]:
    members = counted(len(lag.group.members), "member")
    yield f"{printable(lag.group.name)}: {printable(lag.group.state)}, {members}, lag {lag.lag:,}"
    shown = table("channel", "partition", "committed", "end", "lag", "member", right=range(1, 5))
    for row in lag.rows:
        shown.add_row(*map(_cell, (*row.location, row.committed, row.end, row.lag, row.member)))
    for member, assigned in sorted(lag.group.members.items()):
        if not assigned:
            shown.add_row("-", "-", "-", "-", "-", printable(member))
    if shown.row_count:
        yield shown


def _cell(value: str | int | None) -> str:
    return "-" if value is None else printable(str(value))


# --- reset ------------------------------------------------------------------------------------------------------------


def _reset(
    channels: Channels,
    name: str | None,
    only: Sequence[str],
    to: str | None,
    since: Micros | None,
    dry: bool,
    as_json: bool,
) -> None:
    if (to is None) == (since is None):
        raise Misconfigured("--reset", "one new offset is required", "give --to or --since")
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
    moves = {channel: _offsets(channels, channel, to, since) for channel in names}
    if not dry:
        channels.move(name, moves)
    rows = [
        {"channel": channel, "partition": partition, "from": committed.get((channel, partition)), "to": offset}
        for channel, offsets in moves.items()
        for partition, offset in sorted(offsets.items())
    ]
    shown = table("channel", "partition", "from", "to", right=range(1, 4))
    for row in rows:
        shown.add_row(*map(_cell, row.values()))
    done = f"{printable(name)} {'would be' if dry else 'was'} moved"
    print_result(as_json, {"group": name, "dry_run": dry, "moved": rows}, (shown, done))


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


def _offsets(channels: Channels, channel: str, to: str | None, since: Micros | None) -> Offsets:
    if since is not None:
        return channels.since(channel, since)
    bounds = channels.bounds(channel)
    if to == "beginning" or to == "end":
        return {partition: first if to == "beginning" else end for partition, (first, end) in bounds.items()}
    if to is None or not to.isdecimal():
        raise Misconfigured("--to", f'"{to}" is not an offset', "write beginning, end, or an offset")
    for partition, (first, end) in bounds.items():
        check_offset("--to", f"{channel}/{partition}", int(to), first, end)
    return dict.fromkeys(bounds, int(to))
