"""Queries in files: what they declare, and what is wrong with them, by its line."""

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.analysis.query import Emit, Late, Mode
from penstock.core.errors import Misconfigured
from penstock.pipeline.description import Description
from penstock.pipeline.load import load
from penstock.pipeline.sql import is_file

PIPELINE = """
from penstock import Pipeline
app = Pipeline("meetups")
app.channel("rsvps", schema="city STRING, response STRING")
"""
SELECT = "SELECT city, count(1) AS n, seen()\nFROM rsvps GROUP BY city\n"
TAKES_ALL = 'app.sql_queries("queries")'


def described(folder: Path, calls: str, **files: str | bytes) -> Description:
    """A pipeline with these calls, and files with SQL in the folder `queries` beside it."""
    queries = folder / "queries"
    queries.mkdir(exist_ok=True)
    for name, content in files.items():
        (queries / f"{name}.sql").write_bytes(content.encode() if isinstance(content, str) else content)
    path = folder / "pipeline.py"
    path.write_text(PIPELINE + calls)
    return load(path)


def test_a_file_says_all_of_its_query(tmp_path: Path) -> None:
    top = """
-- Answers per city,
-- as they come. Note: late ones do not count.
--key: city , response
-- watermark: 30 seconds
-- into: by_city
-- where: response = 'yes' AND city != ':'
-- every: 1 minute
-- emit: final
-- late: dead letters
-- partitions: 3
-- mode: micro-batch
"""
    found = described(tmp_path, TAKES_ALL, answers=top + SELECT)
    (query,) = found.queries
    assert (query.name, query.inputs, query.into, query.key) == ("answers", ("rsvps",), "by_city", ("city", "response"))
    assert (query.watermark, query.every) == (timedelta(seconds=30), timedelta(minutes=1))
    assert (query.emit, query.late, query.mode) == (Emit.FINAL, Late.DEAD, Mode.MICRO_BATCH)
    assert query.where == "response = 'yes' AND city != ':'"
    assert query.doc == "Answers per city, as they come. Note: late ones do not count."
    assert (query.file, query.build) == ("queries/answers.sql", top + SELECT)
    assert found.channels["by_city"].partitions == 3


def test_a_folder_is_taken_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / ".c.sql").write_text("what an editor keeps")
    (tmp_path / "queries" / "notes.txt").write_text("no query")
    key = "-- key: city\n"
    found = described(tmp_path, TAKES_ALL, b=key + SELECT, a=key + SELECT.replace("\n", "\r\n"), c="﻿" + key + SELECT)
    assert [query.name for query in found.queries] == ["a", "b", "c"]


def test_the_pipeline_may_say_what_its_file_does_not(tmp_path: Path) -> None:
    call = 'app.sql_query("answers", sql="queries/by.sql", key=["city"], watermark="1 minute")'
    (query,) = described(tmp_path, call, by="-- mode: real-time\n" + SELECT).queries
    assert (query.name, query.key, query.mode, query.watermark) == (
        "answers", ("city",), Mode.REAL_TIME, timedelta(minutes=1),
    )  # fmt: skip


@pytest.mark.parametrize(
    "above", ["/* Ours */\n", "/* Ours,\n   -- key: nobody's\n\n for ever */ ", "/**/ /*/ a */\n", "/* a\n * b\n */\n"]
)
def test_what_stands_behind_a_block_comment_is_declared_all_the_same(tmp_path: Path, above: str) -> None:
    (query,) = described(tmp_path, TAKES_ALL, answers=above + "-- key: city\n" + SELECT).queries
    assert query.key == ("city",)


def test_a_file_that_was_edited_is_read_again(tmp_path: Path) -> None:
    described(tmp_path, TAKES_ALL, answers="-- key: city\n" + SELECT)
    (query,) = described(tmp_path, TAKES_ALL, answers="-- key: town\nSELECT city AS town, origin FROM rsvps").queries
    assert query.key == ("town",)
    assert "town" in str(query.build)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("-- key: city\n-- watermrk: 1 s\n", r'answers.sql:2: .* "watermrk:"; did you mean "watermark:"\?'),
        ("-- key: city\n\n-- note: 1 s\n", r'answers.sql:3: .* "note:"; .*begin with a capital letter'),
        ("-- key: city\n-- key: city\n", 'answers.sql:2: "key:" is there already, on line 1'),
        ("-- key:\n", 'answers.sql:1: "key:" has no value'),
        ("-- Of cities.\n", 'answers.sql: it has no key; .*"-- key: …"'),
        ("-- key: ,\n", "answers.sql: it has no key"),
        ("-- key: city\n-- watermark: 1 fortnight\n", 'answers.sql:2: "1 fortnight" is not a duration'),
        ("-- key: city\n-- mode: quick\n", 'answers.sql:2: mode is "quick"; the choices are auto, real-time'),
        ("-- key: city\n-- partitions: few\n", 'answers.sql:2: "few" is not an integer'),
        ("-- key: city\n-- partitions: 0\n", "answers.sql: partitions= is 0"),
        ("-- key: city\n-- emit: final\n", r"answers.sql: emit= needs watermark="),
        ("-- key: city\n-- into: rsvps\n", "answers.sql: it writes into rsvps"),
    ],
)
def test_what_is_declared_wrongly_is_told_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=f"pipeline.py:5: queries/{said}"):
        described(tmp_path, TAKES_ALL, answers=content + SELECT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "its SQL is not a query"),
        ("DROP VIEW rsvps", "its SQL is not a query; begin with SELECT, WITH or FROM"),
        ("SELECT 1", "it reads no channel"),
        (b"SELECT '\xff'", "it is not UTF-8: invalid start byte at byte 8"),
        ("SELECT 1 FROM rsvps\0", "it contains a NUL"),
    ],
)
def test_what_is_no_query_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(Misconfigured, match=f"queries/answers.sql: {said}"):
        described(tmp_path, 'app.sql_query("answers", sql="queries/answers.sql", key="city")', answers=content)


def test_an_unknown_channel_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"answers.sql:3, query answers: .*\"rsvp\"; did you mean \"rsvps\"\?"):
        described(tmp_path, TAKES_ALL, answers="-- key: city\nSELECT city, origin -- of rsvp\nFROM rsvp")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('app.sql_queries("nowhere")', "nowhere: there is no such folder"),
        (TAKES_ALL, "queries: no file in it ends in .sql"),
        ('app.sql_query("a", sql="a.sql", key="city")', "a.sql: there is no such file"),
        ('app.sql_query("a", sql="queries.sql/a.sql", key="city")', "queries.sql/a.sql: there is no such file"),
    ],
)
def test_what_is_not_there_is_told(tmp_path: Path, call: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=f"pipeline.py:5: {said}"):
        described(tmp_path, call)


def test_what_is_said_twice_is_refused(tmp_path: Path) -> None:
    call = 'app.sql_query("a", sql="queries/a.sql", key="city")'
    with pytest.raises(Misconfigured, match=r"queries/a.sql:1: the pipeline sets key=, too; set it once"):
        described(tmp_path, call, a="-- key: town\n" + SELECT)


@pytest.mark.parametrize(
    ("said", "word"),
    [('emit="change"', "emit: final"), ('mode="auto"', "mode: real-time"), ('late="drop"', "late: dead letters")],
)
def test_what_is_usual_is_said_as_well_when_it_is_said(tmp_path: Path, said: str, word: str) -> None:
    call = f'app.sql_query("a", sql="queries/a.sql", key="city", watermark="1 minute", {said})'
    with pytest.raises(Misconfigured, match=rf"queries/a.sql:1: the pipeline sets {said.partition('=')[0]}=, too"):
        described(tmp_path, call, a=f"-- {word}\n" + SELECT)


def test_a_name_of_a_file_that_is_no_name_of_a_query_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"queries/2 many.sql: this is not a name"):
        described(tmp_path, TAKES_ALL, **{"2 many": "-- key: city\n" + SELECT})


def test_a_text_is_no_file() -> None:
    assert is_file("answers.sql")
    assert is_file("queries/answers.sql")
    assert not is_file("SELECT * FROM answers.sql")
