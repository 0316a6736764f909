"""What the doctor says beforehand, and what Spark does when it is started all the same: a real broker, a real Spark."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.channels.traffic import send

from penstock.analysis.checkpoints.doctor import Diagnosis, Facts, Fit
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import description, encoded, seen
from penstock.analysis.launch import examined
from penstock.analysis.query import Emit, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record

Fresh = Callable[[str], str]
Build = Callable[..., DataFrame]
Change = Callable[[Query], Query]

SHUFFLE = "spark.sql.shuffle.partitions"
DDL = "name STRING NOT NULL, city STRING, n BIGINT, m BIGINT, at BIGINT NOT NULL"


def per_window(things: DataFrame, *by: str, size: str = "10 seconds") -> DataFrame:
    return things.groupBy(F.window("event_time", size), *(by or ("name",))).agg(F.sum("n").alias("total"), seen())


def both(things: DataFrame, others: DataFrame) -> DataFrame:
    return per_window(things.unionByName(others))


def thing(seq: int) -> Record:
    value = {"name": f"n{seq % 3}", "city": "here", "n": seq, "m": -seq, "at": 1_700_000_000_000 + 100 * seq}
    return Record(json.dumps(value).encode(), Origin("s", 1, seq, seq), b"%d" % seq)


@dataclass(frozen=True)
class Stand:
    """A query that has run once, and the same for changed ones: each with a copy of its checkpoint."""

    engine: Engine
    query: Query
    facts: Facts

    def changed(self, name: str, query: Query) -> tuple[Diagnosis, str | None]:
        """What the doctor says, and what Spark has against it."""
        folder = Path(self.engine.checkpoints).parent / name
        shutil.copytree(self.engine.checkpoint(self.query.name), folder / query.name)
        # Spark runs only one query of an id at once.
        (folder / query.name / "metadata").write_text(json.dumps({"id": str(uuid4())}))
        (folder / query.name / ".metadata.crc").unlink(missing_ok=True)
        engine = replace(self.engine, checkpoints=str(folder))
        said = examined(engine, query, self.facts)
        return said, started_anyway(engine, query)


def started_anyway(engine: Engine, query: Query) -> str | None:
    result = engine.frame(query, engine.stream)
    writer = engine.connector.into(encoded(result, query), query.into).option(
        "checkpointLocation", engine.checkpoint(query.name)
    )
    writer = writer.outputMode("append" if query.emit is Emit.FINAL else "update").trigger(availableNow=True)
    try:
        running = writer.start()
        assert running.awaitTermination(90)
    except (StreamingQueryException, PySparkException) as error:
        return description(error)
    return None


@contextmanager
def standing(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, folder: Path, build: Build, *names: str
) -> Iterator[Stand]:
    channels, into = [fresh(name) for name in names], fresh("totals")
    others = fresh("strangers")
    kafka.ensure([Topic(name) for name in (*channels, others, into)])
    shapes = {name: Shape(name, DDL, "timestamp_millis(at)") for name in (*channels, others)}
    engine = Engine(spark, SparkSettings(), KafkaConnector(kafka.servers), str(folder / "first"), shapes)
    wait = timedelta(seconds=10)
    query = Query("totals", tuple(channels), into, ("window", "name"), build, Mode.MICRO_BATCH, watermark=wait)
    for name in channels:
        send(kafka, name, [thing(seq) for seq in range(1, 50)])
    # Its first life is that of Spark alone, under a note of ours.
    found = examined(engine, query)
    assert found.fit is Fit.NEW
    found.require().write(engine.checkpoint(query.name))
    assert started_anyway(engine, query) is None
    for name in (*channels, others):
        send(kafka, name, [thing(seq) for seq in range(50, 60)])
    topics = {name: kafka.topic_id(name) for name in channels}
    yield Stand(engine, query, Facts(topics, {name: kafka.bounds(name) for name in channels}))


ACCEPTED: dict[str, Change] = {
    "as it was": lambda query: query,
    "another filter": lambda query: replace(query, where="n > 1"),
    "another projection": lambda query: built(query, lambda frame: per_window(frame).withColumn("more", F.lit(1))),
    "another watermark": lambda query: replace(query, watermark=timedelta(seconds=20)),
    "another window": lambda query: built(query, lambda frame: per_window(frame, size="20 seconds")),
    "rows when they are final": lambda query: replace(query, emit=Emit.FINAL),
}
REFUSED: dict[str, Change] = {
    "a key of another type": lambda query: built(query, lambda frame: per_window(frame, "m"), key="m"),
    "one more key": lambda query: built(query, lambda frame: per_window(frame, "name", "city")),
    "another type of sum": lambda query: built(
        query, lambda frame: per_window(frame.withColumn("n", F.col("n").cast("double")))
    ),
    "one more aggregate": lambda query: built(
        query,
        lambda frame: frame.groupBy(F.window("event_time", "10 seconds"), "name").agg(F.max("n"), F.sum("n"), seen()),
    ),
    "no duplicates": lambda query: built(query, lambda frame: per_window(frame.dropDuplicates(["n", "event_time"]))),
    "no state": lambda query: built(query, lambda frame: frame.select("name", "n", "origin"), key="n"),
}
BY_US_ALONE: dict[str, Change] = {
    "another key of the same type": lambda query: built(query, lambda frame: per_window(frame, "city"), key="city"),
    "another sum of the same type": lambda query: built(
        query,
        lambda frame: frame.groupBy(F.window("event_time", "10 seconds"), "name").agg(
            F.sum("m").alias("total"), seen()
        ),
    ),
}
"""What Spark does not notice: the state would go on as something else."""


def built(query: Query, build: Build, key: str = "name") -> Query:
    columns = (key,) if key == "n" else ("window", key)
    return replace(query, build=build, key=columns)


def test_the_doctor_refuses_what_spark_refuses_and_accepts_what_it_accepts(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, tmp_path: Path
) -> None:
    with standing(spark, kafka, fresh, tmp_path, per_window, "things") as stand, ThreadPoolExecutor(4) as pool:
        changes = {**ACCEPTED, **REFUSED, **BY_US_ALONE}
        running = {name: pool.submit(stand.changed, name, change(stand.query)) for name, change in changes.items()}
        other = spark.conf.get(SHUFFLE)
        found = {name: one.result() for name, one in running.items()}
        said = {name: str(diagnosis) for name, (diagnosis, _) in found.items()}
        objections = {name: objection for name, (_, objection) in found.items()}
        assert {name for name, (diagnosis, _) in found.items() if diagnosis.fit is Fit.REFUSED} == {
            *REFUSED,
            *BY_US_ALONE,
        }, said
        assert {name for name, objection in objections.items() if objection} == {*REFUSED}, objections
        changed = "it has changed, but not its state"
        assert said["as it was"] == "fits"
        assert all(changed in said[name] for name in ACCEPTED if name not in ("as it was", "rows when they are final"))
        assert "its rows are written once, when they are final" in said["rows when they are final"]
        assert "is kept by window struct" in said["one more key"]

        spark.conf.set(SHUFFLE, "5")
        try:
            diagnosis, objection = stand.changed("more partitions", stand.query)
        finally:
            spark.conf.set(SHUFFLE, str(other))
        assert (diagnosis.fit, objection) == (Fit.FITS, None)
        assert f"it uses {SHUFFLE} = {other} of its checkpoint, not 5" in str(diagnosis)

        # Without our note, the word of Spark is enough, and is told in our words.
        (Path(stand.engine.checkpoint(stand.query.name)) / "penstock.json").unlink()
        wider, _ = stand.changed("alone", REFUSED["another type of sum"](stand.query))
        assert wider.problem.startswith("its state has value columns sum long, count long")
        wider, _ = stand.changed("alone too", REFUSED["no duplicates"](stand.query))
        assert wider.problem == "its state is of an aggregation, and would be of an aggregation, dropDuplicates"


def test_sources_are_known_by_their_number_and_order(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, tmp_path: Path
) -> None:
    with standing(spark, kafka, fresh, tmp_path, both, "things", "others") as stand:
        query, (first, second) = stand.query, stand.query.inputs
        strangers = next(name for name in stand.engine.shapes if name not in query.inputs)
        changes = {
            "swapped": replace(query, build=lambda one, other: both(other, one)),
            "one less": replace(query, inputs=(first,), build=per_window),
            "one more": replace(
                query,
                inputs=(first, second, strangers),
                build=lambda one, other, more: both(one.unionByName(other), more),
            ),
            "another": replace(query, inputs=(first, strangers)),
        }
        with ThreadPoolExecutor(4) as pool:
            running = {name: pool.submit(stand.changed, name, change) for name, change in changes.items()}
            found = {name: one.result() for name, one in running.items()}
        assert all(objection for _, objection in found.values()), found
        problems = {name: diagnosis.problem.rpartition(": ")[2] for name, (diagnosis, _) in found.items()}
        assert problems == {
            "swapped": "the order of sources may not change",
            "one less": "the number of its sources may not change",
            "one more": "the number of its sources may not change",
            "another": "its sources may not change",
        }
        assert stand.changed("as it was", query)[0].fit is Fit.FITS
