import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from pyspark.sql import SparkSession
from tests.operate.refusing import BEGIN, UNFIT, refused

from penstock.analysis.frames import RAW, dead_letters
from penstock.analysis.query import Shape
from penstock.core.clock import Micros
from penstock.core.contracts import Entry, Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin, Record
from penstock.operate.dead_letters import Selection, Verdict, redrive
from penstock.testing import ManualClock, MemoryChannels

ALL = Selection()


def verdicts(channels: MemoryChannels, chosen: Selection = ALL, into: str = "rsvps", dry: bool = False) -> list[str]:
    return [outcome.verdict for outcome in redrive(channels, "rsvps.dead", chosen, into, dry)]


def refuse_again(channels: MemoryChannels, entry: Entry) -> None:
    location = f"{entry.channel}:{entry.partition}:{entry.offset}"
    headers = [*entry.headers, ("reason", UNFIT.encode()), ("place", location.encode())]
    channels.append("rsvps.dead", entry.value, entry.key, headers)


def test_a_redriven_record_is_what_it_was_with_two_marks() -> None:
    channels = MemoryChannels()
    refused(channels, 7, b"{x", key=b"k", own=(("trace", b"t1"),))
    assert verdicts(channels) == ["sent"]
    (entry,) = channels.entries("rsvps")
    assert (entry.key, entry.value) == (b"k", b"{x")
    marks = [("trace", b"t1"), ("redriven", b"1"), ("from", b"rsvps.dead:0:0")]
    assert list(entry.headers) == [*Origin("kiosk", 1, 7, BEGIN).headers(), *marks]


def test_a_null_is_redriven_as_a_null() -> None:
    channels = MemoryChannels()
    refused(channels, 1, None, "its event time lies in the future", key=b"k")
    redrive(channels, "rsvps.dead", ALL, "rsvps")
    assert [(entry.key, entry.value) for entry in channels.entries("rsvps")] == [(b"k", None)]


def test_the_order_is_kept_over_many_batches() -> None:
    channels = MemoryChannels()
    for seq in range(1_300):
        refused(channels, seq, sender=f"s{seq % 3}")
    assert set(verdicts(channels)) == {"sent"}
    froms = [dict(entry.headers)["from"] for entry in channels.entries("rsvps")]
    assert froms == [b"rsvps.dead:0:%d" % offset for offset in range(1_300)]


def test_redriving_twice_is_redriving_once() -> None:
    channels = MemoryChannels(partitions=2)
    for seq in range(5):
        refused(channels, seq, key=b"k%d" % seq)
        refused(channels, None, key=b"k%d" % seq)
    assert set(verdicts(channels)) == {"sent"}
    assert set(verdicts(channels)) == {"redriven before"}
    assert len(channels.entries("rsvps")) == 10


def test_what_a_crash_left_behind_is_sent_by_the_next_call() -> None:
    channels = MemoryChannels()
    refused(channels, 1)
    refused(channels, 2)
    redrive(channels, "rsvps.dead", Selection(locations=frozenset({"rsvps.dead:0:0"})), "rsvps")
    assert verdicts(channels) == ["redriven before", "sent"]


def test_the_record_itself_in_the_channel_is_not_taken_for_a_redriven_one() -> None:
    channels = MemoryChannels()
    channels.append("rsvps", b"{", None, Origin("kiosk", 1, 7, BEGIN).headers())
    refused(channels, 7)
    assert verdicts(channels) == ["sent"]


def test_what_came_back_is_not_sent_again() -> None:
    channels = MemoryChannels()
    refused(channels, 7)
    refused(channels, None)
    redrive(channels, "rsvps.dead", ALL, "rsvps")
    for entry in channels.entries("rsvps"):
        refuse_again(channels, entry)
    before, before_too, back, back_too = redrive(channels, "rsvps.dead", ALL, "rsvps")
    assert {before.verdict, before_too.verdict} == {Verdict.BEFORE}
    assert {back.verdict, back_too.verdict} == {Verdict.BACK}
    assert back.letter == "rsvps.dead:0:2"
    assert back.why.endswith(UNFIT)
    assert len(channels.entries("rsvps")) == 2


def test_two_letters_of_one_record_are_one_record() -> None:
    """Spark may write a letter twice when it is killed; the second is known even when it is chosen alone."""
    channels = MemoryChannels()
    for _ in range(2):
        refused(channels, 7)
        refused(channels, None, location="rsvps:0:50")
    assert verdicts(channels) == ["sent", "sent", "redriven before", "redriven before"]
    assert verdicts(channels, Selection(locations=frozenset({"rsvps.dead:0:3"}))) == ["redriven before"]


def test_two_records_without_identity_are_two_though_a_new_channel_gave_them_one_place() -> None:
    channels = MemoryChannels()
    refused(channels, None, b"one", location="rsvps:0:50")
    refused(channels, None, b"two", location="rsvps:0:50")
    assert verdicts(channels) == ["sent", "sent"]


def test_a_record_that_was_kept_in_part_is_not_sent() -> None:
    channels = MemoryChannels()
    headers = [*Origin("feed", 2, 9, BEGIN).headers(), ("reason", b"it is too large"), ("size", b"70000")]
    channels.append("rsvps.dead", b"x" * 65_536, None, headers)
    (outcome,) = redrive(channels, "rsvps.dead", ALL, "rsvps")
    assert (outcome.verdict, outcome.why) == (Verdict.CUT, "only 65,536 of its 70,000 bytes were kept")
    assert not channels.entries("rsvps")


def test_a_dry_run_tells_the_same_and_sends_nothing() -> None:
    channels = MemoryChannels()
    refused(channels, 1)
    refused(channels, 1)
    refused(channels, 2, own=(("redriven", b"1"),))
    told = redrive(channels, "rsvps.dead", ALL, "rsvps", dry=True)
    assert not channels.entries("rsvps")
    assert told == redrive(channels, "rsvps.dead", ALL, "rsvps")
    assert [outcome.verdict for outcome in told] == ["sent", "redriven before", "came back"]


def test_another_channel_has_an_account_of_its_own() -> None:
    channels = MemoryChannels()
    refused(channels, 1)
    assert verdicts(channels, into="mended") == ["sent"]
    assert verdicts(channels, into="mended") == ["redriven before"]
    assert verdicts(channels) == ["sent"]


class _Choosy(MemoryChannels):
    """A channel that does not take what is large."""

    @asynccontextmanager
    async def sender(self) -> AsyncIterator["_Choosy"]:  # type: ignore[override]  # another sender than its parent's
        yield self

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        await asyncio.sleep(0)
        for record in records:
            if len(record.value or b"") > 10:
                raise Unavailable("Kafka", "Message size too large")
            self.append(channel, record.value, record.key, record.headers())


def test_one_that_the_channel_does_not_take_stops_no_other() -> None:
    channels = _Choosy()
    refused(channels, 1)
    refused(channels, 2, b"{" * 11)
    refused(channels, 3)
    outcomes = redrive(channels, "rsvps.dead", ALL, "rsvps")
    assert [outcome.verdict for outcome in outcomes] == ["sent", "failed", "sent"]
    assert outcomes[1].why == "Message size too large"
    assert len(channels.entries("rsvps")) == 2


def test_only_what_came_after_the_first_letter_of_a_chosen_record_is_read_of_the_channel() -> None:
    clock = ManualClock(BEGIN)
    channels = MemoryChannels(clock=clock)
    asked: list[tuple[str, Micros]] = []

    def since(channel: str, timestamp: Micros) -> Offsets:
        asked.append((channel, timestamp))
        return {}

    for seq in (1, 2, 3, 2):
        refused(channels, seq)
        clock.move(60)
    for offset in (2, 3):
        chosen = Selection(locations=frozenset({f"rsvps.dead:0:{offset}"}))
        redrive(channels, "rsvps.dead", chosen, "rsvps", since=since)
    hour = 3_600_000_000
    assert asked == [("rsvps", BEGIN + 120_000_000 - hour), ("rsvps", BEGIN + 60_000_000 - hour)]


def sift(spark: SparkSession, channels: MemoryChannels, entries: Sequence[Entry]) -> None:
    """What Spark does with a channel: its refusals become dead letters."""
    arrived = datetime.fromtimestamp(0, UTC)
    raw = [(e.key, e.value, e.channel, e.partition, e.offset, arrived, 0, list(e.headers)) for e in entries]
    found = dead_letters(spark.createDataFrame(raw, RAW), Shape("rsvps", "guests BIGINT"))
    for row in found.collect():
        headers = [(header["key"], bytes(header["value"])) for header in row["headers"]]
        value, key = (None if row[part] is None else bytes(row[part]) for part in ("value", "key"))
        channels.append("rsvps.dead", value, key, headers)


def test_what_spark_refuses_is_redriven_as_it_was_and_comes_back_once(spark: SparkSession) -> None:
    channels = MemoryChannels()
    origin = Origin("kiosk", 1, 7, BEGIN)
    channels.append("rsvps", b"{", b"k", [*origin.headers(), ("trace", b"t1")])
    channels.append("rsvps", None, None, Origin("kiosk", 1, 8, BEGIN).headers())
    first = channels.entries("rsvps")
    sift(spark, channels, first)
    assert verdicts(channels) == ["sent", "sent"]
    again = channels.entries("rsvps")[2:]
    for old, new in zip(first, again, strict=True):
        assert (new.key, new.value, new.headers[:-2]) == (old.key, old.value, old.headers)
    sift(spark, channels, again)
    assert verdicts(channels) == ["redriven before", "redriven before", "came back", "came back"]
    assert len(channels.entries("rsvps")) == 4


@pytest.mark.parametrize("location", ["rsvps.dead:0:2", "rsvps:0:99"])
def test_nothing_is_sent_when_one_of_the_places_holds_no_letter(location: str) -> None:
    channels = MemoryChannels()
    refused(channels, 1)
    refused(channels, 2)
    with pytest.raises(Misconfigured, match=f"there is no dead letter at {location.removeprefix('rsvps.dead:')}"):
        redrive(channels, "rsvps.dead", Selection(locations=frozenset({location, "rsvps.dead:0:1"})), "rsvps")
    assert not channels.entries("rsvps")


def test_of_an_empty_channel_nothing_is_sent() -> None:
    assert redrive(MemoryChannels(), "rsvps.dead", ALL, "rsvps") == []
