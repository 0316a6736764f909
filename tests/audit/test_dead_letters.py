"""Dead letters that something else than Penstock wrote, and refused records that have none."""

import pytest

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.dead_letters import DeadLetterCheck
from penstock.audit.judge import Discrepancy
from penstock.channels.memory import MemoryChannels
from penstock.core.contracts import Topic
from penstock.core.record import Headers, Origin
from penstock.testing import ManualClock

NAME, DEAD, QUERY = "rsvps", "rsvps.dead", "query:by_country"
UNFIT = ("reason", b"the value is null")


class Bench:
    """A channel, its dead letters, and a query that refuses some records."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.channels = MemoryChannels(clock=self.clock)
        self.channels.ensure([Topic(NAME), Topic(DEAD)])
        self.accounts: dict[str, Account] = {}
        self.generation, self.refused = "a", 0
        self.check = self.made()

    def made(self) -> DeadLetterCheck:
        return DeadLetterCheck(NAME, DEAD, self.channels, lambda: self.accounts, self.clock)

    def records(self, number: int, refused: int = 0, letters: int | None = None) -> None:
        """Append records; the query refuses the first ones, and so many of them get a dead letter."""
        for at in range(number):
            entry = self.channels.append(NAME, b'{"n": %d}' % at, None, Origin("kiosk", 1, at, 0).headers())
            if at < (refused if letters is None else letters):
                self.letter(entry.value, entry.offset, entry.headers)
        self.refused += refused
        end = self.channels.bounds(NAME)[0][1]
        outcomes = {Outcome.PASSED: end - self.refused, Outcome.REFUSED: self.refused}
        share = Share({0: 0}, {0: end}, end, outcomes)
        self.accounts[QUERY] = Account(QUERY, self.generation, self.clock.now(), {NAME: share}, step=end)

    def letter(self, value: bytes | None, offset: int, headers: Headers = (), *more: tuple[str, bytes]) -> None:
        location = ("place", b"rsvps:0:%d" % offset)
        self.channels.append(DEAD, value, None, [*headers, UNFIT, location, *more])

    def found(self) -> tuple[Discrepancy, ...]:
        """The findings after some minutes."""
        for _ in range(10):
            self.check.turn()
            self.clock.move(30)
        assert self.check.complete
        return self.check.discrepancies()


def test_dead_letters_of_penstock_are_no_finding() -> None:
    bench = Bench()
    bench.records(10, refused=3)
    assert bench.found() == ()
    bench.records(10, refused=2)
    size = ("size", b"3")
    bench.channels.append(DEAD, b"too", None, [*Origin("kiosk", 1, 99, 0).headers(), UNFIT, size])
    late = [("reason", b"late: its window was closed"), ("place", b"rsvps:0:7"), ("query", b"by_country")]
    bench.channels.append(DEAD, b'{"n": 7}', None, late)
    assert bench.found() == ()


def test_a_record_written_by_hand_is_forged() -> None:
    bench = Bench()
    bench.records(10, refused=3)
    bench.channels.append(DEAD, b"hello", b"k")
    (found,) = bench.found()
    assert (found.kind, found.stage, found.count) == ("forged", f"channel:{DEAD}", 1)
    assert found.examples == ("partition 0, offset 3, key k",)
    bench.channels.append(DEAD, b"hello", b"k", [UNFIT, ("size", b"5")])
    bench.channels.append(DEAD, b"hello", b"k", [UNFIT, ("place", b"others:0:1")])
    bench.channels.append(DEAD, b"hello", b"k", [("reason", b"late: "), ("place", b"rsvps:0:1")])
    (found,) = bench.found()
    assert found.count == 4


def test_a_letter_that_is_no_copy_of_its_record_is_forged() -> None:
    bench = Bench()
    bench.records(10)
    assert bench.found() == ()
    bench.letter(b'{"n": 1000}', 4)
    bench.letter(b'{"n": 1000}', 1_000)
    assert {one.kind for one in bench.found()} == {"forged"}
    assert bench.check.discrepancies()[0].count == 2
    bench.check = bench.made()
    assert bench.found()[0].count == 2


def test_a_copy_of_a_record_that_was_not_refused_is_forged() -> None:
    bench = Bench()
    bench.records(10, refused=1)
    assert bench.found() == ()
    bench.records(10)
    bench.letter(b'{"n": 4}', 14, Origin("kiosk", 1, 4, 0).headers())
    (found,) = bench.found()
    assert (found.kind, found.count) == ("forged", 1)


def test_a_refused_record_without_its_letter_is_missing_after_some_time() -> None:
    bench = Bench()
    bench.records(10, refused=3)
    assert bench.found() == ()
    bench.records(10, refused=3, letters=1)
    bench.check.turn()
    assert bench.check.discrepancies() == ()
    (found,) = bench.found()
    assert (found.kind, found.stage, found.count) == ("missing", f"channel:{DEAD}", 2)
    for offset in (11, 12):
        bench.letter(b'{"n": %d}' % (offset - 10), offset)
    assert bench.found() == ()


@pytest.mark.parametrize("location", [b"rsvps:0:" + b"9" * 5_000, b"rsvps:" + b"9" * 5_000 + b":0"])
def test_a_letter_with_an_overlong_place_is_forged(location: bytes) -> None:
    bench = Bench()
    bench.records(10, refused=3)
    bench.channels.append(DEAD, b"hello", b"k", [UNFIT, ("place", location)])
    (found,) = bench.found()
    assert (found.kind, found.count) == ("forged", 1)


def test_a_missing_letter_is_found_after_all_letters_of_its_partition_were_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.audit.dead_letters.MOST", 2)
    bench = Bench()
    bench.records(10, refused=3)
    assert bench.found() == ()
    bench.records(10, refused=3, letters=0)
    (found,) = bench.found()
    assert (found.kind, found.count) == ("missing", 3)


def test_letters_of_an_earlier_generation_or_channel_are_no_finding() -> None:
    bench = Bench()
    bench.records(10, refused=3)
    assert bench.found() == ()
    # The schema is looser now: the query reads its channel again and refuses nothing.
    bench.generation, bench.refused = "b", 0
    bench.records(10)
    assert bench.found() == ()
    # The channel is made anew, its dead letters are kept.
    again = Bench()
    again.letter(b"x", 5)
    again.letter(b"x", 500)
    again.clock.move(3_600)
    again.records(10)
    assert again.found() == ()
