"""`penstock state get` and `scan`, of a pipeline that runs: its analysis is asked, or its page."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.channels.sqlite import SqliteChannels
from penstock.cli import app
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unavailable
from penstock.run.services import RunningPipeline
from penstock.run.state_server import serve_state
from penstock.supervise.folder import StateFolder

PIPELINE = """
from penstock import Pipeline
app = Pipeline("shop")
app.channel("sales", schema="city STRING, n BIGINT")
app.sql_query("totals", into="by_city", key="city", sql="SELECT city, sum(n) AS n, seen() FROM sales GROUP BY 1")
"""
POSITION = {"batch": 7, "at": 1_000_000, "watermark": None, "reads": {"sales": {"0": 12, "1": 9}}}
TOLD = {"query": "totals", "into": "by_city", "position": POSITION, "note": None}


class Analysis:
    """Who remembers two cities."""

    def get(self, query: str, key: str) -> dict[str, Any]:
        if key == "late":
            raise Unavailable("the state", "other questions are being answered")
        if key == "[1, 2]":
            raise Refused("the key", "the state is kept by city")
        state = {"nl": {"sum": 3}, "ñ/☃": {"sum": 4}}.get(key)
        # A page adds the row; whoever is none says nothing of it.
        return {**TOLD, "key": [key], "state": state, "row": None, "keys": [["nl"], ["ñ/☃"]]}

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]:
        entries = [
            {"key": ["nl"], "value": {"sum": 3}},
            {"key": ["nl"], "variable": "cities", "of": {"c": "\x1b[31m"}, "value": {"n": 1}},
        ]
        return {**TOLD, "entries": entries[:limit], "more": limit < 2}

    def cancel(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In which a pipeline runs without a page; its channels are files."""
    (tmp_path / "shop.py").write_text(PIPELINE)
    channels = SqliteChannels(tmp_path / "channels")
    channels.ensure([Topic("penstock.shop.status", compacted=True), Topic("by_city", compacted=True)])
    with ExitStack() as stack:
        address = stack.enter_context(serve_state(Analysis(), "127.0.0.1:0"))
        held = stack.enter_context(StateFolder(tmp_path / ".penstock").locked())
        said = {"at": time.time_ns() // 1_000, "nodes": {}, "answers": address}
        with channels.poster() as post:
            post("penstock.shop.status", b"analyse", json.dumps(said).encode())
            post("by_city", b'["nl"]', b'{"city": "nl", "n": 3}')
            post("by_city", b'["de"]', b'{"city": "de", "n": 8}')
            post("by_city", b'["nl"]', b'{"city": "nl", "n": 5}')
        running(held.path, channels, None)
        yield tmp_path


def running(state: Path, channels: SqliteChannels, page: str | None) -> None:
    where, file = channels.where, str(state.parent / "shop.py")
    RunningPipeline(os.getpid(), "shop", "penstock.shop.status", where, page, None, file, where).write(state)


def state(folder: Path, command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["state", command, *arguments, "--pipeline", str(folder / "shop.py")])


def test_a_key_is_told_with_its_newest_row_and_its_position(folder: Path) -> None:
    told = state(folder, "get", "totals", "nl", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["state"] == {"sum": 3}
    assert found["position"] == POSITION
    assert found["row"]["row"] == {"city": "nl", "n": 5}
    assert found["row"]["position"]["offset"] == 2
    lines = state(folder, "get", "totals", "nl").stdout.splitlines()
    assert lines[0] == 'totals ["nl"]'
    assert lines[1] == 'row    {"city":"nl","n":5}'
    assert lines[3] == 'state  {"sum":3}'
    assert "as of batch 7, 1970-01-01 00:00:01 UTC; sales up to 0:12, 1:9" in lines[4]


def test_the_pipeline_that_runs_in_the_folder_needs_no_name(folder: Path, tmp_path: Path) -> None:
    there = CliRunner().invoke(app, ["state", "get", "totals", "nl", "--folder", str(folder)])
    assert there.exit_code == 0, there.output
    assert there.stdout.splitlines()[1] == 'row    {"city":"nl","n":5}'
    (other := tmp_path / "other").mkdir()
    nowhere = CliRunner().invoke(app, ["state", "scan", "totals", "--folder", str(other)]).exception
    assert str(nowhere) == f"{other}: nothing runs here; name the file of the pipeline: --pipeline FILE"


def test_a_row_or_a_state_alone_is_enough(folder: Path) -> None:
    assert json.loads(state(folder, "get", "by_city", "de", "--json").stdout)["state"] is None
    assert json.loads(state(folder, "get", "totals", "ñ/☃", "--json").stdout)["row"] is None


def test_a_key_that_is_not_there_is_told_with_some_that_are(folder: Path) -> None:
    told = state(folder, "get", "totals", "fr")
    assert told.exit_code == 1
    assert '["fr"]' in told.stderr
    assert '["nl"], ["ñ/☃"]' in told.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "description"),
    [
        (("totls", "nl"), Misconfigured, 'did you mean "totals"'),
        (("totals", "[1, 2]"), Refused, "the state is kept by city"),
        (("totals", "late"), Unavailable, "other questions are being answered"),
        (("totals", "\udcff"), Refused, "it is not UTF-8"),
    ],
)
def test_what_cannot_be_asked_is_told_as_a_sentence(
    folder: Path, arguments: tuple[str, str], kind: type[PenstockError], description: str
) -> None:
    told = state(folder, "get", *arguments)
    assert isinstance(told.exception, kind)
    assert description in str(told.exception)


def test_a_scan_is_a_line_for_each_entry(folder: Path) -> None:
    told = state(folder, "scan", "totals")
    assert told.stdout == '["nl"]\t{"sum":3}\n["nl"]\tcities\t{"c":"\\u001b[31m"}\t{"n":1}\n'
    assert "2 entries; as of batch 7" in told.stderr
    assert "1 entry; there are more" in state(folder, "scan", "totals", "--limit", "1").stderr
    assert json.loads(state(folder, "scan", "totals", "--json").stdout)["more"] is False


@pytest.mark.parametrize("answer", [b"HTTP/1.0 200 OK\r\n\r\n<html>", b"SSH-2.0-OpenSSH\r\n", b""])
def test_something_else_at_the_address_is_told_as_a_sentence(folder: Path, answer: bytes) -> None:
    class Other(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(answer)

    with ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running(
            folder / ".penstock", SqliteChannels(folder / "channels"), f"http://127.0.0.1:{server.server_address[1]}"
        )
        told = state(folder, "get", "totals", "nl")
        server.shutdown()
    assert isinstance(told.exception, Unavailable)


def test_where_there_is_a_page_it_is_asked(folder: Path) -> None:
    with serve_state(Analysis(), "127.0.0.1:0") as page:
        running(folder / ".penstock", SqliteChannels(folder / "channels"), page)
        # It answers for the row as well: the channel is not read.
        assert json.loads(state(folder, "get", "totals", "nl", "--json").stdout)["row"] is None
    told = state(folder, "get", "totals", "nl")
    assert isinstance(told.exception, Unavailable)
