"""The ways into a verifier: pipes and files, and channels whose other end goes on."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
from confluent_kafka import Producer
from tests.audit.odd import Marked, Mute

from penstock.audit.hops import Gap
from penstock.audit.verify import Fields, Integrity, IntegrityReport, Verifier
from penstock.channels.kafka import Kafka
from penstock.cli.verify import Log, Stream
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Origin
from penstock.testing import ManualClock, MemoryChannels

Fresh = Callable[[str], str]


def begun(source: Stream | Log, stop: Event | None = None) -> tuple[Verifier, Iterator[None]]:
    verifier = Verifier(ManualClock())
    return verifier, source.feed(verifier, Fields(), stop or Event())


def fed(source: Stream | Log) -> IntegrityReport:
    verifier, feed = begun(source)
    for _ in feed:
        pass
    return verifier.end()


def append(channels: MemoryChannels, *seqs: int, key: bytes | None = None) -> None:
    for seq in seqs:
        channels.append("updates", b"{}", key, Origin("a", 1, seq, 0).headers())


# --- lines ------------------------------------------------------------------------------------------------------------


def written(path: Path, content: bytes, longest: int = 1_000) -> IntegrityReport:
    path.write_bytes(content)
    with path.open("rb") as file:
        return fed(Stream("some.jsonl", file.fileno(), longest, ManualClock(), live=False))


def line(seq: int) -> bytes:
    return b'{"seq": %d, "sender": "a", "time": 1699999999990000}\n' % seq


def test_empty_lines_and_other_line_ends_do_no_harm(tmp_path: Path) -> None:
    report = written(
        tmp_path / "f", b"\xef\xbb\xbf" + line(1) + b"\n \r\n" + line(2).replace(b"\n", b"\r\n") + line(3)[:-1]
    )
    assert (report.verdict, report.records) == (Integrity.WHOLE, 3)


def test_what_cannot_be_read_is_named_with_its_line_and_reading_goes_on(tmp_path: Path) -> None:
    report = written(tmp_path / "f", line(1) + b"\n{\xff}\n" + b"x" * 2_000 + b"\n" + line(2))
    assert (report.verdict, report.records, report.unreadable) == (Integrity.UNCERTAIN, 2, 2)
    assert [location for location, _ in report.refused] == ["line 3", "line 4"]
    assert report.refused[1][1] == "it is longer than 1,000 bytes"


def test_a_line_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    longest = len(line(1)) - 1
    assert written(tmp_path / "f", line(1), longest).verdict is Integrity.WHOLE
    assert written(tmp_path / "f", line(1), longest - 1).unreadable == 1


def test_a_line_without_end_is_one_line(tmp_path: Path) -> None:
    assert written(tmp_path / "f", b"x" * 3_000_000).unreadable == 1


def test_the_lines_of_a_file_have_no_arrival_and_those_of_a_pipe_do(tmp_path: Path) -> None:
    assert written(tmp_path / "f", line(1)).lapse.latency is None
    with (tmp_path / "f").open("rb") as file:
        latency = fed(Stream("standard input", file.fileno(), 1_000, ManualClock(), live=True)).lapse.latency
    assert latency is not None
    assert (latency["count"], latency["max"]) == (1, 10.0)


def test_a_pipe_that_is_silent_gives_others_their_turn_and_half_a_line_is_none() -> None:
    reading, writing = os.pipe()
    stop = Event()
    verifier, feed = begun(Stream("standard input", reading, 1_000, ManualClock(), live=True), stop)
    os.write(writing, line(1) + b'{"seq": 2')
    for _ in range(3):
        next(feed)
    stop.set()
    assert list(feed) == []
    assert verifier.end().verdict is Integrity.WHOLE
    os.close(reading)
    os.close(writing)


def test_a_file_that_was_not_read_to_its_end_is_doubtful(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"".join(map(line, range(10_000))))
    with (tmp_path / "f").open("rb") as file:
        stop = Event()
        verifier, feed = begun(Stream("some.jsonl", file.fileno(), 1_000, ManualClock(), live=False), stop)
        next(feed)
        stop.set()
        assert list(feed) == []
    end = verifier.end()
    assert (end.verdict, end.doubts) == (Integrity.UNCERTAIN, ("some.jsonl was not read to its end.",))
    assert 0 < end.records < 10_000


def test_a_stream_that_breaks_is_unavailable() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(Unavailable, match="standard input is unavailable: Bad file descriptor"):
        fed(Stream("standard input", reading, 1_000, ManualClock(), live=True))


# --- channels ---------------------------------------------------------------------------------------------------------


def test_a_record_is_known_by_its_headers_and_where_it_has_none_by_its_payload() -> None:
    channels = MemoryChannels()
    append(channels, 1, 2)
    channels.append("updates", b'{"seq": 3, "sender": "a", "epoch": 1}')
    report = fed(Log(channels, "updates", ManualClock()))
    assert (report.verdict, report.senders, report.records) == (Integrity.WHOLE, 1, 3)


def test_records_that_tell_no_origin_are_named_with_their_offset() -> None:
    channels = MemoryChannels()
    append(channels, 1)
    channels.append("updates", None)
    channels.append("updates", b"{}", None, [("seq", b"1"), ("seq", b"2")])
    channels.append("updates", b"{}", None, [("sender", b"\xff"), ("epoch", b"1"), ("seq", b"1"), ("time", b"")])
    report = fed(Log(channels, "updates", ManualClock()))
    assert (report.verdict, report.records) == (Integrity.UNCERTAIN, 1)
    assert [location for location, _ in report.refused] == [f"partition 0, offset {offset}" for offset in (1, 2, 3)]
    assert report.refused[0][1] == "it has no origin in its headers, and no payload"


def test_what_lies_behind_the_end_fills_a_gap_and_counts_for_nothing_else() -> None:
    channels = MemoryChannels(partitions=2)
    append(channels, 1, 3)
    verifier, feed = begun(Log(channels, "updates", ManualClock()))
    next(feed)
    append(channels, 2, 4, 6)
    assert len(list(feed)) == 1
    end = verifier.end()
    assert (end.verdict, end.records, end.by_sender[0].last) == (Integrity.WHOLE, 3, 3)


def test_what_is_missing_at_the_end_has_a_time_to_come_and_then_is_lost() -> None:
    channels, clock = MemoryChannels(), ManualClock()
    append(channels, 1, 3)
    verifier, feed = begun(Log(channels, "updates", clock, grace=2))
    next(feed)
    next(feed)
    clock.move(3)
    assert list(feed) == []
    assert verifier.end().gaps == (Gap("a", 1, 2, 2),)


def test_following_goes_on_until_it_is_stopped() -> None:
    channels, stop = MemoryChannels(), Event()
    append(channels, 1, 2)
    verifier, feed = begun(Log(channels, "updates", ManualClock(), follow=True), stop)
    next(feed)
    append(channels, 3)
    next(feed)
    assert verifier.report().records == 3
    stop.set()
    assert list(feed) == []
    assert verifier.end().verdict is Integrity.WHOLE


def test_offsets_without_a_record_at_the_end_are_no_loss() -> None:
    channels = Marked()
    append(channels, 1, 2)
    report = fed(Log(channels, "updates", ManualClock()))
    assert (report.verdict, report.records, report.notes) == (Integrity.WHOLE, 2, ())


def test_a_channel_that_does_not_give_what_it_holds_is_no_whole_one() -> None:
    channels = Mute()
    append(channels, 1, 2)
    _, feed = begun(Log(channels, "updates", ManualClock()))
    next(feed)
    with pytest.raises(Unavailable, match="updates is unavailable: it does not return all"):
        next(feed)


def test_the_silence_of_a_broker_that_is_away_is_not_the_end() -> None:
    channels = Mute()
    append(channels, 1, 2)
    _, feed = begun(Log(channels, "updates", ManualClock()))
    next(feed)
    channels.away = True
    with pytest.raises(Unavailable, match="it went away"):
        list(feed)


def test_a_channel_that_was_not_read_to_its_end_is_doubtful() -> None:
    channels, stop = Mute(), Event()
    append(channels, 1, 2)
    verifier, feed = begun(Log(channels, "updates", ManualClock()), stop)
    next(feed)
    stop.set()
    assert list(feed) == []
    assert verifier.end().doubts == ("updates was not read to its end.",)


def test_transactions_leave_marks_and_aborted_ones_leave_records_and_neither_is_a_loss(
    kafka: Kafka, fresh: Fresh
) -> None:
    channel = fresh("transactions")
    kafka.ensure([Topic(channel)])
    producer = Producer({"bootstrap.servers": kafka.servers, "transactional.id": channel})
    producer.init_transactions(30)
    for seqs, kept in [((1, 2), True), ((3, 7), False), ((3, 4), True), ((5, 9), False)]:
        producer.begin_transaction()
        for seq in seqs:
            producer.produce(channel, b"{}", headers=list(Origin("a", 1, seq, 0).headers()))
        producer.flush(30)
        if kept:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    report = fed(Log(kafka, channel, SystemClock()))
    assert (report.verdict, report.records, report.by_sender[0].last) == (Integrity.WHOLE, 4, 4)
    # A reader gets over what lies at the end: there is nothing left to be told.
    assert report.notes == ()
