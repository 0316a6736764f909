"""SQL over channels by hand: what is refused at once, and one query as a process of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import psutil
import pytest
from typer.testing import CliRunner

from penstock.analysis.interactive import Result
from penstock.channels.kafka import Kafka
from penstock.cli import app
from penstock.cli.query import RowPrinter, row_line
from penstock.cli.standard import Output
from penstock.core.contracts import Topic
from penstock.core.record import Record

Fresh = Callable[[str], str]


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["query", *arguments])
    assert result.exit_code == 1
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "b", "c"], '3 arguments given; write [FILE.py] "SELECT …"'),
        (["SELECT 1", "SELECT 2"], "2 arguments given"),
        (["SELECT * FROM a", "--from", "noon"], '--from: "noon" is not a valid time'),
        (["SELECT * FROM a", "--for", "ever"], '--for: "ever" is not a duration'),
        (["SELECT * FROM a", "--watermark", "x"], '--watermark: "x" is not a duration'),
        (["DROP VIEW a"], "query SQL: its SQL is not a query"),
        (["nowhere.sql"], "nowhere.sql: there is no such file"),
        (["nowhere.py", "SELECT * FROM a"], "there is no such file"),
        (["SELECT * FROM a"], "channel a: not found"),
        (
            ["SELECT * FROM a, b", "--schema", "x INT"],
            "--schema: the query reads a and b; name one: --schema CHANNEL=…",
        ),
        (["SELECT * FROM a", "--servers", "tcp://127.0.0.1:1"], "removes records"),
    ],
)
def test_what_cannot_work_is_refused_before_spark_starts(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = [] if "--servers" in arguments else ["--servers", "file://" + str(tmp_path / "channels")]
    assert said in refused(*arguments, *address)


def test_the_folder_counts_also_beside_a_file(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "penstock.toml").write_text("[spark]\nmemory = 7\n")
    (tmp_path / "app.py").write_text("from penstock import Pipeline\napp = Pipeline('shop')\n")
    said = refused(str(tmp_path / "app.py"), "SELECT * FROM a", "--folder", str(tmp_path / "away"))
    assert "memory" in said


def printed(rows: list[str], result: Result, most: int | None, capsysbinary: pytest.CaptureFixture[bytes]) -> list[str]:
    stop = Event()
    one = RowPrinter(Output(), False, most, stop)
    for row in rows:
        one.take(result, iter([row]))
    assert stop.is_set() is (one.count == most)
    return capsysbinary.readouterr().out.decode().splitlines()


def test_rows_are_printed_up_to_a_limit(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    changing = Result(None, ("a", "n"), ("a",), "update")  # type: ignore[arg-type]
    rows = [json.dumps({"a": "x", "n": n}) for n in range(3)]
    assert printed(rows, changing, None, capsysbinary) == ["x → n=0", "x → n=1", "x → n=2"]
    assert printed(rows, changing, 2, capsysbinary) == ["x → n=0", "x → n=1"]


def test_between_two_whole_results_there_is_a_line(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    whole = Result(None, ("n",), (), "complete")  # type: ignore[arg-type]
    assert printed(['{"n":1}', '{"n":2}'], whole, None, capsysbinary) == ["n=1", "", "n=2"]


def send(kafka: Kafka, channel: str, *values: bytes) -> None:
    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, [Record(value) for value in values])

    asyncio.run(go())


@pytest.fixture
def folder(tmp_path: Path, kafka: Kafka) -> Path:
    (tmp_path / "penstock.toml").write_text(f'[channels]\naddress = "kafka://{kafka.servers}"\n')
    return tmp_path


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


def test_a_query_is_followed_until_ctrl_c_and_leaves_nothing(
    folder: Path, kafka: Kafka, fresh: Fresh, tmp_path: Path
) -> None:
    """Over the result of a query of the pipeline, and a channel that nobody declared."""
    rsvps, by_city, cities = fresh("rsvps"), fresh("by_city"), fresh("cities")
    kafka.ensure([Topic(rsvps), Topic(by_city), Topic(cities)])
    send(kafka, cities, b'{"city": "Oslo", "land": "no"}', b'{"city": "Wien", "land": "at"}', b"no JSON")
    send(kafka, by_city, b'{"city": "Wien", "n": 1}', b'{"city": "Oslo", "n": 7}', b'{"n": "x"}')
    (folder / "pipeline.py").write_text(
        "from penstock import Pipeline\n"
        "app = Pipeline('p')\n"
        f"app.channel('{rsvps}', schema='city STRING')\n"
        f"app.sql_query('q', 'SELECT city, count(1) AS n FROM `{rsvps}` GROUP BY city', into='{by_city}', key='city')\n"
    )
    sql = f"SELECT c.city, c.land, r.n FROM `{by_city}` r JOIN `{cities}` c ON c.city = r.city"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    groups = kafka.groups()
    command = [sys.executable, "-m", "penstock", "query", "pipeline.py", sql, "--from", "beginning", "--json"]
    env = {**os.environ, "TMPDIR": str(temporary)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            found = lines(process)
            assert {json.loads(next(found))["city"] for _ in range(2)} == {"Oslo", "Wien"}
            send(kafka, by_city, b'{"city": "Oslo", "n": 8}')
            assert json.loads(next(found)) == {"city": "Oslo", "land": "no", "n": 8}
            below = psutil.Process(process.pid).children(recursive=True)
            assert list(temporary.glob("penstock-query-*/checkpoint/offsets"))
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "")
    assert said.splitlines() == [
        "starting Spark …",
        f"{cities}: city STRING,land STRING; inferred from 3 records, --schema overrides it",
        f"reading {by_city}, {cities} from the beginning; Ctrl-C stops",
        "3 rows; dropped: 2 records that did not fit the schema",
    ]
    assert not [one for one in below if one.is_running()]
    assert list(temporary.iterdir()) == []
    assert kafka.groups() == groups


# --- rows as text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        ({"city": "Oslo", "n": 3}, (), "city=Oslo, n=3"),
        ({"city": "Oslo", "n": 3, "x": None}, ("city",), "Oslo → n=3, x=null"),
        ({"n": 3, "city": "Oslo", "ok": True}, ("city", "ok"), "Oslo, true → n=3"),
        ({"city": "Oslo"}, ("city",), "Oslo → "),
        (
            {"window": {"start": "2026-11-15T10:00:00.000Z", "end": "2026-11-15T10:00:10.500Z"}, "n": 1},
            ("window",),
            "2026-11-15T10:00:00Z – 2026-11-15T10:00:10.500Z → n=1",
        ),
        ({"a": {"b": [1, "x"]}, "f": 1.5}, (), 'a={"b":[1,"x"]}, f=1.5'),
        ({"n": 10**30, "a": [10**30]}, (), f'n={10**30}, a=["{10**30}"]'),
        ({"a\n": "red \x1b[31m\nand\u202e"}, (), "a\\n=red \\x1b[31m\\nand\\u202e"),
    ],
)
def test_a_row_is_a_line(row: dict[str, object], keys: tuple[str, ...], text: str) -> None:
    assert row_line(json.dumps(row), keys).decode() == text + "\n"


def test_json_stays_as_it_is() -> None:
    assert row_line('{"a":1}', ("a",), as_json=True, terminal=True) == b'{"a":1}\n'


def test_a_wide_row_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    row = json.dumps({"x": "寿司寿司寿司"})
    assert row_line(row, terminal=True).decode() == "x=寿司寿 …\n"
    assert row_line('{"x": "12345678"}', terminal=True).decode() == "x=12345678\n"
    assert row_line(row).decode() == "x=寿司寿司寿司\n"
