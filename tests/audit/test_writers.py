"""Rows of results are known by the token of the query that wrote them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.audit.auditor import Auditor
from penstock.audit.balance import balance
from penstock.audit.findings import Kind, Watched, reduced
from penstock.audit.judge import Verdict
from penstock.audit.ledger import Ledger
from penstock.audit.writers import Writer, Writers, WriterTokens, protected
from penstock.core.contracts import Entry, Topic
from penstock.core.record import Headers
from penstock.run.accounts import announce
from penstock.testing import ManualClock, MemoryChannels

BOOKMARKS, RESULT = "penstock.p.bookmarks", "by_country"
WATCHED = [Watched("rsvps", Kind.SOURCE), Watched(RESULT, Kind.RESULT, ("query:people",))]


@pytest.fixture
def channels() -> MemoryChannels:
    found = MemoryChannels(None)
    found.ensure([Topic("rsvps"), Topic(RESULT), Topic(BOOKMARKS), Topic("penstock.p.heartbeats")])
    return found


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def row(token: str | None, version: int = 1) -> Headers:
    own = [] if token is None else [("writer", token.encode())]
    return [("query", b"people"), *own, ("version", b"%d" % version)]


def append(channels: MemoryChannels, token: str | None, version: int = 1, key: bytes = b'["nl"]') -> None:
    channels.append(RESULT, b"{}", key, row(token, version))


def announced(channels: MemoryChannels, token: str, generation: int = 0) -> None:
    announce(channels, BOOKMARKS, "people", RESULT, token, generation)


def genuine(channels: MemoryChannels, writers: Writers) -> list[bool]:
    entries = channels.entries(RESULT)
    found = writers.genuine(entries)
    return [entry in found for entry in entries]


def test_rows_of_the_announced_writer_are_genuine_and_others_are_not(channels: MemoryChannels) -> None:
    append(channels, None)  # By a version of Penstock that knew no tokens.
    announced(channels, "a1")
    writers = Writers(channels, [BOOKMARKS])
    for token in ("a1", None, "b2"):
        append(channels, token)
    assert genuine(channels, writers) == [True, True, False, False]


def test_each_generation_has_a_token_and_rows_of_earlier_ones_stay_genuine(channels: MemoryChannels) -> None:
    writers = Writers(channels, [BOOKMARKS])
    announced(channels, "a1")
    append(channels, "a1")
    assert genuine(channels, writers) == [True]
    announced(channels, "b2", 1)
    append(channels, "b2")
    assert genuine(channels, writers) == [True, True]


def test_an_announcement_stays_as_it_was_made_first(channels: MemoryChannels) -> None:
    append(channels, None)
    announced(channels, "a1")
    append(channels, None)
    announced(channels, "a1")
    assert genuine(channels, Writers(channels, [BOOKMARKS])) == [True, False]


def test_a_channel_without_announcements_is_not_judged(channels: MemoryChannels) -> None:
    append(channels, None)
    append(channels, "x")
    assert genuine(channels, Writers(channels, [BOOKMARKS])) == [True, True]


def test_an_announcement_for_another_topic_of_that_name_counts_no_more(channels: MemoryChannels) -> None:
    announced(channels, "a1")
    channels.remove(RESULT)
    channels.ensure([Topic(RESULT)])
    append(channels, None)
    assert genuine(channels, Writers(channels, [BOOKMARKS])) == [True]


def test_an_announcement_survives_its_bytes() -> None:
    writer = Writer("by:country", "a1", "people", 3, "id", {0: 7})
    assert Writer.of(writer.key, writer.dumps()) == writer
    assert Writer.of(b"writer:x:y", b"[]") is None


def test_a_forged_row_is_a_finding_with_its_name_and_counts_nowhere(channels: MemoryChannels, ledger: Ledger) -> None:
    """It was shown, and the audit took 998,571 of those in flight to be in its rows already."""
    auditor = Auditor(channels, ledger, WATCHED, "penstock.p.heartbeats", bookmarks=BOOKMARKS)
    announced(channels, "a1")
    append(channels, "a1", 3)
    append(channels, None, 999_999)
    while auditor.step(0):
        pass
    auditor.close()
    content = ledger.content()
    found = balance(content, 2**60)
    (forged,) = found.discrepancies
    assert (forged.kind, forged.stage, forged.count) == ("forged", f"channel:{RESULT}", 1)
    assert forged.examples == ('partition 0, offset 1, key ["nl"], version 999999',)
    assert found.verdict is Verdict.MISSING
    assert content.folded[RESULT] == 3
    assert content.counts[RESULT].records == 1


def test_the_first_announcement_is_found_by_a_row_without_a_token(channels: MemoryChannels) -> None:
    clock = ManualClock()
    writers = Writers(channels, [BOOKMARKS], clock)
    writers.refresh()
    announced(channels, "a1")
    append(channels, None)
    clock.move(2)
    assert genuine(channels, writers) == [False]


def test_rows_of_one_batch_are_judged_alike_by_the_reduction() -> None:
    known = WriterTokens([Writer(RESULT, "a1", "people", 0, "", {0: 1})])
    entry = Entry(RESULT, 0, 0, 1, b"k", b"{}", row(None, 7))
    entries = [replace(entry, offset=offset) for offset in range(3)]
    found = reduced(entries, {}, {}, {RESULT: Kind.RESULT}, writers=known)
    assert (found.records[RESULT], found.forged[RESULT]) == (1, 2)
    assert [one.offset for one in found.forged_rows] == [1, 2]


@pytest.mark.parametrize("name", ["penstock.p.status", "rsvps.dead", RESULT])
def test_results_dead_letters_and_internal_channels_are_not_written_by_hand(
    channels: MemoryChannels, name: str
) -> None:
    announced(channels, "a1")
    assert protected(name, channels) is not None
    assert protected("rsvps", channels) is None
