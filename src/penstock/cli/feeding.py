"""The ways into a verifier: a stream of JSON lines, or a channel.

Each feeds it bit by bit and pauses often, so that reports and signals have their turn.
"""

import os
import select
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from penstock.audit.updates import Fields, Update
from penstock.audit.verify import Verifier
from penstock.cli.standard import Lines
from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Entry, Positions, Reader
from penstock.core.errors import Refused, Unavailable
from penstock.core.held import withheld
from penstock.core.record import Origin

_CHUNK = 1 << 18
_MOST = 10_000
_PAUSE = 0.2
_ASKED, _SILENT = 5.0, 30.0
"""After so many seconds of silence a channel is asked whether it is there; after so many it is not believed."""


class Feeding(Protocol):
    def feed(self, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        """Give all that there is to the verifier, with a pause at least every second; end early once `stop` is set.

        What was not read then, and should have been, is a doubt. Raises Unavailable when reading breaks off.
        """


@dataclass(frozen=True)
class Stream:
    """JSON lines from an open file. A `live` one is read as it is written, so its lines arrive when they are read."""

    name: str
    descriptor: int
    longest: int
    clock: Clock
    live: bool

    def feed(self, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
        lines, read, more = Lines(self.longest), 0, True
        while more:
            if stop.is_set():
                # Who ends a live stream has all of it; half a line is none.
                if not self.live:
                    verifier.doubt(f"{self.name} was not read to its end.")
                return
            if (chunk := self._read()) is not None:
                more = bool(chunk)
                arrived = self.clock.now() if self.live else None
                for line in lines.cut(chunk) if more else lines.end():
                    read += 1
                    try:
                        if len(line) > self.longest:
                            raise Refused("a line", f"it is longer than {self.longest:,} bytes")
                        verifier.take(fields.read(line), arrived)
                    except Refused as error:
                        if line.strip():
                            verifier.refuse(f"line {read}", error.reason)
            yield

    def _read(self) -> bytes | None:
        """A chunk, which is empty at the end; None when there is none yet."""
        try:
            ready, _, _ = select.select([self.descriptor], [], [], _PAUSE)
            return os.read(self.descriptor, _CHUNK) if ready else None
        except OSError as error:
            raise Unavailable(self.name, error.strerror or str(error)) from error


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

    def _to(self, ends: Positions, reader: Reader, verifier: Verifier, fields: Fields, stop: Event) -> Iterator[None]:
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
                    raise withheld(self.channel)
            yield


def _pass(reader: Reader, ends: Positions, fields: Fields, verifier: Verifier) -> int:
    """Read some; what lies behind the ends can fill a gap, and no more."""
    entries = reader.read(_MOST, _PAUSE)
    for entry in entries:
        if entry.offset < ends[entry.partition]:
            _take(entry, fields, verifier)
        else:
            # What cannot be read there fills no gap.
            with suppress(Refused):
                verifier.set_aside(_update(entry, fields))
    return len(entries)


def _take(entry: Entry, fields: Fields, verifier: Verifier) -> None:
    try:
        verifier.take(_update(entry, fields), entry.appended)
    except Refused as error:
        verifier.refuse(f"partition {entry.partition}, offset {entry.offset}", error.reason)


def _update(entry: Entry, fields: Fields) -> Update:
    if (origin := Origin.of(entry.headers)) is not None:
        return Update(origin.seq, origin.sender, origin.epoch, origin.time)
    if entry.value is None:
        raise Refused("a record", "it has neither headers that tell an origin nor a payload")
    return fields.read(entry.value)
