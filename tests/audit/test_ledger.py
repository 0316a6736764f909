import random
import sqlite3
import threading
from collections import Counter
from collections.abc import ItemsView, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.damaging import FILE_DAMAGES, filled, flipped, small_disk

from penstock.audit.account import Account
from penstock.audit.content import ChannelCounts, Run
from penstock.audit.findings import Findings, Kind, Numbering, Watched, islands, reduced
from penstock.audit.ledger import DAY, SETTLES_AFTER, Ledger, Unreadable, set_aside
from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.metrics import Sketch
from penstock.core.record import GENERATIONS, Heartbeat, Origin, OutageInterval
from penstock.core.runs import Runs

A = ("rsvps", "a", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    ledger.close()


def batch(start: int | None, *numbers: int) -> Findings:
    end = (start or 0) + len(numbers)
    found = Findings({"rsvps": {} if start is None else {0: start}}, {"rsvps": {0: end}})
    found.records["rsvps"] = found.numbered[A] = len(numbers)
    found.runs[A] = islands(list(numbers))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_batches_melt_into_the_runs_of_a_set(ledger: Ledger, seed: int) -> None:
    chance = random.Random(seed)
    seen = Counter[int]()
    for start in range(0, 200, 5):
        numbers = [chance.randrange(-20, 120) for _ in range(5)]
        seen.update(numbers)
        ledger.merge(batch(start or None, *numbers), now=start)
    content = ledger.content()
    assert [(run.first, run.last) for run in content.runs[A]] == list(Runs((n, n) for n in seen))
    assert content.numbered[A].records == seen.total()
    assert content.counts["rsvps"] == ChannelCounts(records=seen.total())


def test_a_run_remembers_when_its_first_number_was_noticed(ledger: Ledger) -> None:
    ledger.merge(batch(None, 1, 2), now=10)
    ledger.merge(batch(2, 5), now=20)
    ledger.merge(batch(3, 6), now=30)
    assert ledger.content().runs[A] == [Run(1, 2, 10), Run(5, 6, 20)]


@pytest.mark.parametrize("start", [None, 1, 3])
def test_a_batch_that_does_not_start_where_the_ledger_stands_is_refused(ledger: Ledger, start: int | None) -> None:
    ledger.merge(batch(None, 1, 2), now=0)
    before = ledger.content()
    with pytest.raises(Refused, match="the ledger stands at 2"):
        ledger.merge(batch(start, 3, 4), now=0)
    assert ledger.content() == before
    assert ledger.positions() == {"rsvps": {0: 2}}


def test_two_auditors_cannot_both_count(path: Path, ledger: Ledger) -> None:
    other = Ledger(path)
    ledger.merge(batch(None, 1, 2), now=0)
    with pytest.raises(Refused):
        other.merge(batch(None, 1, 2), now=0)
    other.merge(batch(2, 3), now=0)
    assert ledger.content().numbered[A].records == 3
    other.close()


def test_a_batch_is_merged_whole_or_not_at_all(ledger: Ledger) -> None:
    broken = batch(None, 1, 2)
    broken.latencies["rsvps"] = Sketch()
    broken.blinds.append(("rsvps", OutageInterval("feed", 0, 2**70)))
    with pytest.raises(OverflowError):
        ledger.merge(broken, now=0)
    assert ledger.positions() == {}
    assert ledger.content().runs == {}
    ledger.merge(batch(None, 1, 2), now=0)


def test_what_was_merged_is_there_after_opening_again(path: Path) -> None:
    ledger = Ledger(path)
    found = batch(None, 1, 2, 4)
    found.latencies["rsvps"] = Sketch()
    found.latencies["rsvps"].add(12, 3)
    found.without_identity["rsvps"] = 1
    found.claims.append(("rsvps", Heartbeat("a", 1, 9, 0), 7))
    found.blinds += [("rsvps", OutageInterval("feed", 10, 20)), ("rsvps", OutageInterval("feed", 10, 30))]
    ledger.watch([Watched("rsvps", Kind.SOURCE)])
    ledger.merge(found, now=5)
    content = ledger.content()
    ledger.close()
    again = Ledger(path, read_only=True)
    found_again = again.content()
    again.close()
    assert found_again.channels == {"rsvps": Watched("rsvps", Kind.SOURCE)}
    assert found_again.runs == {A: [Run(1, 2, 5), Run(4, 4, 5)]}
    assert found_again.counts == {"rsvps": ChannelCounts(3, 1)}
    assert found_again.claims == {A: [(9, 7)]}
    assert found_again.blinds == [("rsvps", OutageInterval("feed", 10, 30))]
    assert found_again.latencies["rsvps"].summary() == content.latencies["rsvps"].summary()


def test_it_can_be_read_while_it_is_written(path: Path, ledger: Ledger) -> None:
    ledger.merge(batch(None, 1), now=0)
    reader = Ledger(path, read_only=True)
    for start in range(1, 50):
        ledger.merge(batch(start, start + 1), now=0)
        assert reader.content().runs[A] == [Run(1, start + 1, 0)]
    reader.close()


def test_threads_may_share_a_ledger(ledger: Ledger) -> None:
    ledger.merge(batch(None, 1), now=0)
    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(ledger.content) for _ in range(50)]
        for start in range(1, 50):
            ledger.merge(batch(start, start + 1), now=0)
    assert all(look.result().runs[A][0].first == 1 for look in looks)


def test_a_reader_cannot_write(path: Path, ledger: Ledger) -> None:
    reader = Ledger(path, read_only=True)
    with pytest.raises(Unavailable, match="readonly"):
        reader.watch([])
    reader.close()


def test_the_claims_of_a_sender_stay_few(ledger: Ledger) -> None:
    """The first, the last that is settled, and those after it."""
    second = 1_000_000
    for at in range(60):
        found = batch(at or None, at)
        found.claims.append(("rsvps", Heartbeat("a", 1, 100 + at // 2, 0), at * second))
        ledger.merge(found, now=0)
    claims = ledger.content().claims[A]
    assert claims[0] == (100, 0)
    assert claims[-1] == (129, 58 * second)
    assert claims[1] == (124, 48 * second)
    assert 59 * second - claims[1][1] >= SETTLES_AFTER
    assert len(claims) == 7


def test_a_claim_that_somebody_made_up_hides_no_other(ledger: Ledger) -> None:
    second = 1_000_000
    for at, seq in enumerate([1, 2**62, *range(2, 40), 2**63 - 1, -(2**63)]):
        found = batch(at or None, at)
        found.claims.append(("rsvps", Heartbeat("a", 1, seq, 0), at * second))
        ledger.merge(found, now=0)
    claims = [seq for seq, _ in ledger.content().claims[A]]
    assert {39, 2**62, 2**63 - 1} <= set(claims)
    assert len(claims) < 20


def test_numbers_at_both_ends_of_64_bits_are_kept(ledger: Ledger) -> None:
    low, high = -(2**63), 2**63 - 1
    found = batch(None, 4)
    found.runs[A] = Runs([(low, low), (5, 5), (high, high)])
    ledger.merge(found, now=1)
    found = batch(1, 6)
    found.runs[A] = Runs([(low + 1, low + 1), (high - 1, high - 1)])
    ledger.merge(found, now=2)
    assert [(run.first, run.last) for run in ledger.content().runs[A]] == [(low, low + 1), (5, 5), (high - 1, high)]


def test_a_claim_is_as_old_as_its_reading(ledger: Ledger) -> None:
    """An auditor that was away reads old claims, perhaps before the records that they are about."""
    found = batch(None, 1)
    found.claims += [("rsvps", Heartbeat("a", 1, 5, 0), 10), ("rsvps", Heartbeat("b", 1, 5, 0), 99)]
    ledger.merge(found, now=50)
    assert ledger.content().claims == {A: [(5, 50)], ("rsvps", "b", 1): [(5, 99)]}
    again = batch(1, 2)
    again.claims.append(("rsvps", Heartbeat("a", 1, 5, 0), 60))
    ledger.merge(again, now=60)
    assert ledger.content().claims[A] == [(5, 50)]


def test_of_claims_that_are_read_at_once_the_first_and_the_highest_stay(ledger: Ledger) -> None:
    found = batch(None, 1)
    found.claims += [("rsvps", Heartbeat("a", 1, seq, 0), seq) for seq in range(1, 3_601)]
    ledger.merge(found, now=10_000)
    assert ledger.content().claims[A] == [(1, 10_000), (3_600, 10_000)]


def test_the_time_of_the_last_merge_is_kept(path: Path, ledger: Ledger) -> None:
    assert ledger.content().as_of is None
    ledger.merge(batch(None, 1), now=10)
    ledger.merge(batch(1, 2), now=20)
    with pytest.raises(Refused):
        ledger.merge(batch(1, 2), now=30)
    reader = Ledger(path, read_only=True)
    assert reader.content().as_of == 20
    reader.close()


def test_what_lies_in_a_channel_and_was_not_read_is_counted(ledger: Ledger) -> None:
    ledger.merge(batch(None, 1, 2, 3), now=0)
    bounds = {"rsvps": {0: (0, 5), 1: (10, 14)}, "sales": {0: (0, 7)}}
    assert ledger.unread(bounds) == {"rsvps": 2 + 4, "sales": 7}
    # What its retention has removed cannot be read any more, and a shorter channel is another one.
    assert ledger.unread({"rsvps": {0: (4, 5)}, "sales": {}}) == {"rsvps": 1, "sales": 0}
    assert ledger.unread({"rsvps": {0: (0, 1)}}) == {"rsvps": 0}


class Slow(dict[Numbering, Runs]):
    """Runs that are taken only when somebody says so."""

    def __init__(self, runs: dict[Numbering, Runs]) -> None:
        super().__init__(runs)
        self.reached, self.free = threading.Event(), threading.Event()

    def items(self) -> ItemsView[Numbering, Runs]:  # type: ignore[override]  # a view of a dict is an ItemsView
        self.reached.set()
        self.free.wait(5)
        return ItemsView(self)


def test_closing_lets_the_calls_of_other_threads_end(path: Path) -> None:
    ledger, found = Ledger(path), batch(None, 1, 2)
    found.runs = slow = Slow(found.runs)
    with ThreadPoolExecutor(2) as pool:
        merging = pool.submit(ledger.merge, found, 7)
        assert slow.reached.wait(5)
        closing = pool.submit(ledger.close)
        # If it did not wait, it would be done by now.
        wait([closing], timeout=0.1)
        slow.free.set()
        merging.result(5)
        closing.result(5)
    reader = Ledger(path, read_only=True)
    assert reader.content().runs == {A: [Run(1, 2, 7)]}
    reader.close()


def test_a_closed_ledger_is_not_called_a_broken_file(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    for call in (ledger.content, ledger.positions, ledger.channels):
        with pytest.raises(Unavailable, match="closed"):
            call()


def test_the_file_grows_with_gaps_and_not_with_records(path: Path, ledger: Ledger) -> None:
    for start in range(0, 100_000, 10_000):
        ledger.merge(batch(start or None, *range(start, start + 10_000)), now=0)
    assert ledger.content().runs[A] == [Run(0, 99_999, 0)]


def test_the_outermost_numbers_can_be_kept(ledger: Ledger) -> None:
    ledger.merge(batch(None, 2**63 - 1, -(2**63)), now=0)
    ledger.merge(batch(2, 2**63 - 2, -(2**63) + 1), now=0)
    assert [(run.first, run.last) for run in ledger.content().runs[A]] == [
        (-(2**63), -(2**63) + 1),
        (2**63 - 2, 2**63 - 1),
    ]


def test_without_a_ledger_the_fix_is_told(path: Path) -> None:
    with pytest.raises(Misconfigured, match="start the pipeline"):
        Ledger(path, read_only=True)
    assert not path.parent.exists()


def test_a_file_that_is_no_ledger_is_told(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Unreadable) as told:
        Ledger(path)
    assert told.value.location == str(path)
    with pytest.raises(Unreadable):
        Ledger(path, read_only=True)


@pytest.mark.parametrize("version", [1, 99])
def test_a_ledger_of_another_format_is_told(path: Path, version: int) -> None:
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(Unreadable, match=f"format {version}"):
        Ledger(path)


def test_a_ledger_that_is_gone_where_an_auditor_ran_is_away(path: Path) -> None:
    log = path.parent.parent / "logs" / "audit.log"
    log.parent.mkdir()
    log.touch()
    with pytest.raises(Unreadable) as told:
        Ledger(path, read_only=True)
    assert told.value.location == str(path)


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_noticed_unless_it_changes_nothing(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with closing(Ledger(path)) as ledger:
        ledger.watch([Watched("rsvps", Kind.SOURCE)])
        for start in range(0, 2_000, 500):
            ledger.merge(batch(start or None, *(chance.randrange(10_000) for _ in range(500))), now=start)
        before = ledger.content()
    damage = chance.choice(FILE_DAMAGES)
    damage(path, chance)
    noticed: Misconfigured | None = None
    try:
        with closing(Ledger(path, read_only=True)) as ledger:
            ledger.verify()
            found = ledger.content()
    except Misconfigured as error:
        noticed = error
    if noticed is None:
        assert damage is flipped, "only a byte that holds nothing can change without notice"
        assert found == before
    else:
        assert noticed.location == str(path)


def test_what_is_replaced_and_removed_keeps_the_checksums_right(ledger: Ledger) -> None:
    ledger.rows_kept = 10
    ledger.watch([Watched("rsvps", Kind.SOURCE), Watched("table", Kind.RESULT, windowed=True)])
    for step in range(30):
        found = batch(step or None, step)
        found.rows["table"] = dict.fromkeys(range(step, step + 3), step + 1)
        ledger.merge(found, now=step)
        ledger.mark_drained(step)
        ledger.verify()
    ledger.watch([])
    ledger.verify()


def test_a_ledger_that_was_set_aside_is_named_in_the_new_one(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        ledger.merge(batch(None, 1, 2), now=0)
        copy = set_aside(path)
    assert copy is not None
    assert copy.exists()
    with closing(Ledger(path)) as ledger:
        assert ledger.content().copies == [str(copy)]
        assert ledger.positions() == {}
    second = set_aside(path)
    assert second not in (None, copy)
    assert set_aside(path) is None


def test_numbers_out_of_order_are_remembered_across_batches(ledger: Ledger) -> None:
    first = batch(None, 1, 2, 5)
    first.tails["rsvps", 0, "a", 1] = (1, 5)
    ledger.merge(first, now=0)
    second = batch(3, 3, 6)
    second.tails["rsvps", 0, "a", 1] = (3, 6)
    second.disorder[A] = Runs([(4, 4)])
    ledger.merge(second, now=0)
    assert ledger.content().numbered[A].disorder == 2


def test_the_rows_of_a_result_count_by_their_highest_version(ledger: Ledger) -> None:
    for start, rows in ((None, {1: 5, 2: 1}), (1, {1: 4, 2: 3}), (2, {1: 5, 3: 1})):
        found = batch(start, 1)
        found.rows["by_country"] = rows
        ledger.merge(found, now=0)
    assert ledger.content().folded == {"by_country": 5 + 3 + 1}


def test_a_new_life_of_a_query_counts_its_rows_from_nothing(ledger: Ledger) -> None:
    generations = (
        {1: 5, 2: 1},
        {1: GENERATIONS + 2},
        {1: GENERATIONS + 3, 3: GENERATIONS + 1},
        {2: 9},
        {1: 3 * GENERATIONS + 1},
    )
    folded = []
    for start, rows in enumerate(generations):
        found = batch(start or None, 1)
        found.rows["by_country"] = rows
        ledger.merge(found, now=0)
        folded.append(ledger.content().folded["by_country"])
    # The fourth batch holds a row of the first life, which counts no more.
    assert folded == [6, GENERATIONS + 2, GENERATIONS + 4, GENERATIONS + 4, 3 * GENERATIONS + 1]


def test_a_query_that_is_first_seen_in_a_later_life_counts_there(ledger: Ledger) -> None:
    found = batch(None, 1)
    found.rows["by_country"] = {1: 2 * GENERATIONS + 5, 2: 7, 3: 2 * GENERATIONS + 1}
    ledger.merge(found, now=0)
    assert ledger.content().folded == {"by_country": 2 * GENERATIONS + 6}


def test_rows_of_windows_are_forgotten_when_they_are_many_and_stay_counted(ledger: Ledger, path: Path) -> None:
    ledger.rows_kept = 10
    ledger.watch([Watched("by_country", Kind.RESULT, (), True)])
    for turn in range(10):
        found = batch(turn or None, 1)
        found.rows["by_country"] = {10 * turn + key: 1 for key in range(10)}
        ledger.merge(found, now=turn)
    assert ledger.content().folded == {"by_country": 100}
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM rows").fetchone()[0] <= 22
    again = batch(10, 1)
    again.rows["by_country"] = {3: 2}
    ledger.merge(again, now=11)
    assert ledger.content().folded == {"by_country": None}


def test_of_two_accounts_the_later_one_is_kept(ledger: Ledger) -> None:
    def told(start: int | None, *accounts: Account) -> None:
        found = batch(start, 1)
        found.accounts += accounts
        ledger.merge(found, now=0)

    told(None, Account("query:a", "x", 1, {}, step=1), Account("query:a", "x", 9, {}, step=3))
    told(1, Account("query:a", "x", 10, {}, step=2))
    assert ledger.content().accounts["query:a"].step == 3
    assert not ledger.content().reborn
    told(2, Account("query:a", "y", 0, {}, step=0))
    assert ledger.content().accounts["query:a"].generation == "y"
    assert ledger.content().reborn == {"query:a"}


def test_minutes_are_kept_for_a_day(ledger: Ledger) -> None:
    for turn, minute in enumerate((1_000, 1_001, 1_001 + DAY)):
        found = batch(turn or None, 1)
        found.minutes["rsvps", minute] = 7
        ledger.merge(found, now=0)
    assert ledger.content().minutes == {"rsvps": [(1_001, 7), (1_001 + DAY, 7)]}


def test_a_ledger_of_another_topic_is_refused(ledger: Ledger) -> None:
    ledger.tie({"rsvps": "one"})
    ledger.tie({"rsvps": "one", "sales": "two"})
    with pytest.raises(Misconfigured, match="sales"):
        ledger.tie({"rsvps": "one", "sales": "three"})


def test_a_time_beyond_all_measure_does_no_harm(ledger: Ledger) -> None:
    entry = Entry("rsvps", 0, 0, 5, None, b"", Origin("a", 1, 1, -(2**63)).headers())
    found = reduced([entry, replace(entry, offset=1)], {"rsvps": {0: 0}}, {"rsvps": {0: 2}}, {})
    ledger.merge(found, now=0)
    assert ledger.content().numbered[A].records == 2


def test_a_stage_that_the_pipeline_has_no_longer_is_not_shown(ledger: Ledger) -> None:
    found = batch(None, 1)
    found.accounts += [Account("query:a", "x", 1, {}), Account("query:b", "x", 1, {})]
    ledger.merge(found, now=0)
    assert set(ledger.content().accounts) == {"query:a", "query:b"}
    ledger.watch([], {"query:b": ["rsvps"], "query:c": ["rsvps"]})
    assert set(ledger.content().accounts) == {"query:b"}


def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk, closing(Ledger(disk / "audit" / "ledger.db")) as ledger:
        ledger.merge(batch(None, 1, 2), now=0)
        more = batch(2, *range(10, 10_000, 2))
        with filled(disk), pytest.raises(Unavailable):
            ledger.merge(more, now=0)
        assert ledger.positions() == {"rsvps": {0: 2}}
        ledger.merge(more, now=0)
        ledger.verify()
