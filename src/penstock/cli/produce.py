"""`penstock produce`: write records from standard input, or from a generator, to a channel."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, NoReturn

import orjson
import typer

from penstock.cli.options import (
    Folder,
    MaxLine,
    Profile,
    Servers,
    find_channels,
    given_options,
    parse_duration,
    require_channels,
    require_writable,
)
from penstock.cli.standard import Input, inform
from penstock.collect.numbers import Numbering
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Sender
from penstock.core.errors import Misconfigured, PenstockError, Refused
from penstock.core.record import Record
from penstock.core.text import did_you_mean, printable
from penstock.simulate.updates import Behind, Updates, new_epoch, updates, walk
from penstock.supervise.process import stop_on_signals

_POLL = 0.2
_IDENTITY = frozenset({"sender", "epoch", "seq", "time"})
"""The headers of a record that identify it."""

app = typer.Typer(add_completion=False, invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def produce(
    context: typer.Context,
    topic: Annotated[str | None, typer.Option(help="The channel to write to.", show_default=False)] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The text between key and value of a line.", show_default="no keys"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='Lines are JSON: {"key": …, "value": …, "headers": {…}}.')
    ] = False,
    sender: Annotated[str, typer.Option(help="The sender name of the numbered records.")] = "produce",
    no_identity: Annotated[bool, typer.Option("--no-identity", help="Do not number the records.")] = False,
    create: Annotated[bool, typer.Option("--create", help="Create the channel if it does not exist.")] = False,
    max_line: MaxLine = 1 << 20,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Write lines of standard input to a channel, or records of a generator (updates, random-walk).

    Each line is a record, also an empty one. Records are numbered in their headers (sender, epoch, seq, time), so that
    `penstock verify` and `penstock audit` find missing records. JSON lines that have these headers keep them. On
    Ctrl-C, all complete lines are sent; an incomplete line is not.

    Exit code: 0 when all records are acknowledged, 1 when some are not, 2 on an error.
    """
    if (command := context.invoked_subcommand) is not None:
        for option in sorted(given_options(context)):
            raise Misconfigured(option, f"it is before {command}", f"write penstock produce {command} {option} …")
        return
    if topic is None:
        fix = "give --topic NAME; or a generator: updates, random-walk"
        raise Misconfigured("produce", "a channel is required", fix)
    if as_json and key_separator is not None:
        raise Misconfigured("--json", "the key is part of the JSON", "leave out --key-separator")
    read = json_record if as_json else partial(text_record, separator=parse_separator(key_separator))
    clock = SystemClock()
    numbering = None if no_identity else _numbering(sender, clock)
    channels = find_channels(folder, profile, servers)
    require_writable(channels, topic)
    require_channels(channels, [topic], create=create, hint=", or add --create")
    lines = Input.standard(max_line, partial(typer.echo, ">", nl=False, err=True))
    with stop_on_signals() as stop:
        code = _send_all(channels, topic, _in_thread(read_records(lines, read, numbering, clock, stop)))
    if lines.incomplete:
        inform("the last line was incomplete, and was not sent")
    raise typer.Exit(code)


@app.command("updates")
def updates_(
    topic: Annotated[
        str, typer.Option(help="The channel to write to. It is created if it does not exist.")
    ] = "updates",
    every: Annotated[str, typer.Option(metavar="DURATION", help="The time between two batches of a sender.")] = "100ms",
    count: Annotated[int, typer.Option(min=1, help="The number of updates in a batch.")] = 10,
    senders: Annotated[int, typer.Option(min=1, help="The number of senders.")] = 1,
    total: Annotated[
        int | None, typer.Option(min=0, help="Stop after this number of updates of each sender.", show_default="never")
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the senders.")] = "sender",
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Write numbered updates until Ctrl-C.

    An update is {"seq": 1, "sender": "sender", "time": …}. Each sender counts 1, 2, 3, … in an epoch that starts now.
    `penstock verify` finds missing updates.
    """
    options, clock = Updates(_interval("--every", every), count, senders, total, name), SystemClock()
    channels = find_channels(folder, profile, servers)
    _generate(lambda behind: updates(options, new_epoch(clock), clock, behind), channels, topic)


@app.command()
def random_walk(
    topic: Annotated[
        str, typer.Option(help="The channel to write to. It is created if it does not exist.")
    ] = "random_walk",
    every: Annotated[str, typer.Option(metavar="DURATION", help="The time between two steps.")] = "1s",
    seed: Annotated[
        int | None, typer.Option(help="The same seed produces the same walk.", show_default="random")
    ] = None,
    total: Annotated[
        int | None, typer.Option(min=0, help="Stop after this number of steps.", show_default="never")
    ] = None,
    key: Annotated[str, typer.Option(help="The key of the records.")] = "walk",
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Write a random walk until Ctrl-C.

    Each step is a record: the position, with four decimals.
    """
    interval, clock = _interval("--every", every), SystemClock()
    channels = find_channels(folder, profile, servers)
    _generate(lambda behind: walk(interval, total, seed, key, new_epoch(clock), clock, behind), channels, topic)


def _generate(start: Callable[[Behind], AsyncIterator[list[Record]]], channels: Channels, topic: str) -> NoReturn:
    require_writable(channels, topic)
    require_channels(channels, [topic], create=True)
    skipped = 0

    def skip(ticks: int) -> None:
        nonlocal skipped
        if not skipped:
            inform("the channel is too slow for this rate: ticks are skipped")
        skipped += ticks

    with stop_on_signals() as stop:
        code = _send_all(channels, topic, _until(stop, start(skip)))
    if skipped:
        inform(f"{skipped:,} ticks were skipped: their records were not generated")
    raise typer.Exit(code)


def _numbering(sender: str, clock: Clock) -> Numbering:
    try:
        sender.encode()
    except UnicodeEncodeError as error:
        raise Misconfigured("--sender", "it is not UTF-8", "give another name") from error
    if not sender:
        raise Misconfigured("--sender", "it is empty", "give a name, or --no-identity")
    return Numbering(sender, new_epoch(clock))


def _interval(option: str, text: str) -> timedelta:
    interval = parse_duration(option, text)
    if not interval:
        raise Misconfigured(option, "it must be more than 0 ms", "give a time such as 100ms")
    return interval


def parse_separator(text: str | None) -> bytes | None:
    r"""The separator as bytes; \t is a tab."""
    if text == "":
        raise Misconfigured("--key-separator", "it is empty", "give at least one character, such as :")
    return None if text is None else text.replace("\\t", "\t").encode(errors="surrogateescape")


# --- a line to a record -----------------------------------------------------------------------------------------------


def text_record(line: bytes, separator: bytes | None = None) -> Record:
    """The record of a line `VALUE`, or `KEY separator VALUE`; Refused when the separator is missing."""
    if separator is None:
        return Record(line)
    key, found, value = line.partition(separator)
    if not found:
        raise Refused("a line", f"it has no key: {_quoted(line)} has no separator {_quoted(separator)}")
    return Record(value, None, key)


def _quoted(text: bytes) -> str:
    preview = printable(text[:60].decode(errors="backslashreplace"))
    return f'"{preview}{"…" if len(text) > 60 else ""}"'


def json_record(line: bytes) -> Record:
    """The record of `{"key": …, "value": …, "headers": …}`: each a text, null, or {"base64": "…"}; Refused otherwise.

    The headers are a list of {"name", "value"}, or an object. The other fields of `penstock consume --json` are
    ignored, so that its output is valid input.
    """
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise Refused("a line", f"it is not JSON: {error.msg}") from error
    if not isinstance(document, dict):
        raise Refused("a line", "it is not a JSON object")
    for name in document:
        if name not in _FIELDS:
            fix = did_you_mean(name, _FIELDS, f"the fields are {', '.join(_FIELDS)}")
            raise Refused("a line", f'"{printable(name)}" is not a field; {fix}')
    if "value" not in document:
        raise Refused("a line", '"value" is missing; write null for a deletion')
    return Record(_bytes("value", document["value"]), None, _bytes("key", document.get("key")), _headers(document))


_FIELDS = ("key", "value", "headers", "channel", "partition", "offset", "appended", "origin")


def _headers(document: Mapping[str, object]) -> tuple[tuple[str, bytes], ...]:
    headers = document.get("headers")
    if headers is None:
        return ()
    if isinstance(headers, dict):
        headers = [{"name": name, "value": value} for name, value in headers.items()]
    if not isinstance(headers, list):
        raise Refused("a line", '"headers" must be an object, or a list of {"name": "…", "value": "…"}')
    pairs = []
    for header in headers:
        if not isinstance(header, dict) or not isinstance(header.get("name"), str):
            raise Refused("a line", 'each of "headers" must be {"name": "…", "value": "…"}')
        pairs.append((header["name"], _bytes(f"headers.{header['name']}", header.get("value")) or b""))
    return tuple(pairs)


def _bytes(field: str, value: object) -> bytes | None:
    match value:
        case None:
            return None
        case str():
            return value.encode()
        case {"base64": str(coded), **rest} if not rest:
            try:
                return base64.b64decode(coded, validate=True)
            except binascii.Error as error:
                raise Refused("a line", f'"{printable(field)}" is not base64: {error}') from error
    raise Refused("a line", f'"{printable(field)}" must be a text, null, or {{"base64": "…"}}')


def read_records(
    lines: Input, read: Callable[[bytes], Record], numbering: Numbering | None, clock: Clock, stop: Event
) -> Iterator[Sequence[Record]]:
    """Batches of numbered records. At an invalid line: the records before it, then Refused with the line number."""
    number = 0
    for batch in lines.batches(stop):
        records: list[Record] = []
        for line in batch:
            number += 1
            try:
                if len(line) > lines.max_length:
                    raise Refused("a line", f"it is longer than {lines.max_length:,} bytes; raise --max-line")
                record = read(line)
            except Refused as error:
                yield records
                raise Refused(f"line {number}", error.reason) from error
            if numbering is not None and not any(name in _IDENTITY for name, _ in record.extra):
                record = replace(record, origin=numbering.next(clock.now()))
            records.append(record)
        if records:
            yield records


# --- send -------------------------------------------------------------------------------------------------------------


@dataclass
class SendResult:
    """Counts what was acknowledged and what was in flight at the end."""

    channel: str
    acknowledged: int = 0
    in_flight: int = 0
    failure: PenstockError | None = None

    def report(self) -> int:
        """Print it on standard error; the exit code."""
        inform(f"{self.acknowledged:,} acknowledged by {self.channel}")
        if self.failure is not None:
            inform(f"penstock: {self.failure}")
        if self.in_flight:
            inform(f"{self.in_flight:,} not acknowledged: they may or may not be in the channel")
        return 0 if self.failure is None and not self.in_flight else 1


def _send_all(channels: Channels, topic: str, batches: AsyncIterator[Sequence[Record]]) -> int:
    """Send all batches and report the result; the exit code."""
    result = SendResult(f"{topic} at {channels.where}")
    # A second Ctrl-C stops waiting for an unavailable broker; the report then shows what is not acknowledged.
    with suppress(KeyboardInterrupt):
        asyncio.run(send(channels.sender(), topic, result, batches))
    return result.report()


async def send(
    opening: AbstractAsyncContextManager[Sender],
    topic: str,
    result: SendResult,
    batches: AsyncIterator[Sequence[Record]],
) -> None:
    """Send batch by batch: the next one is read when the last one is acknowledged."""
    try:
        async with opening as sender:
            async for records in batches:
                result.in_flight = len(records)
                await sender.send(topic, records)
                result.acknowledged += len(records)
                result.in_flight = 0
    except PenstockError as error:
        result.failure = error


async def _in_thread(batches: Iterator[Sequence[Record]]) -> AsyncIterator[Sequence[Record]]:
    """Read in a thread: reading blocks, and the client must keep running."""
    while (records := await asyncio.to_thread(next, batches, None)) is not None:
        yield records


async def _until(stop: Event, batches: AsyncIterator[list[Record]]) -> AsyncIterator[Sequence[Record]]:
    """The batches until `stop` is set, also while waiting for the next one."""
    while not stop.is_set():
        coming = asyncio.ensure_future(anext(batches, None))
        while not coming.done() and not stop.is_set():
            await asyncio.wait([coming], timeout=_POLL)
        if not coming.done():
            coming.cancel()
            return
        if (records := coming.result()) is None:
            return
        yield records
