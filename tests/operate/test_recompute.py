"""A query that ran, and the same query as a batch over its log: a real broker, Spark, Redis and lake."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession
from tests.operate.engines import set_up
from tests.stores.lakes import LoadedLake

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.engine import Engine
from penstock.analysis.launch import launch
from penstock.analysis.query import Query
from penstock.analysis.replay import Comparison, Difference, How, Row, Verdict
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome, Share
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record, generation_and_count
from penstock.core.scan import scan
from penstock.operate.recompute import Gone, Judged, Report, _Late, recompute
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Channel, Description
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stores import make_store
from penstock.run.new_checkpoint import Begin, Renewal
from penstock.stores.lake import LakeStore
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.redis import redis_service
from penstock.supervise.supervisor import Supervisor
from penstock.testing import ManualClock

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A pipeline with one query, of which every step is taken by hand."""

    kafka: Kafka
    engine: Engine
    description: Description
    config: Config
    eventually: Eventually

    @property
    def query(self) -> Query:
        return self.description.queries[0]

    @property
    def things(self) -> str:
        return self.query.inputs[0]

    @property
    def checkpoint(self) -> Path:
        return Path(self.engine.checkpoints) / self.query.name

    def send(self, *named: tuple[int, str]) -> None:
        """Records by number and name, all in one partition."""
        records = [
            Record(json.dumps({"name": name, "n": number}).encode(), Origin("kiosk", 1, number, number), b"k")
            for number, name in named
        ]
        self._post(self.things, records)

    def _post(self, channel: str, records: Sequence[Record]) -> None:
        async def go() -> None:
            async with self.kafka.sender() as sender:
                await sender.send(channel, records)

        asyncio.run(go())

    def run(self) -> None:
        """Run the query until it has covered all, and stop it."""
        running, _ = launch(self.engine, self.query, 0, {})
        try:
            self.eventually(lambda: (covered(str(self.checkpoint)) or {}).get(self.things) == self.ends())
        finally:
            running.stop()

    def ends(self) -> Mapping[int, int]:
        return {partition: end for partition, (_, end) in self.kafka.bounds(self.things).items()}

    def load(self) -> None:
        """Bring the result into its stores."""
        some = list(scan(self.kafka, self.query.into))
        for spec in self.description.stores:
            store = make_store(spec, self.description, self.config)
            with closing((LoadedLake(store) if isinstance(store, LakeStore) else store).open()) as table:
                table.positions()
                table.write(some, {})

    @property
    def lake(self) -> str:
        return str(self.config.folder / "lake")

    def moved(self, by: int) -> None:
        """Set the checkpoint forth or back, as no query ever should."""
        last = max((int(file.name) for file in self.checkpoint.glob("commits/[0-9]*")), default=0)
        file = self.checkpoint / "offsets" / str(last)
        *head, line = file.read_text().splitlines()
        offsets = json.loads(line)
        [busy] = [partition for partition, offset in offsets[self.things].items() if offset]
        offsets[self.things][busy] += by
        file.write_text("\n".join([*head, json.dumps(offsets)]))
        file.with_name(f".{last}.crc").unlink(missing_ok=True)

    def tell(self, late: int, conserved: bool = True, at: Sequence[int] = ()) -> None:
        """What the query would say of itself; `at`: where the late ones lie, as far as it knows."""
        [busy] = [str(partition) for partition, end in self.ends().items() if end]
        runs = [(offset, offset) for offset in at]
        share = Share({}, self.ends(), 0, {Outcome.LATE: late}, {"kiosk": {"1": [(8, 8)]}}, {busy: runs})
        account = Account(f"query:{self.query.name}", "one", 0, {self.things: share}, conserved=conserved)
        self._post(self.description.bookmarks, [Record(account.dumps(), key=account.key)])

    def report(self, wait: float = 0.0, at: int | None = None) -> Report:
        clock = ManualClock(time.time_ns() // 1_000 if at is None else at)
        return recompute(
            self.engine, self.kafka, self.description, self.config, self.query, lambda _: None, wait, clock
        )


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with StateFolder(tmp_path_factory.mktemp("redis") / ".penstock").locked() as folder:
        service, url = redis_service(folder, LocalSettings())
        supervisor = Supervisor([service], folder)
        supervisor.start()
        yield url
        supervisor.stop()


@pytest.fixture
def case(
    kafka: Kafka, spark: SparkSession, redis_url: str, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> Case:
    things, totals = fresh("things").replace("-", "_"), fresh("totals").replace("-", "_")
    app = Pipeline(fresh("app"))
    app.channel(things, schema="name STRING NOT NULL, n BIGINT")
    text = f"SELECT name, sum(n) AS total, sum(n * 0.1D) AS tenths, seen() FROM {things} GROUP BY name"
    app.sql_query(totals, key="name", sql=text)
    app.store(totals, "redis://", ttl="1 day")
    app.store(totals, "delta://lake")
    settings = SparkSettings(real_time_batch="5 seconds", every="200 ms", real_time_queries=0)
    description, config, engine = set_up(app, kafka, redis_url, tmp_path, spark, settings)
    return Case(kafka, engine, description, config, eventually)


SOME = [(1, "a"), (2, "b"), (3, "a"), (4, "c"), (5, "a"), (6, "b")]


def of(report: Report, kind: str) -> Judged:
    [found] = [one for one in report.judged if one.holder.startswith(kind)]
    return found


def test_a_query_that_ran_well_is_equal_for_everybody(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.load()
    report = case.report()
    assert [one.holder.split(":")[0] for one in report.judged] == ["channel", "feed", "store", "store"]
    assert [dict(one.counts) for one in report.judged] == [{Verdict.EXACT: 3}] * 4
    assert (report.code, report.gone, report.covered, report.ends) == (0, (), report.ends, {case.things: case.ends()})
    assert json.loads(json.dumps(report.to_json()))["equal"] is True


def test_a_new_life_counts_from_where_it_began_for_everybody(case: Case) -> None:
    """Rows with lower counts take the place of those of the life before, and what is not touched stays."""
    case.send(*SOME)
    case.run()
    case.load()
    [busy] = [partition for partition, end in case.ends().items() if end]
    begin = Begin(offsets={case.things: {busy: 2}})
    list(Renewal((case.query.name,), begin).apply(case.description, case.engine.checkpoints, case.kafka))
    case.send((7, "c"), (8, "d"))
    case.run()
    case.load()
    report = case.report()
    assert report.equal
    assert [dict(one.counts) for one in report.judged] == [{Verdict.EXACT: 4}] * 4
    # From the last record on, two names are not seen again.
    begin = Begin(offsets={case.things: {busy: 6}})
    list(Renewal((case.query.name,), begin).apply(case.description, case.engine.checkpoints, case.kafka))
    case.run()
    case.load()
    report = case.report()
    assert report.equal
    assert [dict(one.counts) for one in report.judged] == [{Verdict.EXACT: 2, Verdict.EARLIER: 2}] * 4
    with redis.Redis.from_url(case.config.redis.url) as client:
        name = f'penstock:{case.query.into}:row:["c"]'
        assert json.loads(str(client.hget(name, "row"), "utf-8"))["total"] == 7
        assert generation_and_count(int(client.hget(name, "version") or 0)) == (2, 1)
    # Where it began is gone by now, and there are more partitions than there were.
    admin = AdminClient({"bootstrap.servers": case.kafka.servers})
    [done] = admin.delete_records([TopicPartition(case.things, busy, 7)]).values()
    done.result()
    more = len(case.ends()) + 1
    case.kafka.ensure([Topic(case.things, more)])
    case.eventually(lambda: len(case.ends()) == more)
    report = case.report()
    assert report.gone == (Gone(case.things, busy, 6, 6),)
    assert dict(of(report, "channel").counts) == {Verdict.EXACT: 1, Verdict.UNKNOWN: 3}


def test_a_record_that_the_query_skipped_is_found(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.send((7, "b"))
    case.moved(+1)
    report = case.report()
    [found] = of(report, "channel").differences
    assert (found.key, found.how, found.short) == (b'["b"]', How.FEWER, 1)
    assert found.columns["total"] == (8, 15)
    assert report.record_of(found) == "lacks kiosk/1: 7"
    assert report.code == 1
    assert [one.key for one in of(report, "feed").differences] == [found.key]


def test_a_record_that_the_query_counted_twice_is_found(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.moved(-1)
    case.run()
    report = case.report()
    [found] = of(report, "channel").differences
    assert (found.key, found.how) == (b'["b"]', How.EXCEEDS)
    assert found.columns["total"] == (14, 8)
    assert report.record_of(found) == "counts twice kiosk/1: 6"


def test_a_row_that_a_store_holds_otherwise_is_told_with_its_columns(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.load()
    name = f'penstock:{case.query.into}:row:["a"]'
    with redis.Redis.from_url(case.config.redis.url) as client:
        row = json.loads(str(client.hget(name, "row"), "utf-8"))
        client.hset(name, "row", json.dumps({**row, "total": 1, "tenths": row["tenths"] * (1 + 1e-12)}))
    report = case.report()
    [found] = of(report, "store:redis").differences
    assert (found.key, found.how, found.columns) == (b'["a"]', How.VALUES, {"total": (1, 9)})
    assert not any(of(report, kind).differences for kind in ("channel", "feed", "store:delta"))


def test_a_row_that_is_gone_from_a_store_is_missing_until_its_time_is_over(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.load()
    with redis.Redis.from_url(case.config.redis.url) as client:
        client.delete(f'penstock:{case.query.into}:row:["a"]')
    [found] = of(case.report(), "store:redis").differences
    assert (found.key, found.how) == (b'["a"]', How.MISSING)
    later = case.report(at=time.time_ns() // 1_000 + 2 * 86_400_000_000)
    assert dict(of(later, "store:redis").counts) == {Verdict.EXACT: 2, Verdict.PERISHED: 1}
    assert later.code == 0


def test_what_a_store_has_not_loaded_yet_is_on_its_way(case: Case) -> None:
    case.send(*SOME[:3])
    case.run()
    case.load()
    case.send(*SOME[3:])
    case.run()
    report = case.report()
    assert dict(of(report, "store:redis").counts) == {Verdict.WAITING: 3}
    assert report.code == 0


def test_rows_that_are_ahead_of_the_commit_lie_within_bounds(case: Case) -> None:
    case.send(*SOME)
    case.run()
    commits = set((case.checkpoint / "commits").iterdir())
    case.send((7, "a"), (8, "c"))
    case.run()
    for file in set((case.checkpoint / "commits").iterdir()) - commits:
        file.unlink()
    case.send((9, "a"))
    report = case.report()
    assert dict(of(report, "channel").counts) == {Verdict.EXACT: 2, Verdict.BOUNDED: 1}
    assert report.code == 0
    assert report.covered != report.ends


def test_the_part_of_the_log_that_is_gone_is_told(case: Case) -> None:
    case.send(*SOME)
    case.run()
    [busy] = [partition for partition, end in case.ends().items() if end]
    admin = AdminClient({"bootstrap.servers": case.kafka.servers})
    for offset, counts in ((3, {Verdict.EXACT: 1, Verdict.UNKNOWN: 2}), (6, {Verdict.UNKNOWN: 3})):
        [done] = admin.delete_records([TopicPartition(case.things, busy, offset)]).values()
        done.result()
        report = case.report()
        assert report.gone == (Gone(case.things, busy, 0, offset - 1),)
        assert dict(of(report, "channel").counts) == counts
        assert report.code == (0 if Verdict.EXACT in counts else 2)


def test_records_that_came_too_late_are_not_recomputed_where_it_is_known_which_they_are(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.send((7, "b"), (8, "d"))
    case.moved(+2)
    case.tell(late=2, at=(6, 7))
    report = case.report()
    assert (report.code, report.late, report.late_left_out) == (0, 2, True)
    assert not of(report, "channel").differences
    # One more is missing than was late: it does not pass for late.
    case.tell(late=1, at=(7,))
    report = case.report()
    [lacking] = of(report, "channel").differences
    assert (report.code, report.record_of(lacking)) == (1, "lacks kiosk/1: 7")


def test_a_copy_that_came_late_does_not_explain_a_record_that_is_missing(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.send((7, "b"), (1, "a"))
    case.moved(+2)
    case.tell(late=1, at=(7,))
    report = case.report()
    [lacking] = of(report, "channel").differences
    assert (report.code, report.record_of(lacking)) == (1, "lacks kiosk/1: 7")


def test_a_record_that_the_log_holds_twice_is_named_as_a_duplicate(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.send((8, "d"))
    case.send((8, "e"))
    case.moved(+2)
    case.tell(late=0)
    report = case.report()
    named = [report.record_of(one) for one in of(report, "channel").differences]
    assert report.code == 1
    assert all("duplicate" in one and "late" not in one for one in named)


def test_records_that_came_too_late_may_explain_what_is_lacking_but_do_not_prove_it(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.send((7, "b"), (8, "d"))
    case.moved(+2)
    assert case.report().code == 1
    case.tell(late=1)
    assert case.report().code == 1
    case.tell(late=1, conserved=False)
    assert case.report().code == 2
    case.tell(late=2)
    report = case.report()
    lacking, missing = of(report, "channel").differences
    assert (lacking.how, missing.how) == (How.FEWER, How.MISSING)
    assert report.record_of(lacking) == "lacks kiosk/1: 7"
    assert report.record_of(missing) == "lacks kiosk/1: 8, which was late"
    assert (report.code, report.late, of(report, "channel").late) == (2, 2, True)


def test_sessions_are_equal_to_those_without_what_came_too_late(case: Case, fresh: Fresh) -> None:
    """In a batch, two late records would make one session of two."""
    things, sessions = fresh("things").replace("-", "_"), fresh("sessions").replace("-", "_")
    app = Pipeline(fresh("app"))
    app.channel(things, schema="name STRING NOT NULL, n BIGINT", event_time="timestamp_seconds(n)")
    gap = "session_window(event_time, '10 seconds')"
    text = f"SELECT {gap} AS session, name, seen() FROM {things} GROUP BY {gap}, name"
    app.sql_query(sessions, key=["session", "name"], watermark="5 seconds", sql=text)
    description = app.describe()
    case.kafka.ensure(topics(description))
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    case = replace(case, description=description, engine=replace(case.engine, shapes=shapes))

    def rows() -> int:
        return sum(end for _, end in case.kafka.bounds(sessions).values())

    case.send((100, "a"), (105, "a"), (130, "a"), (200, "b"))
    running, _ = launch(case.engine, case.query, 0, {})
    try:
        case.eventually(lambda: rows() == 2)
        case.send((112, "a"), (121, "a"), (300, "b"))
        case.eventually(lambda: rows() == 3)
        accounting = QueryAccounting(case.engine, case.query, running, None, case.kafka, SystemClock())
        case.eventually(lambda: accounting.look() is None and accounting.account.shares[things].until == case.ends())
    finally:
        running.stop()
    share = accounting.account.shares[things]
    assert (share.outcomes[Outcome.LATE], share.all_late_at) == (2, True)
    case._post(description.bookmarks, [Record(accounting.account.dumps(), key=accounting.account.key)])
    report = case.report()
    assert (report.code, report.late, report.late_left_out) == (0, 2, True)
    assert dict(of(report, "channel").counts) == {Verdict.EXACT: 3, Verdict.WAITING: 1}


def test_a_query_in_real_time_is_waited_for_until_it_commits(case: Case) -> None:
    case.send(*SOME)
    case = replace(case, description=replace(case.description, stores=()))
    running, _ = launch(case.engine, case.query, 1, {})
    case.eventually(lambda: covered(str(case.checkpoint)) is not None)
    case.send((7, "a"))
    report = case.report(wait=60)
    running.stop()
    assert report.covered == report.ends
    assert dict(of(report, "channel").counts) == {Verdict.EXACT: 3}


def test_a_query_that_has_committed_nothing_cannot_be_compared(case: Case) -> None:
    with pytest.raises(Misconfigured, match="it has committed nothing yet; let it run"):
        case.report()


def test_a_checkpoint_that_is_ahead_of_its_channel_is_refused(case: Case) -> None:
    case.send(*SOME)
    case.run()
    case.moved(+1)
    with pytest.raises(Misconfigured, match=r"up to 7 in partition \d, which ends at 6: this is another channel"):
        case.report()


def test_a_query_over_a_result_that_has_lost_rows_cannot_be_recomputed(case: Case) -> None:
    case.send(*SOME)
    case.run()
    first = case.query
    second = Query("second", (first.into,), "second", ("name",), f"SELECT name, total, seen FROM {first.into}")
    channels = {**case.description.channels, "second": Channel("second", result_of="second")}
    queries = (first, second)
    case = replace(
        case,
        description=replace(case.description, channels=channels, queries=queries, stores=()),
        engine=case.engine.knowing(queries),
    )
    case.kafka.ensure(topics(case.description))
    [(_, end)] = case.kafka.bounds(first.into).values()
    for part in ("offsets", "commits"):
        folder = Path(case.engine.checkpoints) / "second" / part
        folder.mkdir(parents=True)
        (folder / "0").write_text("v1\n{}\n" + json.dumps({first.into: {"0": end + 2}}))
    # As compaction would: offsets that hold nothing.
    producer = Producer({"bootstrap.servers": case.kafka.servers, "transactional.id": first.into})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(first.into, b"{}", b'["z"]')
    producer.flush(30)
    producer.abort_transaction(30)
    case.eventually(lambda: case.kafka.bounds(first.into)[0][1] == end + 2)
    with pytest.raises(Misconfigured, match=f"channel {first.into}: compaction has removed 2 of"):
        recompute(case.engine, case.kafka, case.description, case.config, second, wait=0)


@pytest.mark.parametrize(("other", "explained"), [(Verdict.EARLIER, False), (Verdict.PERISHED, True)])
def test_rows_of_an_earlier_life_hide_no_late_record(other: Verdict, explained: bool) -> None:
    """Two records came too late, and a row lacks one: the other may belong to a row that is gone, not to an old one."""
    lacking = Difference(b"k", How.FEWER, Row(b"{}", 2), Row(b"{}", 3))
    found = Comparison(Counter({Verdict.DIFFERENT: 1, Verdict.EXACT: 4, other: 1}), (lacking,))
    assert _Late(2, conserved=True).explains(found) is explained


def test_a_query_is_found_by_its_name_or_its_result() -> None:
    app = Pipeline("app")
    app.sql_query("by_country", into="countries", key="name", sql="SELECT * FROM things")
    app.channel("things")
    description = app.describe()
    assert description.query("by_country") is description.query("countries")
    with pytest.raises(Misconfigured, match='has no query "by_contry"; did you mean "by_country"'):
        description.query("by_contry")
