import pytest

from penstock.pipeline.sql import tables


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
    ],
)
def test_the_tables_are_found_wherever_they_are_named(sql: str, names: tuple[str, ...]) -> None:
    assert tables(sql) == names


@pytest.mark.parametrize(
    "sql",
    [
        "WITH recent AS (SELECT * FROM a) SELECT * FROM recent",
        "WITH recent AS (SELECT * FROM a), few AS (SELECT * FROM recent) SELECT * FROM few, recent",
        "WITH recent (x, y) AS (SELECT * FROM a) SELECT * FROM recent",
        "WITH `recent` AS (SELECT * FROM a) SELECT * FROM Recent",
        "SELECT * FROM (WITH recent AS (SELECT * FROM a) SELECT * FROM recent)",
    ],
)
def test_what_the_text_itself_defines_is_no_channel(sql: str) -> None:
    assert tables(sql) == ("a",)


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
    ],
)
def test_what_is_no_table_is_not_taken_for_one(sql: str) -> None:
    assert tables(sql) == ("a",)


@pytest.mark.parametrize("sql", ["", "SELECT 1", "FROM", "SELECT * FROM (", ")", "AS (", "SELECT 'open FROM a"])
def test_a_text_without_tables_or_sense_has_none(sql: str) -> None:
    assert tables(sql) in ((), ("a",))
