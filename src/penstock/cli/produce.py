"""`penstock produce`: from standard input, or from a generator, into a channel."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, NoReturn

import orjson
import typer

from penstock.cli.channels import found, require_writable, there
from penstock.cli.options import Folder, Profile, Servers, parse_duration
from penstock.cli.standard import Input
from penstock.collect.numbers import Numbering
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Sender
from penstock.core.errors import Misconfigured, PenstockError, Refused
from penstock.core.record import Record
from penstock.core.text import did_you_mean, printable
from penstock.simulate.updates import Updates, Walk, new_epoch, updates, walk
from penstock.supervise.signals import stop_on_signals

_PAUSE = 0.2
_IDENTITY = frozenset({"sender", "epoch", "seq", "time"})
"""The headers that say who sent a record."""

Create = Annotated[bool, typer.Option("--create", help="Make the channel if it is not there.")]

app = typer.Typer(add_completion=False, invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def produce(
    context: typer.Context,
    topic: Annotated[str | None, typer.Option(help="The channel.", show_default=False)] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Lines are KEY, this, VALUE.", show_default="no keys")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='Lines are JSON: {"key": …, "value": …, "headers": {…}}.')
    ] = False,
    sender: Annotated[str, typer.Option(help="In whose name the records are numbered.")] = "produce",
    no_identity: Annotated[bool, typer.Option("--no-identity", help="Do not number the records.")] = False,
    create: Create = False,
    longest: Annotated[int, typer.Option(min=1, max=1 << 30, help="The bytes that a line may have.")] = 1 << 20,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Produce records from lines of standard input, or from a generator (updates, random-walk).

    Each line becomes a record, an empty one too. Records are numbered in their headers (sender, epoch, seq, time), so
    that `penstock verify` and `penstock audit` can tell whether one is missing; lines whose own headers say who sent
    them keep that. Nothing is read that the channel has no room for. Ctrl-C: the lines that were read are
    sent, then it ends; half a line is not.

    Exits with 0 when all that was read is acknowledged, 1 when it is not, 2 when the question was wrong.
    """
    if context.invoked_subcommand is not None:
        _nothing_before(context)
        return
    if topic is None:
        fix = "give --topic NAME; or a generator: updates, random-walk"
        raise Misconfigured("produce", "it is not said into which channel", fix)
    if as_json and key_separator is not None:
        raise Misconfigured("--json", "the key has its place in the JSON", "leave --key-separator out")
    read = json_record if as_json else partial(text_record, separator=parse_separator(key_separator))
    clock = SystemClock()
    numbering = None if no_identity else _numbering(sender, clock)
    channels = found(folder, profile, servers)
    require_writable(channels, topic)
    there(channels, [topic], create=create, hint=", or add --create")
    lines = Input.standard(longest, _ask)
    reading = Reading(lines, read, numbering, clock, longest)
    with stop_on_signals() as stop:
        code = _ended(channels, topic, _aside(reading.portions(stop)))
    if lines.torn:
        typer.echo("the last line had no end yet, and was not sent", err=True)
    raise typer.Exit(code)


@app.command("updates")
def updates_(
    topic: Annotated[str, typer.Option(help="The channel; it is made if it is not there.")] = "updates",
    every: Annotated[str, typer.Option(metavar="DURATION", help="How often each sender sends.")] = "100ms",
    count: Annotated[int, typer.Option(min=1, help="How many updates each sender sends every time.")] = 10,
    senders: Annotated[int, typer.Option(min=1, help="How many senders there are.")] = 1,
    total: Annotated[
        int | None, typer.Option(min=0, help="End after so many updates of each sender.", show_default="never")
    ] = None,
    name: Annotated[str, typer.Option(help="What the senders are called.")] = "sender",
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Produce numbered updates: {"seq": 1, "sender": "sender", "time": …}, until Ctrl-C.

    Each sender counts 1, 2, 3, … in a life that begins now; `penstock verify` tells whether one is missing.
    """
    wanted = Updates(_interval("--every", every), count, senders, total, name)
    clock, pace = SystemClock(), Pace()
    _generated(updates(wanted, new_epoch(clock), clock, pace.behind), pace, topic, found(folder, profile, servers))


@app.command()
def random_walk(
    topic: Annotated[str, typer.Option(help="The channel; it is made if it is not there.")] = "random_walk",
    every: Annotated[str, typer.Option(metavar="DURATION", help="How often there is a step.")] = "1s",
    seed: Annotated[int | None, typer.Option(help="The same seed walks the same way.", show_default="any")] = None,
    total: Annotated[int | None, typer.Option(min=0, help="End after so many steps.", show_default="never")] = None,
    key: Annotated[str, typer.Option(help="The key of the records.")] = "walk",
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Produce a random walk: a position with four decimals at each step, until Ctrl-C."""
    wanted = Walk(_interval("--every", every), total, seed, key)
    clock, pace = SystemClock(), Pace()
    _generated(walk(wanted, new_epoch(clock), clock, pace.behind), pace, topic, found(folder, profile, servers))


def _generated(batches: AsyncIterator[list[Record]], pace: "Pace", topic: str, channels: Channels) -> NoReturn:
    require_writable(channels, topic)
    there(channels, [topic], create=True)
    with stop_on_signals() as stop:
        code = _ended(channels, topic, _until(stop, batches))
    pace.told()
    raise typer.Exit(code)


def _nothing_before(context: typer.Context) -> None:
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            which = context.invoked_subcommand
            option = f"--{name.strip('_').replace('_', '-')}"
            fix = f"write penstock produce {which} {option} …, if {which} has it"
            raise Misconfigured(option, f"it stands before {which}", fix)


def _numbering(sender: str, clock: Clock) -> Numbering:
    try:
        sender.encode()
    except UnicodeEncodeError as error:
        raise Misconfigured("--sender", "it is not UTF-8", "give another name") from error
    if not sender:
        raise Misconfigured("--sender", "it is empty", "give a name; or --no-identity")
    return Numbering(sender, new_epoch(clock))


def _interval(option: str, text: str) -> timedelta:
    found = parse_duration(option, text)
    if not found:
        raise Misconfigured(option, "this has no end", "give more than 0 ms")
    return found


def parse_separator(text: str | None) -> bytes | None:
    r"""The separator as typed: \t is a tab; the bytes of the terminal otherwise."""
    if text == "":
        raise Misconfigured("--key-separator", "it is empty", "give at least one character, such as :")
    return None if text is None else text.replace("\\t", "\t").encode(errors="surrogateescape")


def _ask() -> None:
    typer.echo(">", nl=False, err=True)


# --- a line into a record ---------------------------------------------------------------------------------------------


def text_record(line: bytes, separator: bytes | None = None) -> Record:
    """The record of a line `VALUE`, or `KEY VALUE` with the separator between; Refused when that is not there."""
    if separator is None:
        return Record(line)
    key, found, value = line.partition(separator)
    if not found:
        raise Refused("a line", f"it has no key: there is no {_quoted(separator)} in {_quoted(line)}")
    return Record(value, None, key)


def _quoted(text: bytes) -> str:
    shown = printable(text[:60].decode(errors="backslashreplace"))
    return f'"{shown}{"…" if len(text) > 60 else ""}"'


def json_record(line: bytes) -> Record:
    """The record of `{"key": …, "value": …, "headers": …}`: each a text, null, or {"base64": "…"}; Refused otherwise.

    The headers are a list of {"name", "value"}, or an object. The other fields of `penstock consume --json` are
    ignored, so that its output can be produced again.
    """
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise Refused("a line", f"it is not JSON: {error.msg}") from error
    if not isinstance(document, dict):
        raise Refused("a line", "it is JSON, but not an object")
    for name in document:
        if name not in _FIELDS:
            fix = did_you_mean(name, _FIELDS, f"there are {', '.join(_FIELDS)}")
            raise Refused("a line", f'"{printable(name)}" is not a field; {fix}')
    if "value" not in document:
        raise Refused("a line", 'there is no "value"; write null for none')
    return Record(_bytes("value", document["value"]), None, _bytes("key", document.get("key")), _headers(document))


_FIELDS = ("key", "value", "headers", "channel", "partition", "offset", "appended", "origin")


def _headers(document: Mapping[str, object]) -> tuple[tuple[str, bytes], ...]:
    told = document.get("headers")
    if told is None:
        return ()
    if isinstance(told, dict):
        told = [{"name": name, "value": value} for name, value in told.items()]
    if not isinstance(told, list):
        raise Refused("a line", '"headers" has to be an object, or a list of {"name", "value"}')
    pairs = []
    for one in told:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise Refused("a line", 'each of "headers" has to be {"name": "…", "value": "…"}')
        pairs.append((one["name"], _bytes(f"headers.{one['name']}", one.get("value")) or b""))
    return tuple(pairs)


def _bytes(field: str, told: object) -> bytes | None:
    match told:
        case None:
            return None
        case str():
            return told.encode()
        case {"base64": str(coded), **rest} if not rest:
            try:
                return base64.b64decode(coded, validate=True)
            except binascii.Error as error:
                raise Refused("a line", f'"{printable(field)}" is not base64: {error}') from error
    raise Refused("a line", f'"{printable(field)}" has to be a text, null, or {{"base64": "…"}}')


# --- send -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Lines of standard input as records."""

    lines: Input
    read: Callable[[bytes], Record]
    numbering: Numbering | None
    clock: Clock
    longest: int

    def portions(self, stop: Event) -> Iterator[Sequence[Record]]:
        """Some records at a time; Refused with its number when a line cannot be read, after all those before it."""
        at = 0
        for lines in self.lines.portions(stop):
            records: list[Record] = []
            for line in lines:
                at += 1
                try:
                    records.append(self._record(line))
                except Refused as error:
                    yield records
                    raise Refused(f"line {at}", error.reason) from error
            if records:
                yield records

    def _record(self, line: bytes) -> Record:
        if len(line) > self.longest:
            raise Refused("a line", f"it is longer than {self.longest:,} bytes; --longest allows more")
        record = self.read(line)
        if self.numbering is None or any(name in _IDENTITY for name, _ in record.extra):
            return record
        return replace(record, origin=self.numbering.next(self.clock.now()))


@dataclass
class Tally:
    """What became of the records."""

    where: str
    acknowledged: int = 0
    under_way: int = 0
    failure: PenstockError | None = None

    @contextmanager
    def sending(self, count: int) -> Iterator[None]:
        self.under_way = count
        yield
        self.acknowledged, self.under_way = self.acknowledged + count, 0

    def told(self) -> int:
        """Say it on standard error; the exit code."""
        typer.echo(f"{self.acknowledged:,} acknowledged by {self.where}", err=True)
        if self.failure is not None:
            typer.echo(f"penstock: {self.failure}", err=True)
        if self.under_way:
            typer.echo(f"{self.under_way:,} were not acknowledged: they may be in the channel, or not", err=True)
        return 0 if self.failure is None and not self.under_way else 1


def _ended(channels: Channels, topic: str, portions: AsyncIterator[Sequence[Record]]) -> int:
    """Send all, and say what became of it; the exit code."""
    tally = Tally(f"{topic} at {channels.where}")
    with suppress(KeyboardInterrupt):  # The second one: who gives up on a broker that is away is told what that means.
        asyncio.run(sent(channels.sender(), topic, tally, portions))
    return tally.told()


async def sent(
    opening: AbstractAsyncContextManager[Sender], topic: str, tally: Tally, portions: AsyncIterator[Sequence[Record]]
) -> None:
    """Send portion by portion: the next one is asked for when the last one is acknowledged."""
    try:
        async with opening as sender:
            async for records in portions:
                with tally.sending(len(records)):
                    await sender.send(topic, records)
    except PenstockError as error:
        tally.failure = error


async def _aside(portions: Iterator[Sequence[Record]]) -> AsyncIterator[Sequence[Record]]:
    """Read in a thread: it may block for long, and the client has to go on meanwhile."""
    while (records := await asyncio.to_thread(next, portions, None)) is not None:
        yield records


async def _until(stop: Event, portions: AsyncIterator[list[Record]]) -> AsyncIterator[Sequence[Record]]:
    """What comes until `stop` is set, however long the next one takes."""
    while not stop.is_set():
        coming = asyncio.ensure_future(anext(portions, None))
        while not coming.done() and not stop.is_set():
            await asyncio.wait([coming], timeout=_PAUSE)
        if not coming.done():
            coming.cancel()
            return
        if (records := coming.result()) is None:
            return
        yield records


@dataclass
class Pace:
    """Whether a generator keeps to its schedule."""

    given_up: int = 0

    def behind(self, ticks: int) -> None:
        if not self.given_up:
            typer.echo("the channel is too slow for this pace: ticks are given up", err=True)
        self.given_up += ticks

    def told(self) -> None:
        if self.given_up:
            typer.echo(f"{self.given_up:,} ticks were given up: their records were never made", err=True)
