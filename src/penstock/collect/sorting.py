"""What becomes of an intake, without I/O: which records go into the channel, which are refused, which came before."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from penstock.collect.cursors import CHECKSUM, CURSOR, MARK, Known, Mark, mark_of
from penstock.collect.keys import key_of
from penstock.collect.numbering import Numbering, nobody
from penstock.collect.numbers import Numbers, in_runs
from penstock.core.clock import Micros
from penstock.core.contracts import Arrival, Intake
from penstock.core.record import Headers, Heartbeat, Origin, OutageInterval, Record
from penstock.core.runs import Runs

DEAD_BYTES = 64 << 10
"""How much of a refused payload is kept."""
SHED_RUNS = 500
"""So many runs of numbers are told at once: senders may have long names, and a channel takes no record that is huge."""
_MOST_SHED = 1_000_000


@dataclass
class Sorted:
    """The parts of an intake. Each arrival is in exactly one of `records`, `dead`, `shed` and `duplicates`."""

    records: list[Record] = field(default_factory=list)
    dead: list[Record] = field(default_factory=list)
    notices: list[Record] = field(default_factory=list)
    duplicates: int = 0
    numbers: Sequence[tuple[str, int, int, int]] = ()
    """The outside's numbers among all of them, as runs: sender, epoch, first, last."""
    last: int = 0
    """The last number that was given here, up to and including this intake."""
    cursors: list[Mark] = field(default_factory=list)
    """Where the source was at each arrival that has one, and that this life has not passed before."""
    shed: list[Origin] = field(default_factory=list)


@dataclass
class Sorting:
    """Numbers what has no number, passes over what was seen before, refuses what is too large."""

    into: str
    numbering: Numbering
    seen: Numbers
    key: str | Sequence[str] | None
    limit: int
    known: Known = field(default_factory=Known)
    others: Callable[[str], bool] = nobody
    """Which names belong to other collectors."""

    def sort(self, intake: Intake, now: Micros) -> Sorted:
        found = Sorted()
        runs = list(in_runs(intake.arrivals))
        found.numbers = [run for run in runs if self._is_outside(run[0])]
        coming, left, outside, fresh = iter(runs), 0, False, False
        for arrival in intake.arrivals:
            if not isinstance(arrival, Arrival):
                found.notices.append(notice(self.into, arrival))
                continue
            extra: Headers = ()
            if (origin := arrival.origin) is not None:
                if not left:
                    run = next(coming)
                    left, outside = run[3] - run[2] + 1, self._is_outside(run[0])
                    # Of a run that goes on after all that was seen, nothing came before.
                    fresh = outside and self.seen.extend(*run)
                left -= 1
            # Nobody outside may speak in the name of a collector: two records could then share an origin.
            if origin is None or not outside:
                if (cursor := arrival.cursor) is not None:
                    mark = mark_of(cursor, arrival.value, arrival.dedup_key)
                    if self.known.came(mark):
                        # The source was lost, and gives again what is on its way: that is no way back.
                        found.duplicates += 1
                        continue
                    found.cursors.append(mark)
                    if not self.known.add(mark):
                        found.duplicates += 1
                        continue
                    extra = ((CURSOR, cursor.encode(errors="surrogatepass")),)
                    if mark.own is not None:
                        extra = (*extra, (MARK, mark.own.encode(errors="surrogatepass")))
                origin = self.numbering.next(now)
            elif not fresh and not self.seen.add(origin.sender, origin.epoch, origin.seq):
                found.duplicates += 1
                continue
            if arrival.shed:
                found.shed.append(origin)
            else:
                self._keep(arrival, origin, extra, found)
        found.last = self.numbering.last
        if found.shed:
            found.notices += shed(self.into, found.shed)
        return found

    def _is_outside(self, sender: str) -> bool:
        return sender != self.numbering.sender and not self.others(sender)

    def _keep(self, arrival: Arrival, origin: Origin, extra: Headers, found: Sorted) -> None:
        value, reason, key = arrival.value, arrival.refused, None
        size = len(value)
        if reason is None:
            if self.key is not None and size <= self.limit:
                key = key_of(value, self.key)
            if (whole := size + len(key or b"")) <= self.limit:
                found.records.append(Record(value, origin, key, extra))
                return
            with_key = f" with its key of {len(key)}" if key else ""
            reason = f"it has {whole} bytes{with_key}, more than the {self.limit} that the channel takes"
        if extra and size > DEAD_BYTES:
            # By it the record is known when it comes again, for its beginning tells not all.
            extra = (*extra, (CHECKSUM, b"%d" % mark_of("", value).checksum))
        extra = (*extra, ("reason", reason.encode(errors="replace")), ("size", b"%d" % size))
        found.dead.append(Record(value[:DEAD_BYTES], origin, extra=extra))


def notice(channel: str, said: Heartbeat | OutageInterval) -> Record:
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
        case OutageInterval(source, since, until):
            who = source
            facts = {"kind": "blind", "channel": channel, "source": source, "since": since, "until": until}
    return Record(orjson.dumps(facts), key=who.encode())


def shed(channel: str, origins: Sequence[Origin]) -> Iterator[Record]:
    """Which records were dropped on purpose, as it lies in the heartbeats channel: their numbers, as runs."""
    runs: dict[tuple[str, int], Runs] = {}
    for origin in origins:
        runs.setdefault((origin.sender, origin.epoch), Runs()).add(origin.seq)
    told = [[*who, first, last] for who, found in runs.items() for first, last in found]
    for at in range(0, len(told), SHED_RUNS):
        facts = {"kind": "shed", "channel": channel, "runs": told[at : at + SHED_RUNS]}
        yield Record(orjson.dumps(facts), key=origins[0].sender.encode())


def shed_by(sender: str, channel: str, value: bytes | None) -> Iterator[tuple[int, int]]:
    """Of what lies in the heartbeats channel: (epoch, number) of each record of a sender that was so dropped."""
    try:
        told = orjson.loads(value or b"")
        if told["kind"] == "shed" and told["channel"] == channel:
            runs = [(epoch, range(first, last + 1)) for who, epoch, first, last in told["runs"] if who == sender]
            for epoch, numbers in runs:
                # The next life has a number, too.
                if type(epoch) is int and 0 <= epoch < 2**63 - 1:
                    yield from ((epoch, number) for number in numbers[:_MOST_SHED])
    except (ValueError, KeyError, TypeError):
        # Anybody could have written it: the audit tells.
        return
