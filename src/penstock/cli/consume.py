"""`penstock consume`: what channels hold, on standard output."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Protocol

import typer

from penstock.cli.channels import found
from penstock.cli.lines import properties, separator, switched
from penstock.cli.membership import Membership
from penstock.cli.moments import moment, span
from penstock.cli.named import there
from penstock.cli.options import AsJson, Folder, Profile, Servers
from penstock.cli.shown import Fields, Json, Shape
from penstock.cli.standard import Output
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels, Entry, Place, Positions
from penstock.core.errors import Misconfigured
from penstock.supervise.signals import stop_on_signals

_MOST = 1_000
_PAUSE = 0.2


def consume(
    topic: Annotated[list[str], typer.Option(help="A channel; may be given several times.", show_default=False)],
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="All that is kept; in a group, where nothing is committed.")
    ] = False,
    offset: Annotated[
        str | None,
        typer.Option(metavar="N|earliest|latest", help="From this offset of the partition.", show_default=False),
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this partition; may be given several times.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="What came since then: 10m ago, or 2026-11-15T10:00.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Share the channels with the other members of this group.")] = None,
    max_messages: Annotated[
        int | None, typer.Option(min=1, help="End after so many records.", show_default="never")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="End when nothing came for so long, such as 5s.", show_default="never"),
    ] = None,
    timeout_ms: Annotated[int | None, typer.Option(min=0, help="The same in milliseconds.", hidden=True)] = None,
    print_key: Annotated[bool, typer.Option("--print-key", help="Print KEY : VALUE.")] = False,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Print the key, with this before the value.", show_default="' : '"),
    ] = None,
    headers: Annotated[
        bool, typer.Option("--print-headers", "--headers", help="Print the headers, as NAME:VALUE,NAME:VALUE.")
    ] = False,
    print_offset: Annotated[bool, typer.Option("--print-offset", help="Print the offset.")] = False,
    print_partition: Annotated[bool, typer.Option("--print-partition", help="Print the partition.")] = False,
    print_timestamp: Annotated[
        bool, typer.Option("--print-timestamp", help="Print the time, in milliseconds since 1970.")
    ] = False,
    null_marker: Annotated[str | None, typer.Option(metavar="TEXT", help="How a null is printed.")] = None,
    property_: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            "--formatter-property",
            metavar="NAME=VALUE",
            help="The same in the words of Kafka's tool: print.key=true, key.separator=:, print.offset=true, …",
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Escape codes reach the terminal, too; a pipe or a file always gets all bytes."),
    ] = False,
    as_json: AsJson = False,
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
    out = Output()
    shape: Shape = Json()
    if not as_json:
        chosen = Fields(
            print_timestamp,
            print_partition,
            print_offset,
            headers,
            print_key or key_separator is not None,
            safe=out.terminal and not raw,
        )
        chosen = _by_properties(chosen, properties("--property", property_ or (), _PROPERTIES))
        if key_separator is not None:
            chosen = replace(chosen, key_separator=separator("--key-separator", key_separator))
        shape = chosen if null_marker is None else replace(chosen, null=os.fsencode(null_marker))
    begin = Begin(from_beginning, offset, tuple(partition or ()), None if since is None else moment("--since", since))
    silence = None if timeout is None else span("--timeout", timeout).total_seconds()
    silence = silence if timeout_ms is None else timeout_ms / 1_000
    topics, clock = list(dict.fromkeys(topic)), SystemClock()
    if group is not None:
        begin.refuse_in_group()
    channels = found(folder, profile, servers)
    there(channels, topics)
    with stop_on_signals() as stop:
        printed = Printed(out, shape, clock)
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
            return  # Whoever read this has enough.
    _say(f"{printed.count:,} record{'' if printed.count == 1 else 's'}")


def _say(text: str) -> None:
    typer.echo(text, err=True)


class Readable(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]: ...


@dataclass
class Printed:
    """What was printed so far."""

    out: Output
    shape: Shape
    clock: Clock
    count: int = 0

    def all(self, reader: Readable, most: int | None, silence: float | None, stop: Event) -> None:
        """Print until `most` are printed, nothing came for `silence` seconds, or `stop` is set.

        BrokenPipeError when nobody reads them any more.
        """
        heard = self.clock.elapsed()
        while True:
            if self.out.gone():
                # Asking for more would tell a group that the last ones are dealt with, and nobody may have read them.
                raise BrokenPipeError
            if stop.is_set():
                return
            left = _MOST if most is None else min(_MOST, most - self.count)
            wait = _PAUSE if silence is None else max(0.0, min(_PAUSE, heard + silence - self.clock.elapsed()))
            if entries := reader.read(left, wait):
                self.out.write(map(self.shape.line, entries))
                self.count += len(entries)
                heard = self.clock.elapsed()
            elif silence is not None and self.clock.elapsed() - heard >= silence:
                return
            if self.count == most:
                return


# --- where to begin ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Where to begin, as it was asked for; from now on, where nothing was."""

    beginning: bool = False
    offset: str | None = None
    partitions: tuple[int, ...] = ()
    since: Micros | None = None

    def __post_init__(self) -> None:
        told = {"--from-beginning": self.beginning, "--offset": self.offset, "--since": self.since}
        given = [name for name, value in told.items() if value not in (None, False)]
        if len(given) > 1:
            raise Misconfigured(" and ".join(given), "these are several places to begin", "give one of them")
        if self.offset not in (None, *_WORDS) and not str(self.offset).isdecimal():
            problem = f'"{self.offset}" is not an offset'
            raise Misconfigured("--offset", problem, f"write a number, {' or '.join(_WORDS)}")

    def refuse_in_group(self) -> None:
        told = {"--offset": self.offset, "--since": self.since, "--partition": self.partitions or None}
        for name, value in told.items():
            if value is not None:
                way_out = "move the group while nobody is in it: penstock groups --reset --group G --to …"
                raise Misconfigured(name, "the group says where its members begin", way_out)

    def positions(
        self, channels: Channels, names: Sequence[str]
    ) -> tuple[dict[str, Positions], Collection[Place] | None]:
        """Per channel, where to begin; and the partitions that are read, if not all are."""
        start = {name: self._start(channels, name) for name in names}
        if not self.partitions:
            return start, None
        for name, positions in start.items():
            if missing := [str(one) for one in self.partitions if one not in positions]:
                problem = f"{name} has no partition {', '.join(missing)}"
                raise Misconfigured("--partition", problem, f"it has 0 to {len(positions) - 1}")
        return start, {(name, one) for name in names for one in self.partitions}

    def _start(self, channels: Channels, name: str) -> Positions:
        bounds = channels.bounds(name)
        if self.since is not None:
            return channels.since(name, self.since)
        if self.beginning or self.offset == "earliest":
            if not channels.promise.replay:
                problem = f"{channels.where} keeps nothing: reading begins now"
                raise Misconfigured(f"channel {name}", problem, "use kafka://, redis:// or file://")
            return {partition: low for partition, (low, _) in bounds.items()}
        if self.offset in (None, "latest"):
            return {partition: end for partition, (_, end) in bounds.items()}
        return self._from(name, bounds)

    def _from(self, name: str, bounds: Mapping[int, tuple[int, int]]) -> Positions:
        if len(self.partitions or bounds) > 1:
            problem = f"{name} has {len(bounds)} partitions, each with offsets of its own"
            raise Misconfigured("--offset", problem, "say which one: --partition P")
        wanted = int(self.offset or 0)
        for partition in self.partitions or bounds:
            low, end = bounds.get(partition, (wanted, wanted))
            if not low <= wanted <= end:
                problem = f"{name}/{partition} does not hold {wanted}"
                raise Misconfigured("--offset", problem, f"it holds {low} to {end}, the next one")
        return dict.fromkeys(bounds, wanted)


_WORDS = ("earliest", "latest")


# --- Kafka's words ----------------------------------------------------------------------------------------------------

_SWITCHES = {
    "print.timestamp": "timestamp",
    "print.partition": "partition",
    "print.offset": "offset",
    "print.headers": "headers",
    "print.key": "key",
    "print.value": "value",
}
_TEXTS = {
    "key.separator": "key_separator",
    "headers.separator": "between_headers",
    "line.separator": "end",
    "null.literal": "null",
}
_PROPERTIES = (*_SWITCHES, *_TEXTS)


def _by_properties(shape: Fields, told: Mapping[str, str]) -> Fields:
    """The shape, as the properties of Kafka's tool change it; what parts key and value is then what it is there."""
    changed: dict[str, Any] = {
        **{field: switched("--property", told, name) for name, field in _SWITCHES.items() if name in told},
        **{field: separator(f"--property {name}", told[name]) for name, field in _TEXTS.items() if name in told},
    }
    shape = replace(shape, **changed)
    if "key.separator" in told:
        return replace(shape, between=shape.key_separator)
    return replace(shape, key_separator=shape.between) if "print.key" in told else shape
