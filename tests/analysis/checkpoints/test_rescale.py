"""State that is spread over another number of partitions: what is refused, what is undone.

On checkpoints of real queries it is done in tests/analysis/killed.
"""

import json
import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.analysis.checkpoints.rescale import recover, rescale, spread
from penstock.analysis.plans import need
from penstock.analysis.query import Query
from penstock.core.errors import Misconfigured


def checkpoint(folder: Path, batch: int = 3, partitions: int = 2) -> Path:
    """The parts of one that are looked at without Spark."""
    for kind in ("offsets", "commits"):
        (folder / kind).mkdir(parents=True)
        for number in range(batch + 1):
            conf = {"conf": {"spark.sql.shuffle.partitions": str(partitions)}}
            (folder / kind / str(number)).write_text(f"v1\n{json.dumps(conf)}\n{{}}")
    return folder


def test_what_spark_refuses_leaves_the_checkpoint_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "odd")
    before = sorted(file.relative_to(folder) for file in folder.rglob("*"))
    with pytest.raises(Misconfigured, match="query odd: it has no state"):
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
        ("odd", 0, "the number of partitions is 0; use 1 or more"),
        ("none", 4, "it has no checkpoint at .*none; set .spark. shuffle_partitions"),
        ("new", 4, "it has no committed batch"),
        ("hdfs://far/odd", 4, "its checkpoint at hdfs://far/odd is not on a local file system"),
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
