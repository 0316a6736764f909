"""What a checkpoint says of how far its query has come, and which of its files have to be there."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.analysis.checkpoints.folders import checkpoint as whole
from tests.channels.traffic import read, send
from tests.damaging import Damage, flipped, overwritten, truncated
from tests.damaging import emptied as cleared

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.checkpoints.batches import (
    EXCLUDED_FILE,
    Batch,
    Excluded,
    abandon_batch,
    abandoned_batches,
    batches,
    covered,
    exclude,
    excluded,
    resume_batch,
    written,
)
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.launch import failed, launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record


def checkpoint(folder: Path, offsets: dict[int, str], commits: list[int]) -> str:
    for name in ("offsets", "commits"):
        (folder / name).mkdir()
    for batch, text in offsets.items():
        (folder / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{text}')
    for batch in commits:
        (folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return str(folder)


def test_the_last_committed_batch_counts_not_the_one_that_runs(tmp_path: Path) -> None:
    written = {9: '{"a":{"0":5,"1":7}}', 10: '{"a":{"0":8,"1":9}}', 11: '{"a":{"0":10,"1":10}}'}
    folder = checkpoint(tmp_path, written, [9, 10])
    assert covered(folder) == covered(f"file://{folder}") == {"a": {0: 8, 1: 9}}
    assert [batch.number for batch in batches(folder)] == [9, 10]
    assert [batch.number for batch in batches(folder, begun=True)] == [9, 10, 11]


def test_each_source_has_a_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {0: '{"a":{"0":5}}\n-\n{"b":{"0":6}}\n{"a":{"0":4}}'}, [0])
    assert covered(folder) == {"a": {0: 4}, "b": {0: 6}}


def test_a_query_that_has_committed_nothing_covers_nothing(tmp_path: Path) -> None:
    assert covered(str(tmp_path / "none")) is None
    assert covered(checkpoint(tmp_path, {0: '{"a":{"0":5}}'}, [])) is None


def test_a_checkpoint_elsewhere_is_not_looked_into() -> None:
    assert covered("s3://bucket/checkpoints/a") is None


@pytest.mark.parametrize("text", ["{", "[1]", '{"a":{"0":"x"}}', '{"a":3}'])
def test_a_broken_checkpoint_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=f"checkpoint {tmp_path}: its offsets cannot be read"):
        covered(checkpoint(tmp_path, {0: text}, [0]))


def test_a_batch_without_its_offsets_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="its offsets cannot be read"):
        covered(checkpoint(tmp_path, {}, [3]))


def test_finished_batches_are_remembered_with_their_watermarks(tmp_path: Path) -> None:
    written = {9: '{"a":{"0":5}}', 10: '{"a":{"0":8}}', 11: '{"a":{"0":10}}'}
    folder = checkpoint(tmp_path, written, [9, 10])
    (tmp_path / "offsets" / "10").write_text('v1\n{"batchWatermarkMs":77}\n{"a":{"0":8}}')
    assert batches(folder) == [Batch(9, 0, {"a": {0: 5}}), Batch(10, 77, {"a": {0: 8}})]


def test_what_lies_before_a_hole_is_not_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {9: '{"a":{"0":5}}', 11: '{"a":{"0":8}}'}, [9, 10, 11])
    assert [batch.number for batch in batches(folder)] == [11]
    assert batches("s3://bucket/a") == []


Fresh = Callable[[str], str]
Eventually = Callable[..., None]


def begun(folder: Path, *numbers: int) -> None:
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / "offsets" / str(number)).write_text(
            f'v1\n{{"batchWatermarkMs":0}}\n{{"things":{{"0":{number + 1}}}}}'
        )


def test_only_what_was_begun_and_not_finished_is_given_up(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert abandon_batch(folder) is None
    begun(tmp_path, 0)
    assert abandon_batch(folder) == 0
    assert abandon_batch(folder) is None
    assert (tmp_path / "commits" / "0").read_text() == 'v1\n{"nextBatchWatermarkMs":0}'
    begun(tmp_path, 1)
    (tmp_path / "commits" / "0").write_text("as Spark writes it")
    assert abandon_batch(folder) == 1
    assert (tmp_path / "commits" / "1").read_text() == "as Spark writes it"
    assert abandoned_batches(folder) == {0, 1}
    assert covered(folder) == {"things": {0: 2}}


def test_what_was_to_be_given_up_and_is_done_again_is_not_given_up(tmp_path: Path) -> None:
    begun(tmp_path, 0, 1)
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").touch()
    # As if a crash had come between the mark and the commit.
    for number in (0, 1):
        (tmp_path / "given-up").mkdir(exist_ok=True)
        (tmp_path / "given-up" / str(number)).touch()
    resume_batch(str(tmp_path))
    assert abandoned_batches(str(tmp_path)) == {0}
    (tmp_path / "commits" / "0").unlink()
    resume_batch(str(tmp_path))
    assert abandoned_batches(str(tmp_path)) == frozenset()


def test_what_lies_on_a_shared_file_system_is_left_alone() -> None:
    assert abandon_batch("hdfs://somewhere") is None
    resume_batch("hdfs://somewhere")
    assert abandoned_batches("hdfs://somewhere") == frozenset()


def test_what_is_given_up_is_not_written_again_and_counts_as_missing(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("bare")
    kafka.ensure([Topic(things), Topic(into)])
    shapes = {things: Shape(things, "n BIGINT")}
    engine = Engine(spark, SparkSettings(every="100 ms"), KafkaConnector(kafka.servers), str(tmp_path), shapes)
    query = Query("bare", (things,), into, ("n",), f"SELECT n FROM `{things}`", once=True)
    assert engine.abandons(query)

    def sent(first: int, last: int) -> None:
        send(kafka, things, [Record(b'{"n": %d}' % n, Origin("s", 1, n, n)) for n in range(first, last + 1)])

    def until(end: int, before: Account | None) -> Account:
        """Run until the query has read so far."""
        running, verdict = launch(engine, query, 1, {})
        assert verdict.mode is Mode.MICRO_BATCH
        assert "given up" in verdict.why
        accounting = QueryAccounting(engine, query, running, before, kafka, SystemClock())

        def there() -> bool:
            if error := failed([running]):
                raise error
            accounting.look()
            return accounting.account.shares[things].until == {0: end}

        eventually(there)
        running.stop()
        return accounting.account

    sent(1, 3)
    account = until(3, None)
    sent(4, 5)
    until(5, account)
    # As if the driver had died in this batch, after it had written: nothing tells that it was finished.
    last = max((tmp_path / "bare" / "commits").glob("[0-9]*"), key=lambda one: int(one.name))
    last.unlink()
    sent(6, 6)
    account = until(6, account)
    assert abandoned_batches(engine.checkpoint("bare")) == {int(last.name)}
    assert [json.loads(entry.value or b"")["n"] for entry in read(kafka, into, 6)] == [1, 2, 3, 4, 5, 6]
    assert sum(end for _, end in kafka.bounds(into).values()) == 6
    share = account.shares[things]
    assert (share.taken, share.outcomes[Outcome.PASSED]) == (4, 4)


def test_what_has_state_or_can_be_told_apart_is_done_again(spark: SparkSession, tmp_path: Path) -> None:
    shapes = {"things": Shape("things", "n BIGINT")}
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), shapes)
    for sql in (
        "SELECT n, origin FROM things",
        "SELECT n, count(1) AS times FROM things GROUP BY n",
        "SELECT DISTINCT n FROM things",
    ):
        assert not engine.abandons(Query("q", ("things",), "q", ("n",), sql, once=True))
    assert not engine.abandons(Query("q", ("things",), "q", ("n",), "SELECT n FROM things"))
    # What drops duplicates before the query has state as well.
    gate = {"things": Shape("things", "n BIGINT", unique="n")}
    behind = Query("q", ("things",), "q", ("n",), "SELECT n FROM things", once=True, watermark=timedelta(seconds=1))
    assert not replace(engine, shapes=gate).abandons(behind)
    assert engine.abandons(behind)
    assert engine.abandons(Query("q", ("things",), "q", ("n",), "SELECT n FROM things WHERE n > 1", once=True))


ONE, OTHER = Excluded("things", 0, 7, "why"), Excluded("things", 1, 7, "why not")


def test_records_are_added_and_each_is_there_once(tmp_path: Path) -> None:
    assert excluded(str(tmp_path)) == []
    exclude(str(tmp_path), [ONE])
    exclude(f"file://{tmp_path}", [ONE, OTHER])
    assert excluded(str(tmp_path)) == [ONE, OTHER]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2, "records": []}', '{"format": 1, "records": [{}]}'])
def test_a_list_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / EXCLUDED_FILE).write_text(text)
    with pytest.raises(Misconfigured) as told:
        excluded(str(tmp_path))
    assert told.value.location == f"checkpoint {tmp_path}"


def test_where_this_machine_cannot_look_nothing_is_excluded() -> None:
    assert excluded("s3://bucket/q") == []
    with pytest.raises(Misconfigured):
        exclude("s3://bucket/q", [ONE])


Harm = Callable[[Path], object]


def test_a_whole_checkpoint_tells_who_it_is_and_how_far_it_came(tmp_path: Path) -> None:
    found = written(whole(tmp_path / "q", batches=4, begun=1, sources=["things", "others"]))
    assert found is not None
    assert (found.id, found.begun, found.finished, found.sources) == ("an-id", 4, 3, ("things", "others"))
    assert found.metadata["conf"]["spark.sql.shuffle.partitions"] == "2"


def test_where_no_batch_was_begun_there_is_nothing_to_fit(tmp_path: Path) -> None:
    assert written(tmp_path / "none") is None
    (tmp_path / "metadata").write_text('{"id":"one"}')
    assert written(tmp_path) is None


def emptied(name: str) -> Harm:
    return lambda path: (path / name).write_text("")


def gone(name: str) -> Harm:
    return lambda path: (path / name).unlink()


def said(name: str, text: str) -> Harm:
    return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
    ("harm", "description"),
    [
        (gone("metadata"), "its file metadata, with the id of the query, is missing"),
        (emptied("metadata"), "its file metadata cannot be read"),
        (said("metadata", '{"name":"q"}'), "its file metadata cannot be read"),
        (emptied("offsets/3"), "offsets/3 cannot be read"),
        (said("offsets/3", "v1\n{"), "offsets/3 cannot be read"),
        (said("offsets/3", "v1\n[]\n{}"), "offsets/3 cannot be read"),
        (said("offsets/2", "nothing\n{}\n{}"), "offsets/2 cannot be read: it begins with 'nothing'"),
        (gone("offsets/3"), "batch 3 is committed, and its offsets (offsets/3) are missing"),
        (lambda path: shutil.rmtree(path / "offsets"), "batch 3 is committed"),
        (gone("offsets/2"), "offsets/2 is missing, which Spark needs"),
        (emptied("commits/3"), "commits/3 cannot be read"),
        (said("commits/3", "v1\n{"), "commits/3 cannot be read"),
        (lambda path: [gone(f"commits/{one}")(path) for one in (2, 3)], "batch 3 was started, and the previous one"),
        (gone("state/0/1/4.changelog"), "state/0/1 has no changelog of version 4"),
        (gone("state/0/1/3.changelog"), "state/0/1 has no changelog of version 3"),
        (emptied("state/0/0/3.changelog"), "state/0/0/3.changelog is empty"),
        (gone("state/0/0/left/4.changelog"), "state/0/0/left has no changelog of version 4"),
    ],
)
def test_what_is_missing_or_broken_is_named(harm: Harm, description: str, tmp_path: Path) -> None:
    path = whole(tmp_path / "q", batches=4)
    harm(path)
    with pytest.raises(Misconfigured) as refused:
        written(path)
    assert f"checkpoint {path}: it is damaged: {description}" in str(refused.value)


def test_steps_before_a_snapshot_are_not_needed(tmp_path: Path) -> None:
    path = whole(tmp_path / "q", batches=4)
    (path / "state/0/0/2.zip").write_text("all")
    for name in ("1.changelog", "2.changelog"):
        (path / "state/0/0" / name).unlink()
    assert written(path) is not None
    (path / "state/0/0/2.zip").write_text("")
    with pytest.raises(Misconfigured, match=r"state/0/0/2\.zip is empty"):
        written(path)


def test_a_step_of_a_batch_that_was_not_committed_does_no_harm(tmp_path: Path) -> None:
    path = whole(tmp_path / "q", batches=4, begun=1)
    (path / "state/0/0/5.changelog").write_text("")
    assert written(path) is not None


def test_files_of_the_second_format_are_known_by_the_ids_of_their_commit(tmp_path: Path) -> None:
    path = whole(tmp_path / "q", batches=2)
    assert (found := written(path)) is not None
    assert found.numbered
    ids = {"0": [["a", "b"], ["c"]]}
    (path / "commits" / "1").write_text("v2\n" + json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": ids}))
    for store, one in (("0/0", "a"), ("0/0/left", "b"), ("0/1", "c")):
        (path / "state" / store / "2.changelog").rename(path / "state" / store / f"2_{one}.changelog")
    assert (found := written(path)) is not None
    assert not found.numbered
    # That of another attempt does not count.
    (path / "state/0/1/2_c.changelog").rename(path / "state/0/1/2_d.changelog")
    with pytest.raises(Misconfigured, match="state/0/1 has no changelog of version 2"):
        written(path)


@pytest.fixture(scope="module")
def written_by_spark(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a query that counts, after three batches."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "in").mkdir()
    for number in range(3):
        (folder / "in" / f"{number}.txt").write_text("\n".join(str(line % 7) for line in range(100)))
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder / "in"))
    counting = lines.groupBy("value").count().writeStream.outputMode("update").format("noop")
    query = counting.option("checkpointLocation", str(folder / "q")).trigger(availableNow=True).start()
    query.awaitTermination(60)
    assert query.exception() is None
    return folder / "q"


@pytest.mark.parametrize("file", ["metadata", "offsets/2", "offsets/1", "commits/2", "changelog"])
@pytest.mark.parametrize("damage", [truncated, flipped, overwritten, cleared])
def test_damage_to_a_real_checkpoint_is_named(
    written_by_spark: Path, tmp_path: Path, file: str, damage: Damage
) -> None:
    path = tmp_path / "q"
    shutil.copytree(written_by_spark, path)
    assert written(path) is not None
    harmed = path / file if file != "changelog" else min(path.glob("state/0/*/3_*.changelog"))
    damage(harmed, random.Random(1))
    with pytest.raises(Misconfigured) as told:
        written(path)
    assert str(path) in told.value.location
    assert str(harmed.relative_to(path)) in told.value.problem
