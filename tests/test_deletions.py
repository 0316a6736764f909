"""Deletions all the way: a result whose rows go, in the comparison, the lake, the feed and the audit."""

import json
from pathlib import Path

import pytest
from tests.stores.lakes import LoadedLake

from penstock.analysis.replay import Comparison, Expected, How, Row, Verdict, bare, compare
from penstock.audit.account import Account, Outcome, Share
from penstock.audit.balance import balance
from penstock.audit.content import ChannelCounts, Content, Numbered, Run
from penstock.audit.findings import Kind, Watched
from penstock.audit.hops import hops
from penstock.core.contracts import Entry
from penstock.deliver.feed import Feed
from penstock.operate.recompute import Written, _note, _stored
from penstock.stores.lake import LakeStore

GONE = None


def row(n: int | None, version: int | None = None) -> Row:
    value = None if n is None else json.dumps({"key": "k", "n": n, "seen": {"count": version}}).encode()
    return Row(value, version)


def judged(held: Row | None, least: Row | None, most: Row | None) -> Comparison:
    tables = [{} if one is None else {b"k": one} for one in (held, least, most)]
    return compare(tables[0], Expected(tables[1], tables[2]))


@pytest.mark.parametrize(
    ("held", "least", "most", "verdict"),
    [
        (None, row(GONE, 2), row(GONE, 2), None),
        (row(GONE, 2), row(GONE, 2), row(GONE, 2), None),
        (row(GONE, 2), None, None, None),
        (None, row(1, 1), row(GONE, 2), Verdict.BOUNDED),
        (row(GONE, 2), row(1, 1), row(3, 3), Verdict.BOUNDED),
        (row(2, 2), row(1, 1), row(GONE, 3), Verdict.BOUNDED),
        (row(2, 2), row(GONE, 1), row(GONE, 3), Verdict.BOUNDED),
        (None, row(1, 1), row(1, 1), How.MISSING),
        (row(GONE, 2), row(1, 2), row(1, 2), How.MISSING),
        (row(1, 1), row(GONE, 2), row(GONE, 2), How.UNEXPECTED),
        (row(GONE, 2), row(GONE, 3), row(GONE, 3), How.FEWER),
    ],
)
def test_a_deleted_row_is_compared_by_its_version(
    held: Row | None, least: Row | None, most: Row | None, verdict: Verdict | How | None
) -> None:
    found = judged(held, least, most)
    if isinstance(verdict, How):
        assert [one.how for one in found.differences] == [verdict]
    else:
        assert found.counts == ({} if verdict is None else {verdict: 1})
        assert not found.differences


def test_of_a_compacted_log_values_are_compared_without_counts() -> None:
    live, again = bare({b"k": row(7, 5), b"l": row(GONE, 4)}), bare({b"k": row(7, 2), b"l": row(GONE, 1)})
    assert compare(live, Expected(again, again)).counts == {Verdict.EXACT: 1}
    other = bare({b"k": row(8, 2)})
    assert compare(live, Expected(other, other)).counts == {Verdict.DIFFERENT: 1}
    assert compare(live, Expected(other, bare({b"k": row(9, 3)}))).counts == {Verdict.BOUNDED: 1}


def entry(offset: int, value: bytes | None, version: int, key: bytes | None = b'["k"]') -> Entry:
    return Entry("c", 0, offset, 1_700_000_000_000_000 + offset, key, value, [("version", b"%d" % version)])


def test_an_older_row_does_not_come_back_after_its_deletion() -> None:
    written: dict[bytes, Written] = {}
    for offset, (value, version) in enumerate([(b"{}", 1), (None, 2), (b"{}", 1)]):
        _note(written, entry(offset, value, version))
    assert (written[b'["k"]'].row.value, written[b'["k"]'].offset) == (None, 2)


def test_a_lake_of_a_table_tells_what_was_deleted_and_which_row_is_newest(tmp_path: Path) -> None:
    typed = LoadedLake(LakeStore(str(tmp_path / "typed"), "c", keyed=True), typed=True)
    assert typed.open().write([entry(0, b'{"n": 1}', 1), entry(1, None, 2), entry(2, None, 3, key=None)], {0: 3}) == 2
    assert typed.open().share().outcomes[Outcome.REFUSED] == 1
    result = LakeStore(str(tmp_path / "result"), "c", keyed=True)
    one, other = (b'{"key": "%s", "seen": {"count": 1}}' % key for key in (b"k", b"l"))
    again = 2**44 + 1
    some = [entry(0, one, 1), entry(1, other, again, b'["l"]'), entry(2, None, 2), entry(3, one, 1)]
    LoadedLake(result).open().write([*some, entry(4, other, 2, b'["l"]')], {0: 5})
    assert [(row.key, row.version, row.row is None) for row in result.rows()] == [
        (b'["k"]', 1, False),
        (b'["l"]', again, False),
        (b'["k"]', 2, True),
        (b'["k"]', 1, False),
        (b'["l"]', 2, False),
    ]
    assert _stored(result, {}) == {b'["l"]': Row(other, again)}


def test_a_feed_counts_a_newer_deletion_of_what_is_gone_and_tells_nobody() -> None:
    feed = Feed("c", "id")
    feed.push([entry(0, b"{}", 1), entry(1, None, 2)])
    revision = feed.revision
    feed.push([entry(2, None, 3), entry(3, None, 3)])
    assert (feed.passed, feed.duplicate, feed.revision, len(feed)) == (3, 1, revision, 0)


def content(folded: int = 8, records: int = 5, until: int = 5, runs: tuple[Run, ...] = (Run(1, 5, 0),)) -> Content:
    """Two tables, of five and three records, joined."""
    shares = {"a": Share({0: 0}, {0: 5}, 5, {Outcome.PASSED: 5}), "b": Share({0: 0}, {0: 3}, 3, {Outcome.PASSED: 3})}
    account = Account("query:q", "life", 0, shares, step=1, wrote={"c": {0: 8}}, conserved=True)
    return Content(
        channels={
            "a": Watched("a", Kind.SOURCE, compacted=True),
            "b": Watched("b", Kind.SOURCE, compacted=True),
            "c": Watched("c", Kind.RESULT, ("query:q",)),
        },
        counts={"a": ChannelCounts(records), "b": ChannelCounts(3), "c": ChannelCounts(8)},
        numbered={("a", "s", 1): Numbered(records)},
        runs={("a", "s", 1): runs},
        claims={},
        blinds=[],
        latencies={},
        since={name: {0: 0} for name in "abc"},
        until={"a": {0: until}, "b": {0: 3}, "c": {0: 8}},
        folded={"c": folded},
        accounts={"query:q": account},
    )


def test_what_is_in_no_row_of_a_join_is_missing_at_its_channels_together() -> None:
    assert [(hop.missing, hop.note) for hop in hops(content())] == [(0, ""), (0, "")]
    one, other = hops(content(folded=1))
    assert (one.missing, other.missing) == (5, 2)
    for hop in (one, other):
        assert hop.due == sum(hop.outcomes.values()) + hop.in_flight + hop.missing
        assert hop.note.startswith("7 records ")


def test_what_compaction_may_have_taken_is_not_missing() -> None:
    """Number 3 was never read: as many offsets held nothing, so it may have been outdated; otherwise it is lost."""
    there = (Run(1, 2, 0), Run(4, 5, 0))
    later = 60_000_000
    assert balance(content(records=4, until=5, runs=there), later).channels[0].missing == 0
    assert balance(content(records=4, until=4, runs=there), later).channels[0].missing == 1


def test_what_compaction_cannot_have_taken_is_missing_though_nobody_knows_which_it_is() -> None:
    """Of 2 to 4 none was read, and only two offsets held nothing: one of the three is lost."""
    found = balance(content(records=2, until=4, runs=(Run(1, 1, 0), Run(5, 5, 0))), 60_000_000)
    assert (found.channels[0].missing, found.channels[0].gaps) == (1, ())
    (source,) = (hop for hop in found.hops if hop.writes == "a")
    assert (source.missing, source.gaps) == (1, ())
    assert source.note.startswith("2 more ")
