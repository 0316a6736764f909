"""`penstock consume`: print the records of channels on standard output."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated

import orjson
import typer

from penstock.cli.options import (
    Folder,
    Profile,
    Servers,
    check_offset,
    find_channels,
    given_options,
    parse_duration,
    require_channels,
    time_option,
)
from penstock.cli.standard import Output, inform
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import ChannelPartition, Channels, Entry, Member, Offsets, Reader
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.core.text import counted, printable
from penstock.supervise.process import stop_on_signals

_BATCH = 1_000
_POLL = 0.2
_COMMIT_INTERVAL = 1.0
"""Seconds between two commits of a group. Partitions are also committed before they are revoked."""


def consume(
    context: typer.Context,
    topic: Annotated[list[str], typer.Option(help="The channel to read. May be repeated.", show_default=False)],
    from_beginning: Annotated[
        bool,
        typer.Option(
            "--from-beginning", help="Start at the oldest record; in a group, where it has no committed offset."
        ),
    ] = False,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Start at this offset of the partition.", show_default=False)
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Read only this partition.", show_default="all")] = None,
    since: Annotated[Micros | None, time_option("--since", "Start at this time")] = None,
    group: Annotated[str | None, typer.Option(help="Read as a member of this consumer group.")] = None,
    max_messages: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of records.", show_default="no limit")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Stop when no record arrives for this time, such as 5s.", show_default="no limit"
        ),
    ] = None,
    print_key: Annotated[bool, typer.Option("--print-key", help="Print KEY : VALUE.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: key, value, headers, partition, offset and time.")
    ] = False,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Print the records of channels, one on each line, until Ctrl-C.

    Reading starts with new records, unless an option sets another start. A member of a group starts at the committed
    offset. Offsets are committed after their records are printed: after a crash, a record may be printed twice, but
    none is skipped. Assigned and revoked partitions are shown on standard error.

    Exit code: 0 on success, also after --timeout or when the output is closed; 2 on an error.
    """
    out, clock = Output(), SystemClock()
    line = json_line if as_json else partial(text_line, print_key=print_key, escape=out.terminal)
    _check_start(given_options(context), in_group=group is not None)
    idle = None if timeout is None else parse_duration("--timeout", timeout).total_seconds()
    topics = list(dict.fromkeys(topic))
    channels = find_channels(folder, profile, servers)
    require_channels(channels, topics)
    with stop_on_signals() as stop:
        printer = Printer(out, line, clock)
        try:
            if group is None:
                offsets = {name: _start(channels, name, from_beginning, offset, partition, since) for name in topics}
                only = None if partition is None else {(name, partition) for name in topics}
                with channels.reader(offsets, only) as reader:
                    printer.print_all(reader, max_messages, idle, stop)
            else:
                joined = GroupReader(inform, clock).joined(channels, group, topics, beginning=from_beginning)
                with joined as member:
                    printer.print_all(member, max_messages, idle, stop)
        except BrokenPipeError:
            return  # The output is closed.
    inform(counted(printer.count, "record"))


# --- print ------------------------------------------------------------------------------------------------------------


def text_line(entry: Entry, print_key: bool = False, escape: bool = False) -> bytes:
    """`VALUE` or `KEY : VALUE`. `escape` escapes control characters."""
    contents = [entry.key, entry.value] if print_key else [entry.value]
    texts = [b"null" if content is None else content for content in contents]
    if escape:
        texts = [printable(text.decode(errors="backslashreplace")).encode() for text in texts]
    return b" : ".join(texts) + b"\n"


def json_line(entry: Entry) -> bytes:
    """An entry as a JSON object on one line. Bytes that are not UTF-8 are {"base64": "…"}."""
    origin = Origin.read(entry.headers)
    document = {
        "channel": entry.channel,
        "partition": entry.partition,
        "offset": entry.offset,
        "appended": entry.appended,
        "key": _json_text(entry.key),
        "value": _json_text(entry.value),
        "headers": [{"name": name, "value": _json_text(value)} for name, value in entry.headers],
        "origin": origin and {"sender": origin.sender, "epoch": origin.epoch, "seq": origin.seq, "time": origin.time},
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _json_text(content: bytes | None) -> str | dict[str, str] | None:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


@dataclass
class Printer:
    """Prints entries and counts them."""

    out: Output
    line: Callable[[Entry], bytes]
    clock: Clock
    count: int = 0

    def print_all(self, reader: "Reader | GroupReader", limit: int | None, idle: float | None, stop: Event) -> None:
        """Print until `limit` entries are printed, none arrived for `idle` seconds, or `stop` is set.

        BrokenPipeError when the output is closed.
        """
        last = self.clock.elapsed()
        while True:
            if self.out.closed():
                # The next read would commit the last records, which may not have been read.
                raise BrokenPipeError
            if stop.is_set():
                return
            count = _BATCH if limit is None else min(_BATCH, limit - self.count)
            wait = _POLL if idle is None else max(0.0, min(_POLL, last + idle - self.clock.elapsed()))
            if entries := reader.read(count, wait):
                self.out.write(map(self.line, entries))
                self.count += len(entries)
                last = self.clock.elapsed()
            elif idle is not None and self.clock.elapsed() - last >= idle:
                return
            if self.count == limit:
                return


# --- the first offset -------------------------------------------------------------------------------------------------


def _check_start(given: Set[str], in_group: bool) -> None:
    """Misconfigured when options contradict each other."""
    starts = sorted(given & {"--from-beginning", "--offset", "--since"})
    if len(starts) > 1:
        raise Misconfigured(" and ".join(starts), "these options contradict each other", "give one of them")
    if in_group and (invalid := sorted(given & {"--offset", "--since", "--partition"})):
        fix = "stop its members and move it: penstock groups --reset --group G --to …"
        raise Misconfigured(invalid[0], "members of a group start at its committed offsets", fix)


def _start(
    channels: Channels, name: str, beginning: bool, offset: int | None, partition: int | None, since: Micros | None
) -> Offsets:
    """The first offsets of a channel: its end, unless an option is set."""
    bounds = channels.bounds(name)
    if partition is not None and partition not in bounds:
        problem = f"{name} has no partition {partition}"
        raise Misconfigured("--partition", problem, f"it has 0 to {len(bounds) - 1}")
    if since is not None:
        return channels.since(name, since)
    if offset is not None:
        if partition is None and len(bounds) > 1:
            problem = f"{name} has {len(bounds)} partitions, each with its own offsets"
            raise Misconfigured("--offset", problem, "choose one: --partition P")
        read = partition or 0
        check_offset("--offset", f"{name}/{read}", offset, *bounds[read])
        return dict.fromkeys(bounds, offset)
    if beginning and not channels.promise.replay:
        problem = f"{channels.where} keeps no records: only new ones can be read"
        raise Misconfigured(f"channel {name}", problem, "use kafka://, redis:// or file://")
    return {partition: low if beginning else end for partition, (low, end) in bounds.items()}


# --- a member of a group ----------------------------------------------------------------------------------------------


class GroupReader:
    """Reads as a member of a group. A call of `read` shows that the records of the call before are processed."""

    _member: Member

    def __init__(self, report: Callable[[str], None], clock: Clock) -> None:
        self._report, self._clock = report, clock
        self._new: set[ChannelPartition] = set()
        """Assigned, and not reported yet."""
        self._uncommitted = False
        self._committed = clock.elapsed()

    @contextmanager
    def joined(
        self, channels: Channels, group: str, names: Sequence[str], *, beginning: bool
    ) -> Iterator["GroupReader"]:
        """Join the group while the body runs. The last records are committed only if the body ends without an error."""
        with channels.join(group, names, self, beginning=beginning) as self._member:
            try:
                yield self
            except BaseException:
                # The error itself is reported. `lost` is called instead of `revoked`, so nothing is committed.
                self._report = lambda _: None
                raise

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        if self._clock.elapsed() - self._committed >= _COMMIT_INTERVAL:
            self._commit()
        entries = self._member.read(most, wait)
        self._uncommitted = self._uncommitted or bool(entries)
        if self._new:
            self._report_assigned(entries)
        return entries

    # --- RebalanceListener, called from within `read` and at the end

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        self._new |= set(partitions)
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        self._commit()
        self._report_gone("revoked", partitions)

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        self._report_gone("lost", partitions)

    # ---

    def _commit(self) -> None:
        if not self._uncommitted:
            return
        self._committed = self._clock.elapsed()
        try:
            self._member.commit()
            self._uncommitted = False
        except Unavailable as error:
            self._report(f"commit failed, another member may print the same records again: {error}")

    def _report_assigned(self, entries: Sequence[Entry]) -> None:
        start = {partition: offset for partition, offset in self._member.held().items() if partition in self._new}
        for entry in reversed(entries):
            if (partition := (entry.channel, entry.partition)) in start:
                start[partition] = entry.offset
        self._new.clear()
        if start:
            partitions = sorted(start)
            offsets = ", ".join(str(start[partition]) for partition in partitions)
            self._report(f"assigned {_listed(partitions)} at offset {offsets}")

    def _report_gone(self, how: str, partitions: Sequence[ChannelPartition]) -> None:
        # A partition that came and went within one call was never reported.
        reported = [partition for partition in partitions if partition not in self._new]
        self._new -= set(partitions)
        if reported:
            self._report(f"{how} {_listed(reported)}")


def _listed(partitions: Sequence[ChannelPartition]) -> str:
    return ", ".join(f"{printable(channel)}/{partition}" for channel, partition in partitions)
