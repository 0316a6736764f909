import json
import random
from dataclasses import replace
from typing import Any

import pytest

from penstock.audit.account import Account
from penstock.audit.findings import Findings, Kind, Span, islands, key_hash, location_of, reduced
from penstock.core.contracts import Entry
from penstock.core.record import Headers, Heartbeat, Origin, OutageInterval
from penstock.core.runs import Runs

KINDS = {"rsvps": Kind.SOURCE, "by_country": Kind.RESULT}


def entry(channel: str, headers: Headers = (), value: bytes | None = b"{}", appended: int = 5_000) -> Entry:
    return Entry(channel, 0, 0, appended, None, value, headers)


def numbered(seq: int, sender: str = "a", epoch: int = 1, time: int = 1_000) -> Entry:
    return entry("rsvps", Origin(sender, epoch, seq, time).headers())


def note(**told: Any) -> Entry:
    return entry("notes", value=json.dumps(told).encode())


def found_in(*entries: Entry) -> Findings:
    return reduced(entries, {}, {}, KINDS, "notes")


@pytest.mark.parametrize("seed", range(10))
def test_islands_are_the_runs_of_a_set(seed: int) -> None:
    chance = random.Random(seed)
    numbers = [chance.randrange(60) for _ in range(chance.randrange(60))]
    assert islands(numbers) == Runs((number, number) for number in numbers)


def test_entries_are_reduced_to_runs() -> None:
    found = found_in(numbered(1), numbered(3), numbered(2), numbered(2), numbered(9, sender="b"), numbered(7, epoch=2))
    assert found.runs == {
        ("rsvps", "a", 1): Runs([(1, 3)]),
        ("rsvps", "b", 1): Runs([(9, 9)]),
        ("rsvps", "a", 2): Runs([(7, 7)]),
    }
    assert found.numbered == {("rsvps", "a", 1): 4, ("rsvps", "b", 1): 1, ("rsvps", "a", 2): 1}
    assert found.records == {"rsvps": 6}


@pytest.mark.parametrize(
    "headers",
    [
        (),
        [("sender", b"a")],
        [*Origin("a", 1, 1, 1).headers(), ("seq", b"2")],
        [("sender", b"\xff"), ("epoch", b"1"), ("seq", b"1"), ("time", b"1")],
        [("sender", b"a"), ("epoch", b"1"), ("seq", b"99999999999999999999"), ("time", b"1")],
        [("time", b"soon")],
    ],
)
def test_broken_headers_are_counted_and_do_no_harm(headers: Headers) -> None:
    found = found_in(entry("rsvps", headers), numbered(1))
    assert found.without_identity == {"rsvps": 1}
    assert found.records == {"rsvps": 2}


def test_a_result_needs_no_number() -> None:
    found = found_in(entry("by_country", [("version", b"3"), ("time", b"1000")]), entry("by_country", [("time", b"?")]))
    assert not found.without_identity
    assert found.latencies["by_country"].summary() == pytest.approx(
        {"count": 1, "min": 4, "mean": 4, "p50": 4, "p95": 4, "p99": 4, "max": 4}, rel=0.01
    )


def test_times_that_a_broker_cut_are_no_skew() -> None:
    """A record of 5.7 ms that was appended at 5 ms waited no time; one of 9 ms comes from another clock."""
    found = found_in(numbered(1, time=5_700), numbered(2, time=9_000))
    assert found.latencies["rsvps"].skewed == 1
    assert found.latencies["rsvps"].count == 2


def test_notes_of_senders_are_read() -> None:
    found = found_in(
        note(kind="heartbeat", channel="rsvps", sender="a", epoch=1, seq=9, time=3),
        note(kind="blind", source="feed", since=10, until=20),
    )
    assert found.claims == [("rsvps", Heartbeat("a", 1, 9, 3), 5_000)]
    assert found.blinds == [("", OutageInterval("feed", 10, 20))]


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{",
        b"[" * 100_000,
        b"{}",
        b'{"kind": "gossip"}',
        b'{"kind": "heartbeat", "sender": "a"}',
        b'{"kind": "heartbeat", "sender": 7, "epoch": 1, "seq": 1, "time": 1}',
        b'{"kind": "heartbeat", "sender": "\\ud800", "epoch": 1, "seq": 1, "time": 1}',
        b'{"kind": "heartbeat", "sender": "a", "epoch": 1, "seq": 1e400, "time": 1}',
        b'{"kind": "heartbeat", "sender": "a", "epoch": 1, "seq": true, "time": 1}',
        b'{"kind": "heartbeat", "sender": "a", "epoch": 1, "seq": 9223372036854775808, "time": 1}',
        b'{"kind": "heartbeat", "channel": 7, "sender": "a", "epoch": 1, "seq": 1, "time": 1}',
        b'{"kind": "blind", "source": "feed", "since": 20, "until": 10}',
    ],
)
def test_a_note_that_cannot_be_read_is_counted(value: bytes | None) -> None:
    found = found_in(entry("notes", value=value))
    assert found.without_identity == {"notes": 1}
    assert (found.claims, found.blinds) == ([], [])


def test_numbers_that_come_after_a_higher_one_are_out_of_order() -> None:
    found = found_in(*(numbered(seq) for seq in (1, 2, 5, 3, 4, 6)))
    assert found.disorder == {("rsvps", "a", 1): Runs([(3, 4)])}
    assert found.tails == {("rsvps", 0, "a", 1): (1, 6)}


def test_partitions_have_an_order_each() -> None:
    entries = [replace(numbered(seq), partition=seq % 2) for seq in (1, 3, 2, 4)]
    assert not found_in(*entries).disorder


def test_what_was_brought_back_is_told_apart() -> None:
    back = entry("rsvps", [*Origin("a", 1, 1, 1_000).headers(), ("redriven", b"1")])
    found = found_in(numbered(1), numbered(2), back)
    assert found.numbered == {("rsvps", "a", 1): 3}
    assert found.redriven == {("rsvps", "a", 1): 1}
    assert not found.disorder


def test_rows_count_by_their_highest_version() -> None:
    def row(key: bytes, version: bytes) -> Entry:
        return replace(entry("by_country", [("version", version)]), key=key)

    found = found_in(row(b"nl", b"3"), row(b"nl", b"2"), row(b"be", b"1"), row(b"nl", b"four"))
    assert found.rows == {"by_country": {key_hash(b"nl"): 3, key_hash(b"be"): 1}}


def test_how_long_a_sender_s_records_were_under_way() -> None:
    found = found_in(numbered(1, time=1_000), numbered(2, time=4_000))
    assert found.spans == {("rsvps", "a", 1): Span(2, 1_000, 5_000, 4_000, 5_000)}


def test_a_result_tells_how_long_its_query_took() -> None:
    found = found_in(entry("by_country", [("time", b"1000"), ("appended", b"3000")]))
    step = found.steps["by_country"].summary()
    assert step is not None
    assert step["mean"] == 2


def test_records_are_counted_per_minute() -> None:
    found = found_in(numbered(1), entry("rsvps", appended=61_000_000), entry("rsvps", appended=119_000_000))
    assert found.minutes == {("rsvps", 0): 1, ("rsvps", 1): 2}


def test_accounts_are_taken_from_the_bookmarks() -> None:
    account = Account("query:a", "life", 1, {})
    entries = [
        replace(entry("marks", value=account.dumps()), key=account.key),
        replace(entry("marks", value=b"{}"), key=b"rsvps"),
        replace(entry("marks", value=b"?"), key=b"query:b"),
        replace(entry("marks", value=None), key=b"query:c"),
    ]
    found = reduced(entries, {}, {}, KINDS, "notes", "marks")
    assert found.accounts == [account]
    assert found.without_identity == {"marks": 1}
    assert not found.records


@pytest.mark.parametrize("seq", [b"1_000", b" 7", b"+7", b"007", b"-0", b"7\n", "\u0667".encode()])
def test_other_spellings_of_a_number_are_none(seq: bytes) -> None:
    headers = [("sender", b"a"), ("epoch", b"1"), ("seq", seq), ("time", b"1")]
    assert found_in(entry("rsvps", headers)).without_identity == {"rsvps": 1}


def test_what_came_too_late_for_a_query_is_not_refused() -> None:
    """Its record lies in the channel; the letter is counted as an entry, and as nothing else."""
    told = [*Origin("a", 1, 7, 1_000).headers(), ("reason", b"late: its window was closed in query q")]
    letters = [entry("rsvps.dead", told), entry("rsvps.dead", told[4:])]
    found = reduced(letters, {}, {}, {"rsvps.dead": Kind.DEAD}, "notes")
    assert (found.records, found.runs, found.without_identity) == ({"rsvps.dead": 2}, {}, {})
    # Elsewhere, a header of that name is the record's own.
    assert reduced([entry("rsvps", told)], {}, {}, KINDS, "notes").numbered == {("rsvps", "a", 1): 1}


def test_the_last_reason_of_a_letter_is_the_one_that_counts() -> None:
    """A header of that name that the record had before lies in front of it."""
    told, late, unfit = Origin("a", 1, 7, 1_000).headers(), ("reason", b"late: as ever"), ("reason", b"it is not JSON")
    for reasons, numbered in (((late, unfit), {("rsvps.dead", "a", 1): 1}), ((unfit, late), {})):
        found = reduced([entry("rsvps.dead", [*told, *reasons])], {}, {}, {"rsvps.dead": Kind.DEAD}, "notes")
        assert found.numbered == numbered


def test_only_a_short_place_is_parsed() -> None:
    assert location_of(b"eu:rsvps:3:71") == ("eu:rsvps", 3, 71)
    for place in (b"", b"rsvps", b"rsvps:3", b"rsvps:a:1", b"rsvps:1:-1", b"rsvps:0:" + b"9" * 5_000, b"\xff"):
        assert location_of(place) is None
