"""Which files of a checkpoint have to be there."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.analysis.checkpoints.folders import checkpoint
from tests.damaging import Damage, flipped, overwritten, truncated
from tests.damaging import emptied as cleared

from penstock.analysis.checkpoints.integrity import written
from penstock.core.errors import Misconfigured

Harm = Callable[[Path], object]


def test_a_whole_checkpoint_tells_who_it_is_and_how_far_it_came(tmp_path: Path) -> None:
    found = written(checkpoint(tmp_path / "q", batches=4, begun=1, sources=["things", "others"]))
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
    path = checkpoint(tmp_path / "q", batches=4)
    harm(path)
    with pytest.raises(Misconfigured) as refused:
        written(path)
    assert f"checkpoint {path}: it is damaged: {description}" in str(refused.value)


def test_steps_before_a_snapshot_are_not_needed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "q", batches=4)
    (path / "state/0/0/2.zip").write_text("all")
    for name in ("1.changelog", "2.changelog"):
        (path / "state/0/0" / name).unlink()
    assert written(path) is not None
    (path / "state/0/0/2.zip").write_text("")
    with pytest.raises(Misconfigured, match=r"state/0/0/2\.zip is empty"):
        written(path)


def test_a_step_of_a_batch_that_was_not_committed_does_no_harm(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "q", batches=4, begun=1)
    (path / "state/0/0/5.changelog").write_text("")
    assert written(path) is not None


def test_files_of_the_second_format_are_known_by_the_ids_of_their_commit(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "q", batches=2)
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
