"""What becomes of an intake, without I/O: which records go into the channel, which are refused, which came before."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from penstock.clock import Micros
from penstock.collect.keys import key_of
from penstock.collect.numbering import Numbering
from penstock.collect.numbers import Numbers
from penstock.contracts import Arrival, Intake
from penstock.record import Blind, Heartbeat, Origin, Record

DEAD_BYTES = 64 << 10
"""How much of a refused payload is kept."""


@dataclass
class Sorted:
    """The parts of an intake. Each arrival is in exactly one of `records`, `dead` and `duplicates`."""

    records: list[Record] = field(default_factory=list)
    dead: list[Record] = field(default_factory=list)
    notices: list[Record] = field(default_factory=list)
    duplicates: int = 0
    numbers: list[Origin] = field(default_factory=list)
    """The outside's numbers among records and dead."""
    last: int = 0
    """The last number that was given here, up to and including this intake."""


@dataclass
class Sorting:
    """Numbers what has no number, passes over what was seen before, refuses what is too large."""

    into: str
    numbering: Numbering
    seen: Numbers
    key: str | Sequence[str] | None
    limit: int

    def sort(self, intake: Intake, now: Micros) -> Sorted:
        found = Sorted()
        for arrival in intake.arrivals:
            if isinstance(arrival, Arrival):
                self._sort(arrival, now, found)
            else:
                found.notices.append(notice(self.into, arrival))
        found.last = self.numbering.last
        return found

    def _sort(self, arrival: Arrival, now: Micros, found: Sorted) -> None:
        origin = arrival.origin
        # Nobody outside may speak in the collector's own name: two records could then share an origin.
        if origin is None or origin.sender == self.numbering.sender:
            origin = self.numbering.next(now)
        elif origin in self.seen:
            found.duplicates += 1
            return
        else:
            self.seen.add(origin.sender, origin.epoch, origin.seq)
            found.numbers.append(origin)
        size = len(arrival.value)
        key = key_of(arrival.value, self.key) if size <= self.limit else None
        if size + len(key or b"") > self.limit:
            reason = f"it has {size} bytes, more than the {self.limit} that the channel takes"
            extra = (("reason", reason.encode()), ("size", b"%d" % size))
            found.dead.append(Record(arrival.value[:DEAD_BYTES], origin, extra=extra))
        else:
            found.records.append(Record(arrival.value, origin, key))


def notice(channel: str, said: Heartbeat | Blind) -> Record:
    """A heartbeat or a blind interval, as it lies in the heartbeats channel."""
    match said:
        case Heartbeat(sender, epoch, seq, time):
            who = sender
            facts = {
                "kind": "heartbeat",
                "channel": channel,
                "sender": sender,
                "epoch": epoch,
                "seq": seq,
                "time": time,
            }
        case Blind(source, since, until):
            who = source
            facts = {"kind": "blind", "channel": channel, "source": source, "since": since, "until": until}
    return Record(orjson.dumps(facts), key=who.encode())
