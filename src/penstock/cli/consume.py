"""`penstock consume`: print the records of channels on standard output."""

import base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, Protocol

import orjson
import typer

from penstock.cli.channels import found, there
from penstock.cli.options import Folder, Profile, Servers, parse_duration, parse_time
from penstock.cli.standard import Output
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import ChannelPartition, Channels, Entry, Member, Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.core.text import counted, printable
from penstock.supervise.signals import stop_on_signals

_MOST = 1_000
_PAUSE = 0.2
_COMMIT_EVERY = 1.0
"""Seconds between two commits of a group; and one whenever a partition goes."""


def consume(
    topic: Annotated[list[str], typer.Option(help="A channel; may be given several times.", show_default=False)],
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="All that is kept; in a group, where nothing is committed.")
    ] = False,
    offset: Annotated[
        int | None, typer.Option(min=0, help="From this offset of the partition.", show_default=False)
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this partition; may be given several times.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="What came since then: 10m ago, or 2026-11-15T10:00.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Share the channels with the other members of this group.")] = None,
    max_messages: Annotated[
        int | None, typer.Option(min=1, help="End after so many records.", show_default="never")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="End when nothing came for so long, such as 5s.", show_default="never"),
    ] = None,
    print_key: Annotated[bool, typer.Option("--print-key", help="Print KEY : VALUE.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: key, value, headers, partition, offset and time.")
    ] = False,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Consume channels: print their records as they come, a line for each, until Ctrl-C.

    Without a place to begin, only what comes from now on. As a member of a group, from where the group has committed:
    what is printed is committed after that, so a record may be printed twice when a member dies, and none is left out.
    What a member is given and what it loses is told on standard error.

    Exits with 0, also when --timeout is over or nobody reads the output any more; 2 when it cannot be read on.
    """
    out, clock = Output(), SystemClock()
    line = json_line if as_json else partial(text_line, print_key=print_key, safe=out.terminal)
    begin = Begin(from_beginning, offset, partition or (), None if since is None else parse_time("--since", since))
    begin.check(in_group=group is not None)
    silence = None if timeout is None else parse_duration("--timeout", timeout).total_seconds()
    topics = list(dict.fromkeys(topic))
    channels = found(folder, profile, servers)
    there(channels, topics)
    with stop_on_signals() as stop:
        printed = Printed(out, line, clock)
        try:
            if group is None:
                start, only = begin.positions(channels, topics)
                with channels.reader(start, only=only) as reader:
                    printed.all(reader, max_messages, silence, stop)
            else:
                joined = Membership(_say, clock).joined(channels, group, topics, beginning=from_beginning)
                with joined as member:
                    printed.all(member, max_messages, silence, stop)
        except BrokenPipeError:
            return  # The reader of the output has enough.
    _say(counted(printed.count, "record"))


def _say(text: str) -> None:
    typer.echo(text, err=True)


# --- print ------------------------------------------------------------------------------------------------------------


def text_line(entry: Entry, print_key: bool = False, safe: bool = False) -> bytes:
    """`VALUE` or `KEY : VALUE`. `safe` escapes what would move the cursor or colour the screen."""
    contents = [entry.key, entry.value] if print_key else [entry.value]
    texts = [b"null" if content is None else content for content in contents]
    if safe:
        texts = [printable(text.decode(errors="backslashreplace")).encode() for text in texts]
    return b" : ".join(texts) + b"\n"


def json_line(entry: Entry) -> bytes:
    """All of an entry, as an object on a line. What is not UTF-8 is {"base64": "…"}."""
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


class Readable(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]: ...


@dataclass
class Printed:
    """What was printed so far."""

    out: Output
    line: Callable[[Entry], bytes]
    clock: Clock
    count: int = 0

    def all(self, reader: Readable, most: int | None, silence: float | None, stop: Event) -> None:
        """Print until `most` are printed, nothing came for `silence` seconds, or `stop` is set.

        BrokenPipeError when nobody reads them any more.
        """
        heard = self.clock.elapsed()
        while True:
            if self.out.gone():
                # To ask for more would commit the last ones, and nobody may have read them.
                raise BrokenPipeError
            if stop.is_set():
                return
            left = _MOST if most is None else min(_MOST, most - self.count)
            wait = _PAUSE if silence is None else max(0.0, min(_PAUSE, heard + silence - self.clock.elapsed()))
            if entries := reader.read(left, wait):
                self.out.write(map(self.line, entries))
                self.count += len(entries)
                heard = self.clock.elapsed()
            elif silence is not None and self.clock.elapsed() - heard >= silence:
                return
            if self.count == most:
                return


# --- where to begin ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Where to begin; from now on, unless an option says otherwise."""

    beginning: bool
    offset: int | None
    partitions: Sequence[int]
    since: Micros | None

    def check(self, in_group: bool) -> None:
        """Misconfigured when options contradict each other."""
        options = {"--from-beginning": self.beginning or None, "--offset": self.offset, "--since": self.since}
        given = [name for name, value in options.items() if value is not None]
        if len(given) > 1:
            raise Misconfigured(" and ".join(given), "these are several places to begin", "give one of them")
        if self.partitions:
            given.append("--partition")
        if in_group and (refused := [name for name in given if name != "--from-beginning"]):
            fix = "move the group while nobody is in it: penstock groups --reset --group G --to …"
            raise Misconfigured(refused[0], "the group says where its members begin", fix)

    def positions(
        self, channels: Channels, names: Sequence[str]
    ) -> tuple[dict[str, Offsets], Collection[ChannelPartition] | None]:
        """Per channel, where to begin; and the partitions that are read, if not all are."""
        start = {name: self._start(channels, name) for name in names}
        return start, {(name, one) for name in names for one in self.partitions} or None

    def _start(self, channels: Channels, name: str) -> Offsets:
        bounds = channels.bounds(name)
        if missing := [str(one) for one in self.partitions if one not in bounds]:
            problem = f"{name} has no partition {', '.join(missing)}"
            raise Misconfigured("--partition", problem, f"it has 0 to {len(bounds) - 1}")
        if self.since is not None:
            return channels.since(name, self.since)
        if self.offset is not None:
            return self._from(name, bounds, self.offset)
        if self.beginning and not channels.promise.replay:
            problem = f"{channels.where} keeps nothing: reading begins now"
            raise Misconfigured(f"channel {name}", problem, "use kafka://, redis:// or file://")
        return {partition: low if self.beginning else end for partition, (low, end) in bounds.items()}

    def _from(self, name: str, bounds: Mapping[int, tuple[int, int]], offset: int) -> Offsets:
        chosen = self.partitions or list(bounds)
        if len(chosen) > 1:
            problem = f"{name} has {len(bounds)} partitions, each with offsets of its own"
            raise Misconfigured("--offset", problem, "say which one: --partition P")
        low, end = bounds[chosen[0]]
        if not low <= offset <= end:
            problem = f"{name}/{chosen[0]} does not hold {offset}"
            raise Misconfigured("--offset", problem, f"it holds {low} to {end}, the next one")
        return dict.fromkeys(bounds, offset)


# --- a member of a group ----------------------------------------------------------------------------------------------


class Membership:
    """Reads as a member. What one call of `read` gave is done when the next one comes, and may be committed then."""

    def __init__(self, say: Callable[[str], None], clock: Clock) -> None:
        self._say, self._clock = say, clock
        self._member: Member | None = None
        self._new: set[ChannelPartition] = set()
        self._done = True
        self._open = False
        self._committed = clock.elapsed()

    @contextmanager
    def joined(
        self, channels: Channels, group: str, names: Sequence[str], *, beginning: bool
    ) -> Iterator["Membership"]:
        """A member for as long as the body runs. What was read last is done, and committed, only if that ends well."""
        with channels.join(group, names, self, beginning=beginning) as self._member:
            try:
                yield self
            except BaseException:
                self._say = _nothing  # What ended it is told by others.
                raise
            self._settle()

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        assert self._member is not None
        self._settle()
        if self._clock.elapsed() - self._committed >= _COMMIT_EVERY:
            self._commit()
        entries = self._member.read(most, wait)
        self._done = not entries
        if self._new:
            self._tell_given(entries)
        return entries

    # --- what the group says, from within `read`

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        self._new |= set(partitions)
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        self._commit()
        self._gone("gave back", partitions)

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        self._gone("lost", partitions)

    # ---

    def _settle(self) -> None:
        """Whoever asks for more has dealt with what it got."""
        self._open = self._open or not self._done
        self._done = True

    def _commit(self) -> None:
        if self._member is None or not self._open or not self._done:
            return
        self._committed = self._clock.elapsed()
        try:
            self._member.commit()
            self._open = False
        except Unavailable as error:
            self._say(f"not committed, and so perhaps printed again by others: {error}")

    def _tell_given(self, entries: Sequence[Entry]) -> None:
        assert self._member is not None
        start = {place: offset for place, offset in self._member.held().items() if place in self._new}
        for entry in reversed(entries):
            if (place := (entry.channel, entry.partition)) in start:
                start[place] = entry.offset
        self._new.clear()
        if start:
            partitions = sorted(start)
            self._say(f"given {_listed(partitions)} from {', '.join(str(start[place]) for place in partitions)}")

    def _gone(self, what: str, partitions: Sequence[ChannelPartition]) -> None:
        # What came and went within one call was never ours to tell.
        told = [place for place in partitions if place not in self._new]
        self._new -= set(partitions)
        if told:
            self._say(f"{what} {_listed(told)}")


def _nothing(_: str) -> None: ...


def _listed(partitions: Sequence[ChannelPartition]) -> str:
    return ", ".join(f"{printable(channel)}/{partition}" for channel, partition in partitions)
