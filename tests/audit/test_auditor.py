import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.audit.auditor import Auditor
from penstock.audit.balance import Balance, balance
from penstock.audit.findings import Findings, Kind, Watched, reduced
from penstock.audit.hops import Gap
from penstock.audit.ledger import Ledger
from penstock.audit.writers import WriterTokens
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.testing import ManualClock, MemoryChannels

WATCHED = [Watched("rsvps", Kind.SOURCE), Watched("rsvps.dead", Kind.DEAD), Watched("by_country", Kind.RESULT)]
NOTES = "penstock.test.heartbeats"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now=1_000_000_000)


@pytest.fixture
def channels(clock: ManualClock) -> MemoryChannels:
    return MemoryChannels(partitions=3, clock=clock)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def send(channels: MemoryChannels, seqs: Sequence[int], sender: str = "a", channel: str = "rsvps") -> None:
    for seq in seqs:
        channels.append(channel, b"{}", b"%d" % (seq % 7), Origin(sender, 1, seq, 1_000_000_000).headers())


def settled(ledger: Ledger, clock: ManualClock) -> Balance:
    return balance(ledger.content(), clock.now(), grace=0)


def read_all(auditor: Auditor) -> int:
    total = 0
    while some := auditor.step(0):
        total += some
    return total


def test_a_gap_is_missing_once_all_was_read_that_came_before_it_was_noticed(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known at once whether a reader has read all: at the first look after the last record it may not be."""
    ages = [0.0]
    monkeypatch.setattr("penstock.channels.log_reader.LogReader.age", lambda self: ages[0])
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock)

    def found() -> tuple[int, int]:
        channel = settled(ledger, clock).channels[0]
        return channel.missing, channel.in_flight

    send(channels, [1, 2])
    read_all(auditor)
    clock.move(60)
    ages[0] = 5.0
    send(channels, [7])
    read_all(auditor)
    assert found() == (0, 4)
    clock.move(1)
    auditor.step(0)
    assert found() == (0, 4)
    ages[0] = 0.0
    auditor.step(0)
    assert found() == (4, 0)


def test_everything_is_counted_whatever_its_order(channels: MemoryChannels, ledger: Ledger, clock: ManualClock) -> None:
    seqs = list(range(1000, 1500))
    random.Random(3).shuffle(seqs)
    send(channels, seqs)
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, most=37)
    assert read_all(auditor) == 500
    auditor.close()
    found = settled(ledger, clock)
    assert found.whole
    assert found.channels[0].distinct == found.channels[0].records == 500


@pytest.mark.parametrize("seed", range(5))
def test_what_is_dropped_or_doubled_is_named(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock, seed: int
) -> None:
    """The auditor is itself tested by mutation."""
    chance = random.Random(seed)
    seqs = list(range(1, 300))
    dropped, doubled = sorted(chance.sample(seqs[1:-1], 2))
    mutated = [seq for seq in seqs if seq != dropped] + [doubled]
    chance.shuffle(mutated)
    send(channels, mutated)
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, most=11)
    read_all(auditor)
    auditor.close()
    rsvps = settled(ledger, clock).channels[0]
    assert rsvps.gaps == (Gap("a", 1, dropped, dropped),)
    assert rsvps.duplicates == 1


def test_an_auditor_goes_on_where_the_ledger_stands(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    """Auditors that die after any step count every entry once together."""
    send(channels, range(1, 200))
    total = 0
    for _ in range(30):
        auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, most=7)
        total += auditor.step(0)
        auditor.close()
    assert total == 199
    rsvps = settled(ledger, clock).channels[0]
    assert (rsvps.records, rsvps.distinct, rsvps.duplicates) == (199, 199, 0)


def test_two_auditors_do_not_count_twice(channels: MemoryChannels, ledger: Ledger, clock: ManualClock) -> None:
    one, two = (Auditor(channels, ledger, WATCHED, NOTES, clock, most=10) for _ in range(2))
    send(channels, range(1, 100))
    assert (one.step(0), two.step(0)) == (10, 10)
    with pytest.raises(Unavailable, match="this ledger"):
        read_all(one)
    read_all(one)
    two.close()
    one.close()
    rsvps = settled(ledger, clock).channels[0]
    assert (rsvps.records, rsvps.duplicates) == (99, 0)


def test_a_lost_tail_is_in_flight_and_then_missing(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    send(channels, range(1, 6))
    note = {"kind": "heartbeat", "sender": "a", "epoch": 1, "seq": 8, "time": 0}
    channels.append(NOTES, json.dumps(note).encode())
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock)
    read_all(auditor)
    assert balance(ledger.content(), clock.now()).channels[0].in_flight == 3
    clock.move(11)
    assert balance(ledger.content(), clock.now()).channels[0].gaps == (Gap("a", 1, 6, 8),)
    send(channels, [6, 7, 8])
    read_all(auditor)
    auditor.close()
    assert balance(ledger.content(), clock.now()).whole


def test_an_auditor_that_was_away_calls_nothing_missing_while_it_catches_up(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    note = {"kind": "heartbeat", "channel": "rsvps", "sender": "a", "epoch": 1, "seq": 8, "time": 0}
    send(channels, range(1, 9))
    channels.append(NOTES, json.dumps(note).encode())
    clock.move(3_600)
    # One that reads the notes before the records, as partitions of different length may be read.
    ahead = Auditor(channels, ledger, [], NOTES, clock)
    read_all(ahead)
    ahead.close()
    behind = Auditor(channels, ledger, WATCHED, NOTES, clock, most=1)
    while behind.step(0):
        assert balance(ledger.content(), clock.now()).whole
    behind.close()
    found = balance(ledger.content(), clock.now())
    assert (found.settled, found.channels[0].distinct) == (True, 8)


def test_payloads_are_never_parsed(channels: MemoryChannels, ledger: Ledger, clock: ManualClock) -> None:
    channels.append("rsvps", b"\xff[[[", None, Origin("a", 1, 1, 0).headers())
    channels.append("rsvps", None, None, [("seq", b"?")])
    channels.append(NOTES, b"\xff")
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock)
    assert read_all(auditor) == 3
    auditor.close()
    assert settled(ledger, clock).channels[0].without_identity == 1


def test_refused_records_are_found_in_the_dead_letters(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    send(channels, range(1, 10))
    send(channels, [3, 3, 7], channel="rsvps.dead")
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock)
    read_all(auditor)
    auditor.close()
    assert settled(ledger, clock).channels[0].refused == 2


def test_another_channel_of_the_same_name_is_not_read_on(ledger: Ledger, clock: ManualClock) -> None:
    channels = MemoryChannels(clock=clock)
    send(channels, range(1, 10))
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock)
    read_all(auditor)
    auditor.close()
    with pytest.raises(Misconfigured, match="created again, or has lost its last records; move the ledger away"):
        Auditor(MemoryChannels(clock=clock), ledger, WATCHED, NOTES, clock).step(0)


class Flaky(MemoryChannels):
    """Channels whose broker is away at each fortieth look, the first among them."""

    looks = 0

    def bounds(self, channel: str) -> dict[int, tuple[int, int]]:
        self.looks += 1
        if self.looks % 40 == 1:
            raise Unavailable("the broker", "it restarts", retry_after=0)
        return dict(super().bounds(channel))


def test_it_runs_until_it_is_stopped_and_waits_for_who_is_away(tmp_path: Path, clock: ManualClock) -> None:
    channels = Flaky(clock=clock)
    ledger = Ledger(tmp_path / "ledger.db")
    send(channels, range(1, 10))
    stop = threading.Event()
    thread = threading.Thread(target=Auditor(channels, ledger, WATCHED, NOTES, clock).run, args=(stop, 0.05))
    ledger.watch(WATCHED)
    thread.start()
    send(channels, range(10, 20))
    reader = Ledger(tmp_path / "ledger.db", read_only=True)
    tries = 0
    while (settled(reader, clock).channels[0].distinct < 19 or channels.looks <= 41) and tries < 1_000:
        tries += 1
        threading.Event().wait(0.005)
    stop.set()
    thread.join(5)
    assert settled(reader, clock).channels[0].distinct == 19
    assert channels.looks > 41
    assert not thread.is_alive()
    reader.close()
    ledger.close()


class InOneGo:
    """A reduction that reads what it is asked for."""

    def __init__(self, channels: MemoryChannels) -> None:
        self.channels = channels
        self.asked = 0

    def reduce(
        self,
        start: Mapping[str, Offsets],
        end: Mapping[str, Offsets],
        kinds: Mapping[str, Kind],
        writers: WriterTokens | None = None,
    ) -> Findings:
        self.asked += 1
        entries = [
            entry
            for channel, positions in end.items()
            for entry in self.channels.entries(channel)
            if start[channel].get(entry.partition, 0) <= entry.offset < positions.get(entry.partition, 0)
        ]
        return reduced(entries, start, end, kinds, writers=writers)


def test_steps_and_catching_up_follow_each_other(channels: MemoryChannels, ledger: Ledger, clock: ManualClock) -> None:
    reduction = InOneGo(channels)
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, most=7)
    for turn in range(5):
        send(channels, range(100 * turn + 1, 100 * turn + 101))
        auditor.step(0)
        assert auditor.catch_up(reduction) == 0
    auditor.close()
    assert reduction.asked == 5
    found = settled(ledger, clock)
    assert found.whole
    assert found.channels[0].records == found.channels[0].distinct == 500


def test_what_is_far_behind_is_left_to_the_reduction(tmp_path: Path, clock: ManualClock) -> None:
    channels, ledger = MemoryChannels(partitions=2, clock=clock), Ledger(tmp_path / "ledger.db")
    send(channels, range(1, 2_001))
    reduction, stop = InOneGo(channels), threading.Event()
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, most=50)
    thread = threading.Thread(target=auditor.run, args=(stop, 0.01, 0.01, lambda: reduction, 100))
    thread.start()
    for _ in range(1_000):
        if auditor.behind() == 0:
            break
        threading.Event().wait(0.005)
    stop.set()
    thread.join(5)
    assert reduction.asked == 1
    assert settled(ledger, clock).channels[0].distinct == 2_000
    ledger.close()


def test_a_stretch_that_somebody_else_merged_is_not_counted_again(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    class Slow(InOneGo):
        def reduce(
            self,
            start: Mapping[str, Offsets],
            end: Mapping[str, Offsets],
            kinds: Mapping[str, Kind],
            writers: WriterTokens | None = None,
        ) -> Findings:
            found = super().reduce(start, end, kinds, writers)
            read_all(Auditor(channels, ledger, WATCHED, NOTES, clock))
            return found

    send(channels, range(1, 50))
    with pytest.raises(Unavailable, match="this ledger"):
        Auditor(channels, ledger, WATCHED, NOTES, clock).catch_up(Slow(channels))
    assert settled(ledger, clock).channels[0].records == 49


def test_while_it_catches_up_nothing_is_called_missing(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    send(channels, range(1, 101))
    send(channels, range(102, 201))
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, most=10)
    for _ in range(19):
        auditor.step(0)
        assert settled(ledger, clock).whole
    read_all(auditor)
    assert settled(ledger, clock).missing == 1


def test_a_lost_tail_is_found_when_a_reduction_reads_alone(tmp_path: Path, clock: ManualClock) -> None:
    channels, ledger = MemoryChannels(partitions=2, clock=clock), Ledger(tmp_path / "ledger.db")
    send(channels, range(1, 6))
    reduction, stop = InOneGo(channels), threading.Event()
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock, catch_up_only=True)
    thread = threading.Thread(target=auditor.run, args=(stop, 0.01, 0.01, lambda: reduction, 0))
    thread.start()
    for _ in range(1_000):
        if auditor.behind() == 0:
            break
        threading.Event().wait(0.005)
    claim = {"kind": "heartbeat", "channel": "rsvps", "sender": "a", "epoch": 1, "seq": 8, "time": 1}
    channels.append(NOTES, json.dumps(claim).encode())
    for _ in range(1_000):
        if not settled(ledger, clock).whole:
            break
        threading.Event().wait(0.005)
    stop.set()
    thread.join(5)
    assert settled(ledger, clock).channels[0].gaps == (Gap("a", 1, 6, 8),)
    ledger.close()


def test_numbers_that_somebody_made_up_are_named_and_hide_nothing(
    channels: MemoryChannels, ledger: Ledger, clock: ManualClock
) -> None:
    """Whoever can write to the channels: records and claims at both ends of 64 bits, and in between."""
    auditor = Auditor(channels, ledger, WATCHED, NOTES, clock)
    send(channels, [1, 2, 4, 2**62, 2**63 - 1, -(2**63), -7])
    for seq in (5, 2**62 + 1, 2**63 - 1):
        claim = {"kind": "heartbeat", "channel": "rsvps", "sender": "a", "epoch": 1, "seq": seq, "time": 0}
        channels.append(NOTES, json.dumps(claim).encode())
    read_all(auditor)
    clock.move(60)
    auditor.step(0)
    found = settled(ledger, clock)
    rsvps = found.channels[0]
    assert [(gap.first, gap.last) for gap in rsvps.gaps] == [(-6, 0), (3, 3), (5, 5), (2**62 + 1, 2**62 + 1)]
    assert [(jump.before, jump.after) for jump in rsvps.jumps] == [(-(2**63), -7), (4, 2**62), (2**62, 2**63 - 1)]
    assert [(one.kind, one.count) for one in found.discrepancies] == [("unexplained", 3)]
    assert found.missing == rsvps.missing == 10


def test_what_cannot_be_read_is_told_for_a_while(ledger: Ledger, clock: ManualClock) -> None:
    class Damaged(MemoryChannels):
        def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
            stop.set()
            raise Unavailable(f"the channel {channel}", "its log is damaged")

    stop = threading.Event()
    auditor = Auditor(Damaged(clock=clock), ledger, WATCHED, NOTES, clock)
    assert auditor.recent_error() is None
    auditor.run(stop)
    error = auditor.recent_error()
    assert error is not None
    assert (error.reason, error.retry_after) == ("its log is damaged", None)
    clock.move(60)
    assert auditor.recent_error() is None
