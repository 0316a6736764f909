"""`penstock verify`: per sender, the numbers must have no gap; in a channel, a file or standard input."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.audit.updates import Fields
from penstock.audit.verify import EXIT_CODES, Integrity, IntegrityReport, Lapse, SenderCount, Verifier
from penstock.cli.channels import found
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_duration
from penstock.cli.standard import Input, console
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unavailable
from penstock.core.record import Origin
from penstock.core.scan import incomplete_read
from penstock.core.text import counted, printable
from penstock.supervise.signals import stop_on_signals

SHOWN = 20
"""So many senders have a line, so many gaps are named; then it is said how many more there are."""
_NAME, _WIDEST = 8, 10_000
"""The characters of a sender's name that are on a line at least; and those of a table at most."""
_STYLES = {Integrity.WHOLE: "bold green", Integrity.LOSS: "bold red"}
_MOST = 10_000
_PAUSE = 0.2
_ASKED, _SILENT = 5.0, 30.0
"""After so many seconds of silence a channel is asked whether it is there; after so many it is not believed."""


def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CHANNEL|FILE|-",
            help="- is standard input. What exists as a file, has a slash or ends in .json or .jsonl is a file."
            " Everything else is a channel.",
            show_default=False,
        ),
    ],
    seq: Annotated[str, typer.Option(help="The field of the number; a.b is the field b in the object a.")] = "seq",
    sender: Annotated[str, typer.Option(help="The field of the sender's name; '' for a single sender.")] = "sender",
    epoch: Annotated[str, typer.Option(help="The field of the sender's life, if there is one; '' for none.")] = "epoch",
    time: Annotated[
        str, typer.Option(help="The field of the microseconds at which it was sent; '' for none.")
    ] = "time",
    first: Annotated[
        int | None,
        typer.Option(help="The number that each sender must begin with.", show_default="the lowest that comes"),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="How often to report what came since; 0s: only at the end.")
    ] = "10s",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes to the channel, until Ctrl-C.")
    ] = False,
    grace: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long what is missing at the end of a channel may still come."),
    ] = "2s",
    longest: Annotated[int, typer.Option(min=1, max=1 << 30, help="The bytes that a line may have.")] = 1 << 20,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Verify that no number is missing: per sender, whatever the order of arrival.

    Reads JSON lines such as {"seq": 1000, "sender": "sender1", "time": 0} from a file or standard input; of a channel,
    the headers of its records, or such a payload where they tell nothing, from its beginning to its end of now.
    A channel over tcp:// is what comes from now on, until Ctrl-C.

    Exits with 0 when all is whole, 1 when a number is missing, 2 when something could not be read or nothing came.
    """
    if not seq:
        raise Misconfigured("--seq", "without a number there is nothing to verify", "name the field of the number")
    clock, fields = SystemClock(), Fields(seq, sender, epoch, time)
    lapse, patience = parse_duration("--every", every).total_seconds(), parse_duration("--grace", grace).total_seconds()

    def verified(source: Stream | Log) -> IntegrityReport:
        return _verified(source, fields, Verifier(clock, first), clock, lapse, as_json)

    if what == "-":
        end = verified(Stream("standard input", 0, longest, clock, live=True))
    elif "/" in what or what.endswith((".json", ".jsonl")) or Path(what).exists():
        if follow:
            raise Misconfigured("--follow", "a file has an end", f"pipe it: tail -n +1 -f {what} | penstock verify -")
        try:
            file = Path(what).open("rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise Misconfigured(what, f"it cannot be read: {error.strerror}") from error
        with file:
            end = verified(Stream(what, file.fileno(), longest, clock, live=False))
    else:
        channels = _channels(what, folder, profile, servers)
        # What keeps nothing has no end of now: all of it is still to come.
        end = verified(Log(channels, what, clock, follow or not channels.promise.replay, patience))
    raise typer.Exit(EXIT_CODES[end.verdict])


def _verified(
    source: "Stream | Log", fields: Fields, verifier: Verifier, clock: Clock, lapse: float, as_json: bool
) -> IntegrityReport:
    """Feed the verifier, tell its reports as they are due, and the last one at the end, whatever ended it."""
    with stop_on_signals() as stop:
        due = clock.elapsed() + lapse
        try:
            for _ in source.feed(verifier, fields, stop):
                if lapse and clock.elapsed() >= due:
                    _tell(verifier.report(), as_json)
                    due += lapse * ((clock.elapsed() - due) // lapse + 1)
        except PenstockError as error:
            verifier.doubt(f"Reading broke off: {error}.")
        end = verifier.end()
        _tell(end, as_json)
    return end


def _tell(report: IntegrityReport, as_json: bool) -> None:
    screen, text = console(), StringIO()
    if not as_json:
        # The screen knows its width and colours by now; what it would do about a broken pipe is not for us.
        screen.file = text
        show(report, screen)
    # A report that cannot be written must not end with the code of a verdict.
    try:
        typer.echo(json.dumps(report.to_json()) if as_json else text.getvalue().rstrip("\n"))
    except OSError as error:
        raise Unavailable("standard output", error.strerror or str(error)) from error


def _channels(channel: str, folder: Path, profile: str | None, servers: str | None) -> Channels:
    """Where the channel lies; Misconfigured when nothing runs, or there is no such channel."""
    files = f"a file is written ./{channel}, or ends in .json or .jsonl"
    try:
        channels = found(folder, profile, servers)
        channels.bounds(channel)
    except Misconfigured as error:
        fix = f"{error.fix}, or tell where it is: --servers ADDRESS; {files}"
        raise Misconfigured(f"channel {channel}", f"{error.place}: {error.problem}", fix) from error
    except Unavailable as error:
        raise Misconfigured(f"channel {channel}", str(error), files) from error
    return channels


# --- sources: each feeds a verifier, pauses at least every second, and ends early once it is stopped ----------------


@dataclass(frozen=True)
class Stream:
    """JSON lines from an open file. A `live` one is read as it is written, so its lines arrive when they are read."""

    name: str
    descriptor: int
    longest: int
    clock: Clock
    live: bool

    def feed(self, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        """Give all lines to the verifier. Raises Unavailable when reading breaks off."""
        lines, read = Input(self.descriptor, self.longest, name=self.name), 0
        for portion in lines.portions(stop):
            arrived = self.clock.now() if self.live else None
            for line in portion:
                read += 1
                try:
                    if len(line) > self.longest:
                        raise Refused("a line", f"it is longer than {self.longest:,} bytes")
                    verifier.take(fields.read(line), arrived)
                except Refused as error:
                    if line.strip():
                        verifier.refuse(f"line {read}", error.reason)
            if not stop.is_set():
                yield
        # What came until a live stream was stopped is all of it; half a line is none.
        if not (self.live or lines.ended):
            verifier.doubt(f"{self.name} was not read to its end.")


@dataclass(frozen=True)
class Log:
    """The records of a channel, from its beginning to the end that it has now; or on and on, when they are followed.

    What is missing at the end may be on its way in another partition: it has `grace` seconds to come.
    """

    channels: Channels
    channel: str
    clock: Clock
    follow: bool = False
    grace: float = 2.0

    def feed(self, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        """Give all records to the verifier. Raises Unavailable when reading breaks off."""
        bounds = self.channels.bounds(self.channel)
        for partition, (low, _) in bounds.items():
            if low:
                verifier.note(f"Partition {partition} begins at offset {low}: what lay before is not kept any more.")
        with self.channels.reader({self.channel: {}}) as reader:
            if self.follow:
                while not stop.is_set():
                    for entry in reader.read(_MOST, _PAUSE):
                        _take(entry, fields, verifier)
                    yield
                ends = reader.positions(self.channel)
            else:
                ends = {partition: high for partition, (_, high) in bounds.items()}
                yield from self._to(ends, reader, verifier, fields, stop)
            until = self.clock.elapsed() + self.grace
            while verifier.fill() and self.clock.elapsed() < until:
                _pass(reader, ends, fields, verifier)
                yield

    def _to(self, ends: Offsets, reader: Reader, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        heard = self.clock.elapsed()
        while left := sum(max(0, end - reader.positions(self.channel)[part]) for part, end in ends.items()):
            if stop.is_set():
                verifier.doubt(f"{self.channel} was not read to its end: {left:,} offsets are left.")
                return
            if _pass(reader, ends, fields, verifier):
                heard = self.clock.elapsed()
            elif (silence := self.clock.elapsed() - heard) > _ASKED:
                self.channels.bounds(self.channel)  # Raises when the silence is that of a broker that is away.
                if silence > _SILENT:
                    raise incomplete_read(self.channel)
            yield


def _pass(reader: Reader, ends: Offsets, fields: Fields, verifier: Verifier) -> int:
    """Read some; what lies behind the ends can fill a gap, and no more."""
    entries = reader.read(_MOST, _PAUSE)
    for entry in entries:
        if entry.offset < ends[entry.partition]:
            _take(entry, fields, verifier)
        else:
            # What cannot be read there fills no gap.
            with suppress(Refused):
                verifier.set_aside(_origin(entry, fields))
    return len(entries)


def _take(entry: Entry, fields: Fields, verifier: Verifier) -> None:
    try:
        verifier.take(_origin(entry, fields), entry.appended)
    except Refused as error:
        verifier.refuse(f"partition {entry.partition}, offset {entry.offset}", error.reason)


def _origin(entry: Entry, fields: Fields) -> Origin:
    if (origin := Origin.of(entry.headers)) is not None:
        return origin
    if entry.value is None:
        raise Refused("a record", "it has neither headers that tell an origin nor a payload")
    return fields.read(entry.value)


# --- reports as text --------------------------------------------------------------------------------------------------


def show(report: IntegrityReport, screen: Console) -> None:
    """Print a report: a line for a lapse of time and a few for its new gaps; at the end, all that was found."""
    if not report.final:
        _say(screen, _lapse(report))
        _gaps(report, screen)
        return
    _senders(report.by_sender, screen)
    _gaps(report, screen)
    for place, reason in report.refused:
        _say(screen, f"{place} cannot be read: {printable(reason)}", style="yellow")
    if (more := report.unreadable - len(report.refused)) > 0:
        _say(screen, f"and {more:,} more cannot be read", style="yellow")
    for said in (*report.notes, *report.doubts):
        _say(screen, printable(said), style="yellow")
    _say(screen, f"{_arrived(report.lapse)}.")
    _say(screen, _verdict(report), style=_STYLES.get(report.verdict, "bold yellow"))


def _say(screen: Console, text: str, style: str = "") -> None:
    # A line stays one: other programs may read it, and terminals wrap by themselves.
    screen.print(Text(text, style=style), soft_wrap=True)


def _lapse(report: IntegrityReport) -> str:
    lapse, timestamp = report.lapse, datetime.fromtimestamp(report.at // 1_000_000, UTC)
    told = [f"{timestamp:%H:%M:%S} UTC: {_arrived(lapse)}"]
    if lapse.missing or lapse.healed or report.missing:
        told.append(f"{lapse.missing:,} newly missing, {lapse.healed:,} came late, {report.missing:,} missing now")
    if lapse.unreadable:
        told.append(f"{lapse.unreadable:,} cannot be read")
    return "; ".join(told)


def _arrived(lapse: Lapse) -> str:
    told = f"{counted(lapse.records, 'record')} in {lapse.seconds:,.1f} s"
    if lapse.rate:
        told += f", {lapse.rate:,.0f}/s"
    if (latency := lapse.latency) is not None:
        told += f"; latency {latency.min:,.1f} min, {latency.avg:,.1f} avg, {latency.max:,.1f} max ms"
    return told


def _senders(senders: Sequence[SenderCount], screen: Console) -> None:
    """A table of all where they are few; otherwise of the worst that are not clean."""
    unclean = [one for one in senders if not one.clean]
    worst = sorted(unclean, key=lambda one: (-one.missing, -one.doubled, -one.out_of_order))[:SHOWN]
    few = len(senders) <= SHOWN
    if shown := senders if few else worst:
        screen.print(_fitted(_table(shown), screen), crop=False)
    if len(unclean) > SHOWN:
        _say(screen, f"and {len(unclean) - SHOWN:,} more senders that miss, repeat or reorder")
    if not few:
        _say(screen, f"{len(senders) - len(unclean):,} senders are whole and in order")


def _table(senders: Sequence[SenderCount]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("sender", overflow="fold")
    epochs = ["epoch"] if any(one.epoch for one in senders) else []
    for title in (*epochs, "records", "first", "last", "missing", "doubled", "out of\norder"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in senders:
        # Numbers that name a record are written as the sender writes them.
        names = [*([str(one.epoch)] if epochs else ()), f"{one.records:,}", str(one.first), str(one.last)]
        missing = Text(f"{one.missing:,}", style="bold red" if one.missing else "")
        table.add_row(Text(printable(one.sender)), *names, missing, f"{one.doubled:,}", f"{one.out_of_order:,}")
    return table


def _fitted(table: Table, screen: Console) -> Table:
    """Long names are folded where the screen is narrow; numbers never. Rather too wide than without the names."""
    wide = screen.options.update(width=_WIDEST)
    whole, names = (Measurement.get(screen, wide, one).maximum for one in (table, Group(*table.columns[0].cells)))
    if whole > screen.width:
        kept = max(names - (whole - screen.width), min(names, _NAME))
        table.columns[0].width, table.width = kept, whole - names + kept
    return table


def _gaps(report: IntegrityReport, screen: Console) -> None:
    for gap in report.gaps[:SHOWN]:
        epoch = f"/{gap.epoch}" if gap.epoch else ""
        _say(screen, f"{printable(gap.sender)}{epoch} misses {gap.numbers}", style="red")
    if (more := len(report.gaps) - SHOWN) > 0:
        _say(screen, f"and {more:,} more ranges; --json names them all", style="red")


def _verdict(report: IntegrityReport) -> str:
    of = f"{counted(report.records, 'record')} of {counted(report.senders, 'sender')}"
    match report.verdict:
        case Integrity.LOSS:
            perhaps = "; they may be among what cannot be read" if report.unreadable else ""
            are = "record is" if report.missing == 1 else "records are"
            return f"Not whole: {report.missing:,} {are} missing beside {of}{perhaps}."
        case Integrity.UNCERTAIN if not report.records:
            return "Uncertain: nothing could be read."
        case Integrity.UNCERTAIN:
            return f"Uncertain: nothing is missing among {of}, but not everything could be read."
        case Integrity.NOTHING:
            return "Nothing to verify: there was no record."
        case Integrity.WHOLE:
            return f"Whole: nothing is missing among {of}."
