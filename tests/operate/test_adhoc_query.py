"""What can be asked of channels without declaring it; the rest is in tests/cli/test_query.py."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.channels.memory import MemoryChannels
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.operate.adhoc_query import AdhocQuery, newest
from penstock.pipeline.config import Config
from penstock.pipeline.pipeline import Pipeline


def asked(sql: str, folder: Path, **more: object) -> AdhocQuery:
    return AdhocQuery(sql, MemoryChannels(1), Config.read(folder, environ={}), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DROP VIEW a", "its SQL is not a query; begin with SELECT, WITH or FROM"),
        ("", "its SQL is not a query"),
        ("SELECT 1", "it reads no channel"),
        ("SELECT * FROM a.dead", "to Spark, a.dead is a table in a database; write `a.dead`"),
    ],
)
def test_what_cannot_work_is_known_before_spark_starts(sql: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=f"query SQL: {said}"):
        asked(sql, tmp_path).checked()


def test_a_schema_is_for_a_channel_that_is_read(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="--schema: b is not read; it reads a"):
        asked("SELECT * FROM a", tmp_path, schemas={"b": "x INT"}).checked()


def test_a_static_table_of_the_pipeline_is_no_channel(tmp_path: Path) -> None:
    app = Pipeline("p")
    app.channel("clicks", schema="ad INT")
    app.static("ads", [{"ad": 1}], schema="ad INT")
    sql = "SELECT * FROM clicks JOIN ads USING (ad)"
    found = asked(sql, tmp_path, description=app.describe()).checked()
    assert (found.query.inputs, found.query.statics) == (("clicks",), ("ads",))
    assert replace(found, description=None).names == ("clicks", "ads")


@pytest.mark.parametrize(("sizes", "expected"), [([], []), ([1] * 3, [0, 1, 2]), ([1] * 600, list(range(100, 600)))])
def test_the_newest_records_are_looked_at(sizes: Sequence[int], expected: Sequence[int]) -> None:
    channels = MemoryChannels(1)
    channels.ensure([Topic("a", 1)])
    for number, _ in enumerate(sizes):
        channels.append("a", b"%d" % number, None)
    assert newest(channels, "a") == [b"%d" % number for number in expected]


def test_of_huge_records_a_few_are_enough() -> None:
    channels = MemoryChannels(1)
    channels.ensure([Topic("a", 1)])
    for _ in range(5):
        channels.append("a", bytes(700_000), None)
    assert len(newest(channels, "a")) == 1
