"""`penstock verify`: per sender, the numbers must have no gap; in a channel, a file or standard input."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Annotated

import typer
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.audit.verify import EXIT_CODES, Fields, Integrity, IntegrityReport, Lapse, SenderCount, Verifier
from penstock.cli.options import AsJson, Folder, MaxLine, Profile, Servers, find_channels, parse_duration
from penstock.cli.standard import Input, print_result
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unavailable
from penstock.core.record import Origin
from penstock.core.scan import scan_batches
from penstock.core.text import counted, printable
from penstock.supervise.process import stop_on_signals

MAX_LINES = 20
"""The most senders, and the most gaps, that are printed."""
_MIN_NAME, _WIDEST = 8, 10_000
"""The least width of the column of senders, and the most of a table, in characters."""
_STYLES = {Integrity.WHOLE: "bold green", Integrity.LOSS: "bold red"}
_BATCH = 10_000
_POLL = 0.2


def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHANNEL|FILE|-",
            help="A channel, a file or - for standard input. A name that exists as a file, has a slash, or ends in"
            " .json or .jsonl is a file.",
            show_default=False,
        ),
    ],
    seq: Annotated[str, typer.Option(help="The field of the number; a.b is the field b in the object a.")] = "seq",
    sender: Annotated[str, typer.Option(help="The field of the sender; '' for a single sender.")] = "sender",
    epoch: Annotated[str, typer.Option(help="The field of the sender's epoch; '' for none.")] = "epoch",
    time: Annotated[str, typer.Option(help="The field of the send time, in microseconds; '' for none.")] = "time",
    first: Annotated[
        int | None,
        typer.Option(help="The first number of each sender.", show_default="the lowest number that arrives"),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="The time between two reports; 0s for a report at the end only.")
    ] = "10s",
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new records until Ctrl-C.")] = False,
    grace: Annotated[
        str,
        typer.Option(metavar="DURATION", help="The time to wait for missing records at the end of a channel."),
    ] = "2s",
    max_line: MaxLine = 1 << 20,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Verify that no record is missing: the numbers of each sender must have no gap, in any order.

    A file or standard input has JSON lines such as {"seq": 1000, "sender": "sender1", "time": 0}. Of a channel, the
    headers of its records are read, or such a payload if they have no numbers, from its beginning to its current end.
    A channel at tcp:// is read from now on, until Ctrl-C.

    Exit code: 0 when nothing is missing, 1 when a number is missing, 2 when something could not be read, or there was
    no record.
    """
    if not seq:
        raise Misconfigured("--seq", "it is empty", "give the field of the number")
    clock, fields = SystemClock(), Fields(seq, sender, epoch, time)
    interval, wait = parse_duration("--every", every).total_seconds(), parse_duration("--grace", grace).total_seconds()
    with ExitStack() as stack:
        opened: Stream | Log
        if source == "-":
            opened = Stream("standard input", 0, max_line, clock, live=True)
        elif "/" in source or source.endswith((".json", ".jsonl")) or Path(source).exists():
            if follow:
                fix = f"pipe it: tail -n +1 -f {source} | penstock verify -"
                raise Misconfigured("--follow", "a file cannot be followed", fix)
            try:
                file = stack.enter_context(Path(source).open("rb", buffering=0))
            except OSError as error:
                problem = f"it cannot be read: {error.strerror}"
                raise Misconfigured(source, problem, "give a file that can be read") from error
            opened = Stream(source, file.fileno(), max_line, clock, live=False)
        else:
            channels = _channels(source, folder, profile, servers)
            # A channel without stored records has no current end.
            opened = Log(channels, source, clock, follow or not channels.promise.replay, wait)
        end = _verified(opened, fields, Verifier(clock, first), clock, interval, as_json)
    raise typer.Exit(EXIT_CODES[end.verdict])


def _verified(
    source: "Stream | Log", fields: Fields, verifier: Verifier, clock: Clock, interval: float, as_json: bool
) -> IntegrityReport:
    """Feed the verifier and print its reports, the last one also after an error."""
    with stop_on_signals() as stop:
        due = clock.elapsed() + interval
        try:
            for _ in source.feed(verifier, fields, stop):
                if interval and clock.elapsed() >= due:
                    report = verifier.report()
                    print_result(as_json, report.to_json(), report_parts(report))
                    due += interval * ((clock.elapsed() - due) // interval + 1)
        except PenstockError as error:
            verifier.doubt(f"Reading failed: {error}.")
        end = verifier.end()
        print_result(as_json, end.to_json(), report_parts(end))
    return end


def _channels(channel: str, folder: Path, profile: str | None, servers: str | None) -> Channels:
    """The channels; Misconfigured when they are not running, or the channel does not exist."""
    try:
        channels = find_channels(folder, profile, servers)
        channels.bounds(channel)
    except (Misconfigured, Unavailable) as error:
        fix = f"or give its address: --servers ADDRESS; write a file as ./{channel}"
        raise Misconfigured(f"channel {channel}", str(error), fix) from error
    return channels


# --- sources: each feeds a verifier, yields between its batches, and ends early when it is stopped -------------------


@dataclass(frozen=True)
class Stream:
    """JSON lines of an open file. `live`: they are read as they are written, so reading is their time of arrival."""

    name: str
    descriptor: int
    max_line: int
    clock: Clock
    live: bool

    def feed(self, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        """Give all lines to the verifier. Raises Unavailable when reading fails."""
        lines, number = Input(self.descriptor, self.max_line, name=self.name), 0
        for batch in lines.batches(stop):
            arrived = self.clock.now() if self.live else None
            for line in batch:
                number += 1
                try:
                    if len(line) > self.max_line:
                        raise Refused("a line", f"it is longer than {self.max_line:,} bytes")
                    verifier.take(fields.read(line), arrived)
                except Refused as error:
                    if line.strip():
                        verifier.refuse(f"line {number}", error.reason)
            if not stop.is_set():
                yield
        # A live stream may be stopped at any time.
        if not (self.live or lines.ended):
            verifier.doubt(f"{self.name} was not read to its end.")


@dataclass(frozen=True)
class Log:
    """The records of a channel, from its beginning to its current end; or without an end, when it is followed.

    What is missing at the end may still arrive in another partition, within `grace` seconds.
    """

    channels: Channels
    channel: str
    clock: Clock
    follow: bool = False
    grace: float = 2.0

    def feed(self, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        """Give all records to the verifier. Raises Unavailable when reading fails."""
        bounds = self.channels.bounds(self.channel)
        for partition, (low, _) in bounds.items():
            if low:
                verifier.note(f"Partition {partition} starts at offset {low}: older records are no longer kept.")
        start = {}
        if not self.follow:
            for entries in scan_batches(self.channels, self.channel, bounds=bounds, most=_BATCH):
                for entry in entries:
                    _take(entry, fields, verifier)
                yield
                if stop.is_set():
                    verifier.doubt(f"{self.channel} was not read to its end.")
                    return
            start = {partition: end for partition, (_, end) in bounds.items()}
        with self.channels.reader({self.channel: start}) as reader:
            while self.follow and not stop.is_set():
                for entry in reader.read(_BATCH, _POLL):
                    _take(entry, fields, verifier)
                yield
            until = self.clock.elapsed() + self.grace
            while verifier.missing and self.clock.elapsed() < until:
                for entry in reader.read(_BATCH, _POLL):
                    with suppress(Refused):
                        verifier.fill(_origin(entry, fields))
                yield


def _take(entry: Entry, fields: Fields, verifier: Verifier) -> None:
    try:
        verifier.take(_origin(entry, fields), entry.appended)
    except Refused as error:
        verifier.refuse(f"partition {entry.partition}, offset {entry.offset}", error.reason)


def _origin(entry: Entry, fields: Fields) -> Origin:
    if (origin := Origin.of(entry.headers)) is not None:
        return origin
    if entry.value is None:
        raise Refused("a record", "it has no origin in its headers, and no payload")
    return fields.read(entry.value)


# --- reports as text --------------------------------------------------------------------------------------------------


def report_parts(report: IntegrityReport) -> Iterator[str | Text | Table]:
    """A report as text: of an interval, a line and the first gaps; at the end, everything."""
    if not report.final:
        timestamp = datetime.fromtimestamp(report.at // 1_000_000, UTC)
        missing = f"; {report.missing:,} missing" if report.missing else ""
        unreadable = f"; {report.unreadable:,} cannot be read" if report.unreadable else ""
        yield f"{timestamp:%H:%M:%S} UTC: {_arrived(report.lapse)}{missing}{unreadable}"
        yield from _gaps(report)
        return
    yield from _senders(report.by_sender)
    yield from _gaps(report)
    refused = [f"{where} cannot be read: {printable(reason)}" for where, reason in report.refused]
    if (more := report.unreadable - len(report.refused)) > 0:
        refused.append(f"and {more:,} more cannot be read")
    for line in (*refused, *map(printable, (*report.notes, *report.doubts))):
        yield Text(line, "yellow")
    yield f"{_arrived(report.lapse)}."
    yield Text(_verdict(report), _STYLES.get(report.verdict, "bold yellow"))


def _arrived(lapse: Lapse) -> str:
    text = f"{counted(lapse.records, 'record')} in {lapse.seconds:,.1f} s"
    if lapse.rate:
        text += f", {lapse.rate:,.0f}/s"
    if (latency := lapse.latency) is not None:
        text += f"; latency {latency['min']:,.1f} min, {latency['mean']:,.1f} mean, {latency['max']:,.1f} max ms"
    return text


def _senders(senders: Sequence[SenderCount]) -> Iterator[str | Table]:
    """A table of all senders if they are few; otherwise of the worst ones with a problem."""
    if len(senders) <= MAX_LINES:
        if senders:
            yield SenderTable(senders)
        return
    unclean = [one for one in senders if not one.clean]
    if worst := sorted(unclean, key=lambda one: (-one.missing, -one.doubled, -one.out_of_order))[:MAX_LINES]:
        yield SenderTable(worst)
    if len(unclean) > MAX_LINES:
        yield f"and {len(unclean) - MAX_LINES:,} more senders with missing, repeated or reordered numbers"
    yield f"{len(senders) - len(unclean):,} senders are complete and in order"


class SenderTable(Table):
    """Folds long names on a narrow screen, and never numbers: it may be wider than the screen."""

    def __init__(self, senders: Sequence[SenderCount]) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        self.add_column("sender", overflow="fold")
        epochs = ["epoch"] if any(one.epoch for one in senders) else []
        for title in (*epochs, "records", "first", "last", "missing", "doubled", "out of\norder"):
            self.add_column(title, justify="right", no_wrap=True)
        for one in senders:
            # Numbers that identify a record have no thousands separator.
            names = [*([str(one.epoch)] if epochs else ()), f"{one.records:,}", str(one.first), str(one.last)]
            missing = Text(f"{one.missing:,}", style="bold red" if one.missing else "")
            self.add_row(Text(printable(one.sender)), *names, missing, f"{one.doubled:,}", f"{one.out_of_order:,}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=_WIDEST)
        whole, names = (Measurement.get(console, wide, one).maximum for one in (self, Group(*self.columns[0].cells)))
        if whole > options.max_width:
            width = max(names - (whole - options.max_width), min(names, _MIN_NAME))
            self.columns[0].width, self.width = width, whole - names + width
        return super().__rich_console__(console, options)


def _gaps(report: IntegrityReport) -> Iterator[Text]:
    for gap in report.gaps[:MAX_LINES]:
        epoch = f"/{gap.epoch}" if gap.epoch else ""
        yield Text(f"{printable(gap.sender)}{epoch} misses {gap.numbers}", "red")
    if (more := len(report.gaps) - MAX_LINES) > 0:
        yield Text(f"and {more:,} more ranges; --json lists all", "red")


def _verdict(report: IntegrityReport) -> str:
    total = f"{counted(report.records, 'record')} of {counted(report.senders, 'sender')}"
    match report.verdict:
        case Integrity.LOSS:
            maybe = "; they may be among what cannot be read" if report.unreadable else ""
            return f"Incomplete: {counted(report.missing, 'record')} missing, {total} arrived{maybe}."
        case Integrity.UNCERTAIN if not report.records:
            return "Uncertain: nothing could be read."
        case Integrity.UNCERTAIN:
            return f"Uncertain: nothing is missing among {total}, but not everything could be read."
        case Integrity.NOTHING:
            return "Nothing to verify: there was no record."
        case Integrity.WHOLE:
            return f"Complete: nothing is missing among {total}."
