"""State that is spread over another number of partitions: a real Spark, on checkpoints of real queries."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.analysis.state import cards

from penstock import seen
from penstock.analysis.checkpoints.rescale import recover, rescale, spread
from penstock.analysis.engine import Engine
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.launching import failed, launch
from penstock.analysis.query import Mode, Query
from penstock.analysis.settings import SparkSettings
from penstock.analysis.slots import need
from penstock.audit.held import held
from penstock.channels.kafka import Kafka
from penstock.contracts import Topic
from penstock.errors import Misconfigured

cloudpickle.register_pickle_by_value(cards)  # type: ignore[no-untyped-call]  # it has no types


def counted(uses: DataFrame) -> DataFrame:
    return uses.groupBy("city").agg(seen())


def checkpoint(folder: Path, batch: int = 3, partitions: int = 2) -> Path:
    """The parts of one that are looked at without Spark."""
    for kind in ("offsets", "commits"):
        (folder / kind).mkdir(parents=True)
        for number in range(batch + 1):
            conf = {"conf": {"spark.sql.shuffle.partitions": str(partitions)}}
            (folder / kind / str(number)).write_text(f"v1\n{json.dumps(conf)}\n{{}}")
    return folder


def test_state_is_whole_after_it_was_spread_anew_though_the_last_batch_was_not_finished(
    spark: SparkSession, kafka: Kafka, fresh: Callable[[str], str], eventually: Callable[..., None], tmp_path: Path
) -> None:
    channel, into, cities = fresh("uses"), fresh("approved"), fresh("cities")
    kafka.ensure([Topic(channel, 2), Topic(into), Topic(cities)])
    settings = SparkSettings(every="100 ms")
    engine = Engine(spark, settings, KafkaWire(kafka.servers), str(tmp_path), {channel: cards.shape(channel)})
    queries = [
        cards.query(channel, into),
        Query("cities", (channel,), cities, ("city",), counted, Mode.MICRO_BATCH),
    ]
    uses = cards.used(3, 200)

    def verdicts() -> dict[int, tuple[object, ...]]:
        found = (orjson.loads(entry.value or b"") for entry in held(kafka, into))
        return {row["n"]: (row["card"], row["verdict"], row["total"], row["times"]) for row in found}

    def totals() -> dict[str, int]:
        newest: Counter[str] = Counter()
        for entry in held(kafka, cities):
            row = orjson.loads(entry.value or b"")
            newest[row["city"]] = max(newest[row["city"]], row["seen"]["count"])
        return newest

    def numbers(query: Query, kind: str) -> list[int]:
        return sorted(int(file.name) for file in (tmp_path / query.name / kind).glob("[0-9]*"))

    def go_on(*rounds: tuple[int, int]) -> list[StreamingQuery]:
        running = [launch(engine, query, 0, {})[0] for query in queries]
        for first, last in rounds:
            cards.send(kafka, channel, uses[first:last])
            due = cards.verdicts(uses[:last]), Counter(city for _, _, city, *_ in uses[:last])
            eventually(lambda due=due: failed(running) or (verdicts(), totals()) == due, 120)
            assert failed(running) is None
            # Its rows are there before its note that it has finished the batch.
            eventually(lambda: all(numbers(query, "offsets") == numbers(query, "commits") for query in queries))
        for one in running:
            one.stop()
        return running

    go_on((0, 50), (50, 100))
    # As if it was killed between its last row and its note of that.
    for query in queries:
        (tmp_path / query.name / "commits" / str(numbers(query, "commits")[-1])).unlink()
    said: list[str] = []
    done = rescale(spark, "approved", str(tmp_path / "approved"), 5, said.append)
    # Fewer, and then more than ever.
    assert rescale(spark, "cities", str(tmp_path / "cities"), 1).rows == 3
    assert rescale(spark, "cities", str(tmp_path / "cities"), 4).rows == 3
    assert (done.before, done.after, done.unfinished) == (2, 5, True)
    assert [line.split()[0] for line in said] == ["keeping", "spreading", "comparing"]
    assert not list(tmp_path.glob("*.*"))
    with pytest.raises(Misconfigured, match="query approved: its state has 5 partitions already"):
        rescale(spark, "approved", str(tmp_path / "approved"), 5)
    # Each by its own number, in one session.
    told = [running.lastProgress for running in go_on((100, 200))]
    assert [one and one.stateOperators[0].numShufflePartitions for one in told] == [5, 4]
    assert [spread(engine.checkpoint(query.name)) for query in queries] == [5, 4]


def test_what_spark_refuses_leaves_the_checkpoint_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "odd")
    before = sorted(file.relative_to(folder) for file in folder.rglob("*"))
    with pytest.raises(Misconfigured, match="query odd: it keeps no state"):
        rescale(spark, "odd", str(folder), 4)
    assert sorted(file.relative_to(folder) for file in folder.rglob("*")) == before
    assert [one.name for one in tmp_path.iterdir()] == ["odd"]


def test_where_no_copy_can_be_kept_nothing_is_done(spark: SparkSession, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "odd")
    (folder / "nowhere").symlink_to(tmp_path / "nothing")
    with pytest.raises(Misconfigured, match=r"no copy of its checkpoint can be kept: .*; it takes .* MiB beside .*odd"):
        rescale(spark, "odd", str(folder), 4)
    assert [one.name for one in tmp_path.iterdir()] == ["odd"]


@pytest.mark.parametrize(
    ("folder", "partitions", "problem"),
    [
        ("odd", 0, "0 partitions are asked for; ask for one or more"),
        ("none", 4, "it has no checkpoint at .*none; set .spark. shuffle_partitions"),
        ("new", 4, "it has not finished a batch yet"),
        ("hdfs://far/odd", 4, "its checkpoint lies at hdfs://far/odd, where no copy of it can be kept"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    folder: str, partitions: int, problem: str, spark: SparkSession, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "odd")
    shutil.rmtree(checkpoint(tmp_path / "new") / "commits")
    with pytest.raises(Misconfigured, match=problem):
        rescale(spark, "odd", folder if "://" in folder else str(tmp_path / folder), partitions)


def test_a_rescaling_that_was_cut_short_is_undone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "odd")
    assert not recover(str(folder))
    shutil.copytree(folder, tmp_path / "odd.being-copied")
    assert not recover(str(folder))
    assert [one.name for one in tmp_path.iterdir()] == ["odd"]
    checkpoint(tmp_path / "odd.before-rescale", partitions=7)
    assert recover(str(folder))
    assert spread(str(folder)) == 7
    assert [one.name for one in tmp_path.iterdir()] == ["odd"]
    folder.rename(tmp_path / "odd.before-rescale")
    assert recover(str(folder))
    assert spread(str(folder)) == 7


def test_a_checkpoint_tells_its_own_number_of_partitions(tmp_path: Path) -> None:
    assert spread(str(tmp_path / "none")) is None
    assert spread("hdfs://far/away") is None
    folder = checkpoint(tmp_path / "odd", partitions=6)
    assert spread(str(folder)) == 6
    (folder / "offsets" / "4").write_text("")
    assert spread(str(folder)) is None


def test_slots_are_counted_by_the_partitions_that_state_really_has() -> None:
    queries = [Query("a", ("x",), "a", ("k",), ""), Query("b", ("x",), "b", ("k",), "")]
    assert need(queries, {"a": 1}, {"x": 1}, [], 2).most == (1 + 2) + 2
    assert need(queries, {"a": 1}, {"x": 1}, [], 2, {"a": 8, "b": 5}).most == (1 + 8) + 5
