import pytest

from penstock.core.errors import Misconfigured
from penstock.pipeline.sql import line_of, tables

PLACE = "query q"


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT * FROM rsvps", ("rsvps",)),
        ("select * from rsvps where x > 1 group by 1", ("rsvps",)),
        ("SELECT * FROM a JOIN b ON a.x = b.x LEFT OUTER JOIN c USING (x)", ("a", "b", "c")),
        ("SELECT * FROM a, b AS two, c three WHERE a.x = two.x", ("a", "b", "c")),
        ("SELECT * FROM a JOIN b ON a.x = b.x, c", ("a", "b", "c")),
        ("SELECT * FROM a UNION ALL SELECT * FROM b", ("a", "b")),
        ("SELECT * FROM a JOIN a AS again ON a.x = again.y", ("a",)),
        ("SELECT * FROM (SELECT x, y FROM inner_one) q JOIN outer_one", ("inner_one", "outer_one")),
        ("SELECT * FROM (a JOIN b ON a.x = b.x)", ("a", "b")),
        ("SELECT x FROM a WHERE y IN (SELECT y, z FROM b)", ("a", "b")),
        ("SELECT * FROM `my-channel` JOIN `b`", ("my-channel", "b")),
        ("SELECT * FROM `a.dead` JOIN b.dead ON true, c", ("a.dead", "b.dead", "c")),
        ("FROM a |> JOIN b USING (x) |> AGGREGATE sum(y) AS y, max(z) AS z GROUP BY x, w", ("a", "b")),
        ("SELECT * FROM a ASOF JOIN b", ("a", "b")),
        ("SELECT /*+ BROADCAST(x) */ * FROM a JOIN b x ON a.n = x.n", ("a", "b")),
        ("SELECT /*+ MERGE(b) */ * FROM a JOIN b ON a.n = b.n", ("a", "b")),
        (
            "SELECT * FROM a WHERE EXISTS (SELECT 1 FROM b WHERE a.x = b.x) AND y > (SELECT max(y) FROM c)",
            ("a", "b", "c"),
        ),
    ],
)
def test_the_tables_are_found_wherever_they_are_named(sql: str, names: tuple[str, ...]) -> None:
    assert tables(PLACE, sql) == names


@pytest.mark.parametrize(
    "sql",
    [
        "WITH recent AS (SELECT * FROM a) SELECT * FROM recent",
        "WITH recent AS (SELECT * FROM a), few AS (SELECT * FROM recent) SELECT * FROM few, recent",
        "WITH recent (x, y) AS (SELECT * FROM a) SELECT * FROM recent",
        "WITH `recent` AS (SELECT * FROM a) SELECT * FROM Recent",
        "SELECT * FROM (WITH recent AS (SELECT * FROM a) SELECT * FROM recent)",
        "WITH a AS (SELECT * FROM a WHERE x > 1) SELECT * FROM a",
        "WITH recent AS (SELECT x FROM (SELECT * FROM a)), few (x) AS (SELECT x FROM recent) SELECT * FROM few",
        "SELECT sum(x) OVER a FROM a WINDOW a AS (PARTITION BY x)",
    ],
)
def test_what_the_text_itself_defines_is_no_channel(sql: str) -> None:
    assert tables(PLACE, sql) == ("a",)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT extract(HOUR FROM event_time), trim(BOTH 'x' FROM name), substring(name FROM 2) FROM a",
        "SELECT * FROM a WHERE x IS NOT DISTINCT FROM y",
        "SELECT 'from b', \"from c\", 'it\\'s from d' FROM a -- from e\n/* join f */",
        "SELECT t, count(1) FROM a LATERAL VIEW explode(topics) v AS t, u GROUP BY t",
        "SELECT * FROM a, LATERAL explode(topics) AS t",
        "SELECT * FROM a JOIN range(10)",
        "SELECT x, sum(y) FROM a GROUP BY x, z ORDER BY x, w",
        "SELECT `from` FROM a",
        "SELECT count(*) FROM a GROUP BY window(t, '10 seconds')",
        "SELECT window(t, '1 minute') AS window, k, seen() FROM a WHERE n > 1 GROUP BY window(t, '1 minute'), k",
        "SELECT window, count(*) FROM (SELECT window(t, '1 minute') AS window FROM a) GROUP BY window",
        "SELECT session_window(t, '5 minutes') AS w FROM a GROUP BY session_window(t, '5 minutes'), k",
        "SELECT window.start FROM a GROUP BY window",
        "SELECT * FROM a JOIN (VALUES (NULL, TRUE), (DATE '2026-01-01', x)) AS t (x, y)",
        "SELECT * FROM a |> EXTEND x + 1 AS y, z |> SELECT y, x",
        "SELECT position('x' IN name), ceil(n TO DAY) FROM a TABLESAMPLE (10 PERCENT)",
    ],
)
def test_what_is_no_table_is_not_taken_for_one(sql: str) -> None:
    assert tables(PLACE, sql) == ("a",)


@pytest.mark.parametrize("sql", ["SELECT 1", "VALUES (1)", "(SELECT 1)", "SELECT 1;", "SELECT * FROM range(3)"])
def test_a_query_may_read_nothing(sql: str) -> None:
    assert tables(PLACE, sql) == ()


@pytest.mark.parametrize("sql", ["FROM", "SELECT * FROM (", ")", "AS (", "FROM a.", "FROM .", "SELECT 'open FROM a"])
def test_a_text_that_cannot_be_parsed_is_an_error_with_its_place(sql: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        tables(PLACE, sql)
    assert raised.value.location == PLACE


def test_the_error_names_line_and_column() -> None:
    with pytest.raises(Misconfigured, match="line 2, column 8"):
        tables(PLACE, "SELECT *\nFROM a (")


@pytest.mark.parametrize(
    "sql",
    [
        "from a",
        "WITH x AS (SELECT 1 AS delete) SELECT delete FROM x",
        "FROM a SELECT update, a.insert, 'x' AS merge, (SELECT max(n) delete FROM b) AS `insert`",
        "WITH x AS (SELECT 'INSERT INTO b') SELECT * FROM x -- INSERT INTO b",
    ],
)
def test_words_of_statements_may_be_names_in_a_query(sql: str) -> None:
    tables(PLACE, sql)


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "DROP VIEW a",
        "INSERT INTO a SELECT 1",
        "SET x = 1",
        "-- SELECT\nCREATE TABLE a",
        "WITH x AS (SELECT 1) INSERT OVERWRITE DIRECTORY '/a' SELECT * FROM x",
        "WITH x AS (SELECT 1), y AS (SELECT 2) /* now */ insert into a TABLE x",
        "FROM a INSERT INTO b SELECT n INSERT INTO c SELECT n",
        "FROM a JOIN b ON a.n = b.n INSERT OVERWRITE TABLE c SELECT *",
        "WITH x AS (SELECT 1) DELETE FROM a WHERE n IN (SELECT * FROM x)",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE a",
        "WITH x AS (SELECT 1) UPDATE a SET n = 1",
        "WITH x AS (SELECT 1) MERGE INTO a USING x ON a.n = x.n WHEN MATCHED THEN DELETE",
    ],
)
def test_what_does_something_is_no_query(sql: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        tables(PLACE, sql)
    assert raised.value.problem == "its SQL is not a query"


def test_the_line_that_names_a_channel_is_found() -> None:
    sql = "-- from rsvps\nSELECT 'rsvps'\nFROM `my-channel`\nJOIN rsvps JOIN x.dead"
    assert [line_of(sql, name) for name in ("rsvps", "my-channel", "x.dead", "nothing")] == [4, 3, 4, None]
