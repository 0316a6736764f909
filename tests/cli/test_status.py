import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.channels.sqlite import SqliteChannels
from penstock.cli import app
from penstock.core.contracts import Topic
from penstock.run.services import RunningPipeline
from penstock.supervise.folder import StateFolder

SECRET = "redis://me:secret@far:6379/0"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In which a run stands on files, though the settings say nothing of them."""
    channels = SqliteChannels(tmp_path / "channels")
    channels.ensure([Topic("status", compacted=True)])
    with channels.poster() as post:
        post("status", b"collect", json.dumps({"at": 0, "nodes": {"source:a": {"count": 7}}}).encode())
    with StateFolder(tmp_path / ".penstock").locked() as held:
        where = channels.where
        RunningPipeline(os.getpid(), "app", "status", where, None, SECRET, "", where).write(held.path)
        yield tmp_path


def test_the_run_is_told_without_the_passwords_of_its_addresses(folder: Path) -> None:
    told = CliRunner().invoke(app, ["status", "--json", "--folder", str(folder)])
    # Its process has been silent since 1970.
    assert told.exit_code == 3
    status = json.loads(told.stdout)
    assert status["verdict"] == "not known"
    assert status["nodes"] == {"source:a": {"count": 7}}
    assert status["run"]["redis"] == "redis://far:6379/0"
    assert "secret" not in told.output


def test_people_are_told_of_the_last_batch_of_each_query_and_how_old_it_is(folder: Path) -> None:
    store = {"rows": None, "memory": 2**20, "disk": 2**20, "restored": 212, "hits": 9, "misses": 1}
    times = {"all": 60_000, "planning": 90, "work": 59_800, "commit": 55}
    figures = {
        "mode": "real-time",
        "at": time.time_ns() // 1_000,
        "rate_in": 198.6,
        "times": times,
        "store": store,
        "behind": 30_000,
    }
    with SqliteChannels(folder / "channels").poster() as post:
        post("status", b"analyse", json.dumps({"at": 0, "nodes": {"query:totals": figures}}).encode())
    told = CliRunner().invoke(app, ["status", "--folder", str(folder)]).stdout
    (line,) = [line for line in told.splitlines() if "real-time" in line]
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    *cells, age = cells
    expected = ["totals", "real-time", "198.6", "60,000", "90 · 59,800 · 55", "", "2.0", "90%", "212", "30.0", "", ""]
    assert cells == expected
    assert age.endswith(" s ago")


def test_people_are_told_where_its_channels_are(folder: Path) -> None:
    told = CliRunner().invoke(app, ["status", "--folder", str(folder)], env={"COLUMNS": "300"})
    assert f"app: its channels are at {(folder / 'channels').as_uri()}\n" in told.stdout
    assert "source:a" in told.stdout
