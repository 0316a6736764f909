"""Every operator against its oracle in plain Python, after its driver was killed twice in the middle of its work.

One run for all: a driver of all queries, in both modes, over generated streams. Another seed, or several, can be given:
PENSTOCK_SEEDS=1,2,3.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from tests.analysis.killed import queries
from tests.analysis.killed.queries import IDLE, JOINS, LABELS, LATENESS, TABLES, channel, engine_for
from tests.analysis.killed.running import SPREAD, Run
from tests.analysis.operators import cards, join_oracles, oracles, table_oracles
from tests.analysis.operators.oracles import Event, Placed, Snapshot, in_batches, placed, portions
from tests.analysis.operators.table_oracles import Change, flat
from tests.stores.lakes import LoadedLake

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.checkpoints.rescale import rescale, spread
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.launch import launch
from penstock.analysis.replay import Expected, Row, Verdict, compare, key_of, put, recomputed, require_repeatable
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.operate.dead_letters import Letter
from penstock.stores.lake import LakeStore

SEEDS = os.environ.get("PENSTOCK_SEEDS", "11").split(",")

# Workers cannot import the modules of tests.
for module in (queries, cards):
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # it has no types


@pytest.fixture(scope="module", params=map(int, SEEDS))
def run(
    request: pytest.FixtureRequest, kafka: Kafka, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    made = Run(f"killed-{request.param}", request.param, kafka, tmp_path_factory.mktemp("killed"))
    made.through(spark)
    return made


# --- what was written -------------------------------------------------------------------------------------------------


def newest(entries: Iterable[Entry]) -> dict[bytes, Row]:
    """The newest version of each row. After a crash older ones may be written again; the last of all is the newest."""
    table: dict[bytes, Row] = {}
    last: dict[bytes, Row] = {}
    for entry in entries:
        key, row = key_of(entry.key or b""), Row.of(entry.value, entry.headers)
        assert row.version is not None
        put(table, key, row)
        last[key] = row
    assert last == table
    return table


def there(table: Mapping[bytes, Row]) -> dict[str, dict[str, Any]]:
    """The rows of a table that are not deleted, by key."""
    return {json.loads(key)[0]: json.loads(row.value) for key, row in table.items() if row.value is not None}


def values(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(row.value or b"") for row in newest(run.written(name)).values()]


def once(run: Run, name: str) -> None:
    """Rows that come when they are final come once; one that comes again after a crash is the same."""
    said: dict[bytes, bytes | None] = {}
    for entry in run.written(name):
        assert said.setdefault(key_of(entry.key or b""), entry.value) == entry.value


def windows(run: Run, name: str) -> dict[tuple[int, int, str], tuple[int, int]]:
    """As the oracles of windows by time say it."""
    return {(*_span(row), row.get("name", "")): (row["total"], row["seen"]["count"]) for row in values(run, name)}


def counts(run: Run, name: str) -> dict[tuple[int, int, str], int]:
    return {(*_span(row), row.get("name", "")): row["seen"]["count"] for row in values(run, name)}


def _span(row: Mapping[str, Any]) -> tuple[int, int]:
    return _millis(row["window"]["start"]), _millis(row["window"]["end"])


def _millis(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def counted(rows: Mapping[tuple[int, int, str], tuple[int, int]]) -> dict[tuple[int, int, str], int]:
    return {key: count for key, (_, count) in rows.items()}


# --- what was taken ---------------------------------------------------------------------------------------------------


def events(run: Run) -> list[Placed]:
    return placed(run.lying("events"))


def taken(run: Run, name: str) -> list[Snapshot]:
    """What each batch of a query took of the events."""
    return in_batches(channel(run.name, "events"), events(run), run.batches(name))


def engine(run: Run, name: str, spark: SparkSession) -> Engine:
    """For a batch over the log, in the session of the tests."""
    folder = str(Path(run.checkpoint(name)).parent)
    return engine_for(run.trials[name], run.name, spark, SparkSettings(), run.kafka.servers, folder)


def again(run: Run, name: str, spark: SparkSession) -> dict[bytes, Row]:
    """What a batch over the log gives."""
    return recomputed(engine(run, name, spark), run.trials[name].query, {})


# --- the truths -------------------------------------------------------------------------------------------------------


def test_drivers_were_killed_while_batches_ran(run: Run) -> None:
    assert len(run.kills) == 2
    assert any(kill.unfinished for kill in run.kills)


@pytest.mark.parametrize("name", ["tumbling", "live-tumbling"])
def test_tumbling_windows_hold_what_was_not_late(run: Run, name: str) -> None:
    due = oracles.tumbling(taken(run, name), 10_000)
    assert windows(run, name) == due.rows
    assert due.late


def test_windows_and_sessions_that_come_when_they_are_final_come_once(run: Run) -> None:
    assert windows(run, "final") == oracles.sliding(taken(run, "final"), 10_000, 5_000).final
    grown = oracles.sessions(taken(run, "sessions"), 3_000)
    assert windows(run, "sessions") == grown.final
    assert grown.late
    for name in ("final", "sessions"):
        once(run, name)


def test_windows_by_count_hold_the_records_in_their_order(run: Run, spark: SparkSession) -> None:
    lying, batches = events(run), run.batches("fives-of-all")
    both, fives = values(run, "fours-and-sixes"), values(run, "fives-of-all")
    for told, due in (
        ([row for row in both if row["kind"] == "fours"], oracles.count_window(lying, 4)),
        ([row for row in both if row["kind"] == "sixes"], oracles.count_window(lying, 6, 2, partial=True)),
        (fives, oracles.by_count_of_all(portions(channel(run.name, "events"), lying, batches), 5, 3)),
    ):
        assert {(row.get("name", ""), row["window"]["number"]): [one["n"] for one in row["rows"]] for row in told} == {
            of: [event.n for event in some] for of, some in due.items()
        }
        assert all(row["total"] == sum(one["n"] for one in row["rows"]) for row in told)
        assert all(row["seen"]["count"] == len(row["rows"]) for row in told)
    # As a batch over the log those of a key give the same, to the mark.
    assert again(run, "fours-and-sixes", spark) == newest(run.written("fours-and-sixes"))


def by_payload(event: Event) -> object:
    return event.name, event.n, event.at


def by_column(event: Event) -> object:
    return event.n, event.at


def test_gates_let_a_record_through_once_by_what_is_said_to_be_unique(run: Run) -> None:
    batches = taken(run, "patient")
    passed, doubled, late = oracles.deduplicated(batches, by_payload)
    assert doubled
    assert late
    assert counts(run, "patient") == counted(oracles.tumbling(passed, 10_000).rows)
    # With less patience, more of them would be late.
    lateness = round(LATENESS.total_seconds() * 1_000)
    hasty = [Snapshot(one.late_by and one.late_by + lateness, one.closed_by, one.events) for one in batches]
    assert len(late) < len(oracles.deduplicated(hasty, by_payload)[2])
    passed, doubled, late = oracles.deduplicated(taken(run, "final-of-all"), by_column)
    assert doubled
    assert late
    assert counts(run, "final-of-all") == counted(oracles.tumbling(passed, 4_000, per=lambda _: "").final)
    once(run, "final-of-all")


def test_a_gate_behind_a_filter_and_before_a_join_with_a_table_works_in_real_time(run: Run) -> None:
    chosen = [
        Snapshot(batch.late_by, batch.closed_by, [event for event in batch.events if event.n % 4])
        for batch in taken(run, "live-sliding")
    ]
    passed, doubled, late = oracles.deduplicated(chosen)
    assert doubled
    assert late
    known = [
        Snapshot(batch.late_by, batch.closed_by, [event for event in batch.events if event.name in LABELS])
        for batch in passed
    ]
    due = oracles.sliding(known, 10_000, 5_000, per=lambda event: LABELS[event.name])
    assert counts(run, "live-sliding") == counted(due.rows)


def test_each_late_record_lies_in_the_dead_letters_once(run: Run) -> None:
    buried, gated = taken(run, "buried"), taken(run, "buried-sessions")
    passed, doubled, late = oracles.deduplicated(gated)
    windows, grown = oracles.sliding(buried, 10_000, 5_000), oracles.sessions(passed, 3_000)
    assert counts(run, "buried") == counted(windows.rows)
    assert counts(run, "buried-sessions") == counted(grown.final)
    once(run, "buried-sessions")
    source = run.lying("events")
    by_place = {f"{entry.channel}:{entry.partition}:{entry.offset}": entry for entry in source}
    written = [Letter.of(entry) for entry in run.lying("events.dead")]
    for name, missed, copies in (("buried", windows.late, 0), ("buried-sessions", late, len(doubled))):
        letters = [letter for letter in written if letter.late_for == name]
        assert missed
        assert sorted(letter.origin.seq for letter in letters if letter.origin) == sorted(one.seq for one in missed)
        share = run.account(name).shares[channel(run.name, "events")]
        assert share.outcomes == {
            **dict.fromkeys(Outcome, 0),
            Outcome.PASSED: len(source) - len(missed) - copies,
            Outcome.LATE: len(missed),
            Outcome.DUPLICATE: copies,
        }
        # The letter is the record as it came, and what was added to it can be told apart.
        for letter in letters:
            record = by_place[letter.location or ""]
            assert (letter.value, letter.entry.key) == (record.value, record.key)
            assert list(letter.headers) == list(record.headers)
            assert letter.reason == f"late: its window was closed in query {name}"


def test_letters_that_no_account_knows_are_not_written_again(
    run: Run, spark: SparkSession, eventually: Callable[..., None]
) -> None:
    """As if the driver had died after it had brought the letters, and before it told of them."""
    own, query = engine(run, "buried", spark), run.trials["buried"].query
    told = [Account.of(entry.key or b"", entry.value or b"") for entry in run.lying("bookmarks")]
    last, *earlier = [account for account in reversed(told) if account.stage == "query:buried"]
    known = next(account for account in earlier if account.shares != last.shares)
    before = run.lying("events.dead")
    running, _ = launch(own, query, 0, {})
    late_records = LateRecords(query.name, run.kafka, known.at)
    accounting = QueryAccounting(own, query, running, known, run.kafka, SystemClock(), late_records)
    eventually(lambda: accounting.look() or accounting.account is not known)
    running.stop()
    assert accounting.account.shares == last.shares
    assert run.lying("events.dead") == before


@pytest.mark.parametrize("how", JOINS)
def test_each_join_pairs_what_was_not_late(run: Run, how: str, spark: SparkSession) -> None:
    name, found = f"{how}-join", dict[join_oracles.Pair, int]()
    for entry in run.written(name):
        row, headers = json.loads(entry.value or b""), dict(entry.headers)
        version = int(headers.get("version", headers.get("seq", b"")))
        found[row["a"], row["b"]] = max(version, found.get((row["a"], row["b"]), 0))
    lying = {side: _of_side(run.lying(side)) for side in ("left", "right")}
    known = run.batches(name)
    in_time = {side: join_oracles.in_time(some, channel(run.name, side), known) for side, some in lying.items()}
    (lefts, late), (rights, too_late) = in_time["left"], in_time["right"]
    assert set(found) == join_oracles.joined(lefts, rights, 2_000, 20_000, how)
    if how != "semi":
        assert found == {pair: 1 if None in pair else 2 for pair in found}
    if how == "full":
        account = run.account(name)
        told = {side: account.shares[channel(run.name, side)].outcomes[Outcome.LATE] for side in lying}
        assert told == {"left": len(late), "right": len(too_late)}
        assert min(told.values()) > 0
        assert not account.guessed
    batch = engine(run, name, spark).recompute(run.trials[name].query).select("a", "b").collect()
    everything = join_oracles.joined(lying["left"].values(), lying["right"].values(), 2_000, 20_000, how)
    assert {(row["a"], row["b"]) for row in batch} == everything


def _of_side(entries: Iterable[Entry]) -> dict[tuple[int, int], join_oracles.Event]:
    return {(entry.partition, entry.offset): join_oracles.Event(**json.loads(entry.value or b"")) for entry in entries}


OF_TABLES = ("latest", "inner", "outer", "live-left", "named")


def bare(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A row without what is null in it."""
    return None if row is None else {name: inner for name, inner in row.items() if inner is not None}


def of_table(row: Mapping[str, Any]) -> dict[str, Any] | None:
    return bare({name: row[name] for name in ("n", "text", "to")})


def test_tables_hold_the_last_value_of_each_key_and_nothing_that_was_deleted(run: Run, spark: SparkSession) -> None:
    for rest in run.rests:
        changes = flat(run.streams.changes[: rest.steps])
        held = {name: newest(run.written(name)[: rest.written[name]]) for name in OF_TABLES}
        assert {key: of_table(row) for key, row in there(held["latest"]).items()} == {
            key: bare(row) for key, row in table_oracles.latest(changes, "a").items() if row["n"] % 5
        }
        for name, how in (("inner", "inner"), ("outer", "outer"), ("live-left", "left")):
            due = table_oracles.joined(changes, TABLES, how)
            assert {key: {one: bare(row[one]) for one in TABLES} for key, row in there(held[name]).items()} == {
                key: {one: bare(row) for one, row in some.items()} for key, some in due.items()
            }
            assert sum(row.version or 0 for row in held[name].values()) == table_oracles.counted(changes, TABLES)
        named = table_oracles.related(changes, "a", "b", "to", "inner")
        assert {key: (bare(row["left"]), bare(row["right"])) for key, row in there(held["named"]).items()} == {
            key: (bare(left), bare(right)) for key, (left, right) in named.items()
        }
    for name in ("inner", "named"):
        batch = again(run, name, spark)
        assert compare(held[name], Expected(batch, batch)).counts == {Verdict.EXACT: len(there(held[name]))}
        assert any(row.value is None for row in batch.values())


@pytest.mark.parametrize("name", OF_TABLES)
def test_while_a_driver_lives_no_row_of_a_table_steps_back(run: Run, name: str) -> None:
    written = run.written(name)
    starts = [sizes[name] for sizes in run.begun]
    for begin, end in pairwise([*starts, len(written)]):
        versions: dict[bytes, int] = {}
        for entry in written[begin:end]:
            key, version = key_of(entry.key or b""), Row.of(entry.value, entry.headers).version
            assert version is not None
            assert version > versions.get(key, 0)
            versions[key] = version
    assert len(written) > starts[-1]


def test_a_record_finds_the_row_that_the_table_held_when_it_came(run: Run, spark: SparkSession) -> None:
    known = run.batches("found")
    steps = [portions(channel(run.name, name), run.lying(name), known) for name in ("stream", "b")]
    changes = [[*_changes("stream", some), *_changes("b", others)] for some, others in zip(*steps, strict=True)]
    due = table_oracles.looked_up(changes, "stream", "b", "to", "left")
    found: dict[int, str] = {}
    for entry in run.written("found"):
        row, origin = json.loads(entry.value or b""), Origin.of(entry.headers)
        assert origin is not None
        told = json.dumps([of_table(row), bare(row["found"])], sort_keys=True)
        assert found.setdefault(origin.seq, told) == told
    expected = [json.dumps([bare(record), bare(row)], sort_keys=True) for record, row in due]
    assert Counter(found.values()) == Counter(expected)
    with pytest.raises(Misconfigured, match="it uses lookup"):
        require_repeatable(engine(run, "found", spark), run.trials["found"].query)


def _changes(table: str, entries: Iterable[Entry]) -> Iterator[Change]:
    for entry in entries:
        value = None if entry.value is None else json.loads(entry.value)
        yield Change(table, (entry.key or b"").decode(), value)


def test_state_in_python_is_restored_elsewhere(run: Run, spark: SparkSession, tmp_path: Path) -> None:
    """On the day on which clocks turn back: no time is there twice."""
    entries = run.written("approved")
    fed = [use for some in run.streams.uses for use in some]
    due = cards.verdicts(fed)
    assert by_number(entry.value for entry in entries) == due
    assert brief(entries) == _briefly(run)
    # What was written twice stands once in a store.
    lake = LoadedLake(LakeStore(str(tmp_path / "lake"), run.trials["approved"].query.into)).open()
    lake.write([*entries, *entries], {0: len(entries)})
    assert lake.share().outcomes[Outcome.PASSED] == len({use[0] for use in fed})
    # Of what was sent twice, a batch gives two rows, and nothing tells which of them is newer.
    rows = [row for one in again(run, "approved", spark).values() for row in (one.value, *one.rivals)]
    assert due.items() <= {item for row in rows for item in by_number([row]).items()}
    assert {n for row in rows for n in by_number([row])} == due.keys()


def by_number(values: Iterable[bytes | None]) -> dict[int, tuple[Any, ...]]:
    """Of each number the last row."""
    found = (json.loads(value or b"") for value in values)
    return {row["n"]: (row["card"], row["verdict"], row["total"], row["times"]) for row in found}


def brief(entries: Iterable[Entry]) -> dict[int, tuple[int, int]]:
    """What was kept for a batch, and for a day."""
    found = (json.loads(entry.value or b"") for entry in entries)
    return {row["n"]: (row["brief"], row["lasting"]) for row in found}


def _briefly(run: Run) -> dict[int, tuple[int, int]]:
    lasting: Counter[tuple[str, str]] = Counter()
    found = {}
    for some in portions(channel(run.name, "uses"), run.lying("uses"), run.batches("approved")):
        times: Counter[str] = Counter()
        for use in (json.loads(entry.value or b"") for entry in some):
            times[use["card"]] += 1
            lasting[use["card"], use["city"]] += 1
            found[use["n"]] = times[use["card"]], lasting[use["card"], use["city"]]
    return found


def test_state_is_whole_after_it_was_spread_anew_though_the_last_batch_was_not_finished(
    run: Run, spark: SparkSession
) -> None:
    """What was made of it afterwards is told by the tests of these queries."""
    done = [(one.done.query, one.done.before, one.done.after) for one in run.spread]
    assert done == [("approved", 2, 5), ("latest", 2, 1), ("latest", 1, 4)]
    assert [one.done.unfinished for one in run.spread] == [True, True, False]
    for one in run.spread:
        assert [line.split()[0] for line in one.said] == ["keeping", "spreading", "comparing"]
    table, lying = channel(run.name, "a"), run.lying("a")
    for one in run.spread[1:]:
        known = {entry.key for entry in lying if entry.offset < one.reads[table][entry.partition]}
        assert one.done.rows == len(known)
    checkpoints = {name: Path(run.checkpoint(name)) for name in SPREAD}
    assert not list(checkpoints["latest"].parent.glob("*.*"))
    for name, numbers in SPREAD.items():
        # Each has its own number, in one session.
        assert spread(str(checkpoints[name])) == numbers[-1]
        partitions = {int(folder.name) for folder in checkpoints[name].glob("state/0/[0-9]*")}
        assert partitions == set(range(numbers[-1]))
    with pytest.raises(Misconfigured, match="query approved: its state has 5 partitions already"):
        rescale(spark, "approved", str(checkpoints["approved"]), 5)


def test_timers_are_due_when_the_watermark_has_passed_them(run: Run) -> None:
    rows = [json.loads(entry.value or b"") for entry in run.written("idle")]
    due = oracles.idle(taken(run, "idle"), round(IDLE.total_seconds() * 1_000))
    assert {(row["name"], _millis(row["at"])): row["times"] for row in rows} == due
    assert sum(due.values()) < len(events(run))
    once(run, "idle")


def test_records_are_joined_with_a_static_table(run: Run) -> None:
    lying = {one.event for one in events(run)}
    found = set()
    for entry in run.written("labelled"):
        row, origin = json.loads(entry.value or b""), Origin.of(entry.headers)
        assert origin is not None
        found.add((Event(origin.seq, row["name"], row["n"], row["at"]), row["label"]))
    assert found == {(one, LABELS.get(one.name)) for one in lying}
