"""Static tables: what they are read from, what does not fit, and how queries go on with new rows."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.channels.traffic import read, send

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.launch import failed, launch
from penstock.analysis.operators.statics import Table, Watch, table
from penstock.analysis.query import Mode, Query, Shape, Static
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import StreamingQuery
from penstock.audit.account import Outcome
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock, duration
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.pipeline.pipeline import Pipeline
from penstock.run.queries import Queries, Refreshing
from penstock.testing import ManualClock
from penstock.testing.frames import answer, frame, rows

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

DDL = "id BIGINT NOT NULL, name STRING, since DATE, price DECIMAL(9,2), tags ARRAY<STRING>, live BOOLEAN, share DOUBLE"
COLUMNS = ("id", "name", "since", "price", "tags", "live", "share")
CSV = f"""{",".join(COLUMNS)},unused
1,"Shoes, red",2026-01-02,1.50,"[""a"", ""b""]",true,0.25,x
2,,,,,,,
"""
FULL: dict[str, Any] = {
    "id": 1,
    "name": "Shoes, red",
    "since": date(2026, 1, 2),
    "price": Decimal("1.50"),
    "tags": ["a", "b"],
    "live": True,
    "share": 0.25,
}
EXPECTED = [tuple(FULL.values()), (2, *[None] * 6)]


def local(found: DataFrame) -> bool:
    return str(found._jdf.queryExecution().analyzed().nodeName()) == "LocalRelation"


def test_a_table_is_the_same_from_wherever_it_is_read(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufeff" + CSV, encoding="utf-8")
    lines = [{**FULL, "since": "2026-01-02", "price": 1.5}, {"id": 2, "more": "ignored"}]
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    pq.write_table(pa.Table.from_pylist([FULL, {"id": 2}]), tmp_path / "t.parquet")
    for source in ("t.csv", "t.jsonl", "t.parquet", [FULL, {"id": 2}], lambda: iter((FULL, {"id": 2}))):
        made = table(spark, Static("t", source, DDL, folder=tmp_path))
        assert rows(made.frame) == EXPECTED
        assert local(made.frame)
        assert len(made.rows) == 2
    empty = table(spark, Static("t", [], DDL))
    assert rows(empty.frame) == []
    assert empty.frame.columns == list(COLUMNS)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.csv", None, r"table t: there is no file gone.csv; put it beside the pipeline: /"),
        ("t.csv", "name\nx\n", r"t.csv:1: it has no column id; add it to the header line, which has name"),
        ("t.csv", "", "t.csv:1: it has no column id and name; .* has nothing"),
        ("t.csv", "id,name\n1,a\n\n7;b,c\n", "t.csv:4: \"id\" is '7;b', and not bigint"),
        ("t.csv", "id,name\n1_000,a\n", "t.csv:2: \"id\" is '1_000', and not bigint"),
        ("t.csv", "id,name\n1,a,b\n", "t.csv:2: it has more or fewer fields than the first line"),
        ("t.csv", "id,name\n1\n", "t.csv:2: it has more or fewer fields than the first line"),
        ("t.csv", "id,name\n,a\n", 't.csv:2: the field "id" is missing or null; its columns are id BIGINT NOT NULL'),
        ("t.csv", b"id,name\n1,\xff\n", "table t: t.csv cannot be read: .*utf-8"),
        ("t.csv", 'id,name\n1,"a\n', "table t: t.csv cannot be read: unexpected end of data"),
        ("t.jsonl", '{"id": 1}\n{"id": \n', "t.jsonl:2: it is not JSON"),
        ("t.jsonl", "[1]\n", "t.jsonl:1: it is a list; a row must be a dict"),
        ("t.jsonl", '{"id": "one"}\n', 't.jsonl:1: the field "id" is not bigint'),
        ("t.parquet", "no", "table t: t.parquet cannot be read"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(
    spark: SparkSession, tmp_path: Path, name: str, content: str | bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(Misconfigured, match=said):
        table(spark, Static("t", name, "id BIGINT NOT NULL, name STRING", folder=tmp_path))


@pytest.mark.parametrize(
    ("kind", "cell", "said"),
    [
        *(
            ("DOUBLE", cell, f"\"x\" is '{cell}', and not double")
            for cell in ("nan", "-inf", "1_0.5", "0x1", "e3", ".")
        ),
        ("DOUBLE", "1e999", '"x" holds NaN or an infinite number'),
        ("DECIMAL(9, 2)", '"1,5"', "\"x\" is '1,5', and not decimal"),
        ("ARRAY<DOUBLE>", "[NaN]", '"x" holds NaN or an infinite number'),
        ("ARRAY<DOUBLE>", "[" * 50_000, r'"x" is .*, and not array<double>'),
    ],
)
def test_what_is_no_number_is_told_with_its_place(
    spark: SparkSession, tmp_path: Path, kind: str, cell: str, said: str
) -> None:
    (tmp_path / "t.csv").write_text(f"x\n{cell}\n")
    with pytest.raises(Misconfigured, match=f"t.csv:2: {said}"):
        table(spark, Static("t", "t.csv", f"x {kind}", folder=tmp_path))


def test_numbers_are_spelled_in_many_ways(spark: SparkSession, tmp_path: Path) -> None:
    cells = [" 1", "+1.", "-.5", "1E3", "2.5e-1"]
    (tmp_path / "t.csv").write_text("\n".join(["x", *cells]))
    made = table(spark, Static("t", "t.csv", "x DOUBLE", folder=tmp_path))
    assert rows(made.frame) == [(-0.5,), (0.25,), (1.0,), (1.0,), (1000.0,)]


def test_parquet_gives_maps_and_no_wild_numbers(spark: SparkSession, tmp_path: Path) -> None:
    def wrote(ddl: str, kind: Any, value: Any) -> DataFrame:
        pq.write_table(pa.table({"x": pa.array([value], kind)}), tmp_path / "t.parquet")
        return table(spark, Static("t", "t.parquet", f"x {ddl}", folder=tmp_path)).frame

    ddl, kind = "MAP<STRING, BIGINT>", pa.map_(pa.string(), pa.int64())
    assert rows(wrote(ddl, kind, [("a", 1), ("b", None)])) == [({"a": 1, "b": None},)]
    with pytest.raises(Misconfigured, match=r"t\.parquet: a map in it has a key twice"):
        wrote(ddl, kind, [("a", 1), ("a", 2)])
    with pytest.raises(Misconfigured, match=r't\.parquet, row 1: "x" holds NaN or an infinite number'):
        wrote("DOUBLE", pa.float64(), float("nan"))


def test_a_table_changes_with_its_columns_only(spark: SparkSession) -> None:
    one, same, other = (
        Static("t", [row], "id BIGINT, name STRING")
        for row in ({"id": 1, "asked": 1}, {"id": 1, "name": None, "asked": 2}, {"id": 2, "asked": 1})
    )
    before = table(spark, one)
    assert table(spark, same) == before
    # Spark makes no frame of rows that it has.
    assert table(spark, same, before) is before
    assert table(spark, other, before) != before


def test_a_function_that_fails_is_told_with_its_line(spark: SparkSession) -> None:
    def broken() -> list[dict[str, Any]]:
        raise ValueError("the server is away")

    with pytest.raises(Misconfigured, match=r"test_statics.py:\d+, table t: ValueError: the server is away"):
        table(spark, Static("t", broken, "id BIGINT"))
    with pytest.raises(Misconfigured, match="table t, row 2: it is a tuple"):
        table(spark, Static("t", lambda: [{"id": 1}, (1,)], "id BIGINT"))  # type: ignore[list-item]
    with pytest.raises(Misconfigured, match="table t: its schema cannot be read"):
        table(spark, Static("t", [], "id BIGIN"))


def pipeline() -> Pipeline:
    app = Pipeline("ads")
    app.channel("clicks", schema="ad STRING")
    app.static("ads", [{"ad": "a", "campaign": "shoes"}], schema="ad STRING, campaign STRING")

    # The table may come first: each is given by its name.
    @app.query(key="ad")
    def clicked(ads: DataFrame, clicks: DataFrame) -> DataFrame:
        return clicks.join(ads, "ad", "left").select("ad", "campaign", "origin")

    app.sql_query("in_sql", key="ad", sql="SELECT ad, campaign, origin FROM clicks JOIN ads USING (ad)")
    return app


def test_a_query_names_a_table_like_a_channel(spark: SparkSession) -> None:
    app = pipeline()
    clicks = frame(spark, app.describe().channels["clicks"], {"ad": "a"}, {"ad": "b"})
    told = ("ad", "campaign", "origin.seq")
    assert rows(answer(app, "clicked", clicks), *told) == [("a", "shoes", 1), ("b", None, 2)]
    assert rows(answer(app, "in_sql", clicks), *told) == [("a", "shoes", 1)]
    given = [{"ad": "b", "campaign": "hats"}]
    assert rows(answer(app, "in_sql", clicks, ads=given), *told) == [("b", "hats", 2)]
    made = table(spark, Static("ads", given, "ad STRING, campaign STRING")).frame
    assert rows(answer(app, "in_sql", clicks, ads=made), *told) == [("b", "hats", 2)]
    with pytest.raises(Misconfigured, match='it names no static table "add"; those that it names: ads'):
        answer(app, "in_sql", clicks, add=given)


def test_a_description_tells_tables_from_channels() -> None:
    app = pipeline()
    told = [(query.inputs, query.statics) for query in app.describe().queries]
    assert told == [(("clicks",), ("ads",)), (("clicks",), ("ads",))]
    app.channel("ads")
    with pytest.raises(Misconfigured, match="table ads: a channel has the same name"):
        app.describe()
    alone = pipeline()
    alone.sql_query("alone", key="ad", sql="SELECT * FROM ads")
    with pytest.raises(Misconfigured, match="query alone: it reads only static tables"):
        alone.describe()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": "ads.xls"}, "table t: the format of ads.xls is not supported"),
        ({"rows": [], "refresh": "1 minute"}, "its rows are in the pipeline and cannot change"),
        ({"rows": "ads.csv", "refresh": "often"}, '"often" is not a duration'),
        ({"name": "ads", "rows": []}, "table ads: "),
    ],
)
def test_a_table_that_is_declared_wrongly_is_refused(given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        pipeline().static(**{"name": "t", "schema": "id BIGINT", **given})


def test_a_table_is_read_again_when_it_is_due_and_stays_when_it_cannot_be(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock = ManualClock()
    static = Static("ads", "ads.csv", "id BIGINT", duration("1 minute"))
    found: list[Table | Exception] = []

    def again(_: Static, before: Table) -> Table:
        if isinstance(next_one := found.pop(0), Exception):
            raise next_one
        return next_one

    one, two = (Table((text,), spark.range(1)) for text in (b"1", b"2"))
    watch = Watch([static], {"ads": one}, again, clock)
    watch.look()
    assert watch.changed() == {}

    def minute(told: Table | Exception) -> dict[str, Table]:
        clock.move(60)
        found.append(told)
        watch.look()
        assert found == []
        return watch.changed()

    broken = Misconfigured("ads.csv:3", "it is not JSON")
    assert minute(one) == {}
    assert minute(two) == {"ads": two}
    assert [minute(broken), minute(broken), minute(two)] == [{}, {}, {}]
    assert minute(one) == {"ads": one}
    assert minute(RecursionError("too deep")) == {}
    assert minute(two) == {"ads": two}
    assert caplog.messages == [
        "the table ads is not refreshed: ads.csv:3: it is not JSON",
        "the table ads is not refreshed: RecursionError: too deep",
    ]


def test_a_query_goes_on_with_new_rows_and_so_does_its_account(
    spark: SparkSession,
    kafka: Kafka,
    fresh: Fresh,
    eventually: Eventually,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clicks, into = fresh("clicks"), fresh("named")
    kafka.ensure([Topic(clicks), Topic(into)])
    file = tmp_path / "ads.csv"
    file.write_text("ad,campaign\n")
    static = Static("ads", file.name, "ad STRING, campaign STRING", duration("100 ms"), tmp_path)
    shapes = {clicks: Shape(clicks, "ad STRING")}
    settings = SparkSettings(every="100 ms")
    engine = Engine(
        spark, settings, KafkaConnector(kafka.servers), str(tmp_path), shapes, {"ads": table(spark, static)}
    )
    sql = f"SELECT ad, campaign, c.origin FROM `{clicks}` c JOIN ads USING (ad)"
    query = Query("named", (clicks,), into, ("ad",), sql, Mode.MICRO_BATCH, statics=("ads",))
    running = [launch(engine, query, 0, {})[0]]
    renewed: list[Engine] = []
    accounting = QueryAccounting(engine, query, running[0], None, kafka, SystemClock())

    class Launched:
        def running(self, _: str) -> StreamingQuery:
            return running[-1]

        def again(self, engine: Engine, query: Query) -> None:
            renewed.append(engine)
            self.finish(engine, query)

        def finish(self, engine: Engine, query: Query) -> None:
            running.append(launch(engine, query, 0, {})[0])
            accounting.follow(engine, running[-1])

    watch = Watch([static], engine.tables, partial(table, spark), SystemClock())
    refreshing = Refreshing(watch, engine, [query], cast(Queries, Launched()), SystemClock())

    def taken(count: int) -> bool:
        watch.look()
        refreshing.look()
        accounting.look()
        if error := failed(running[-1:]):
            raise error
        return accounting.account.shares[clicks].taken == count

    def click(number: int) -> None:
        send(kafka, clicks, [Record(b'{"ad": "a"}', Origin("s", 1, number, number))])

    # A table without rows: a record that finds no match is taken all the same.
    click(1)
    eventually(lambda: taken(1))
    for number, campaign in enumerate(("shoes", "hats"), start=2):
        file.write_text(f"ad,campaign\na,{campaign}\n")
        eventually(lambda number=number: taken(number - 1) and len(renewed) == number - 1)
        click(number)
        eventually(lambda number=number: taken(number))
    assert [json.loads(entry.value or b"")["campaign"] for entry in read(kafka, into, 2)] == ["shoes", "hats"]
    account = accounting.account
    assert account.generation == str(running[0].id) == str(running[-1].id)
    assert account.shares[clicks].outcomes == {**dict.fromkeys(Outcome, 0), Outcome.PASSED: 3}
    assert not account.guessed
    file.unlink()
    gone = "the table ads is not refreshed: table ads: there is no file ads.csv"
    eventually(lambda: taken(3) and any(message.startswith(gone) for message in caplog.messages))
    assert running[-1].isActive
    assert len(renewed) == 2
    running[-1].stop()


def test_tables_join_in_real_time(spark: SparkSession, tmp_path: Path) -> None:
    app = pipeline()
    description = app.describe()
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    tables = {one.name: table(spark, one) for one in description.statics}
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), shapes, tables)
    assert [engine.objection(query) for query in description.queries] == [None, None]
    assert [engine.columns(query) for query in description.queries] == [["ad", "campaign", "origin"]] * 2
    other = replace(engine, tables={"ads": table(spark, Static("ads", [], "ad STRING, campaign STRING"))})
    assert other.objection(description.queries[0]) is None
