import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.channels.files import Files
from penstock.cli import app
from penstock.contracts import Topic
from penstock.pipeline.running import Running
from penstock.supervise.folder import StateFolder

SECRET = "redis://me:secret@far:6379/0"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In which a run stands on files, though the settings say nothing of them."""
    channels = Files(tmp_path / "channels")
    channels.ensure([Topic("status", compacted=True)])
    with channels.poster() as post:
        post("status", b"collect", json.dumps({"at": 0, "nodes": {"source:a": {"count": 7}}}).encode())
    with StateFolder(tmp_path / ".penstock").held() as held:
        where = channels.where
        Running(os.getpid(), "app", "status", where, None, SECRET, "", where).write(held.path)
        yield tmp_path


def test_the_run_is_told_without_the_passwords_of_its_addresses(folder: Path) -> None:
    told = CliRunner().invoke(app, ["status", "--json", "--folder", str(folder)])
    # Its process has been silent since 1970.
    assert told.exit_code == 1
    status = json.loads(told.stdout)
    assert status["nodes"] == {"source:a": {"count": 7}}
    assert status["run"]["redis"] == "redis://far:6379/0"
    assert "secret" not in told.output


def test_people_are_told_where_its_channels_are(folder: Path) -> None:
    told = CliRunner().invoke(app, ["status", "--folder", str(folder)], env={"COLUMNS": "300"})
    assert f"app: its channels are at {(folder / 'channels').as_uri()}\n" in told.stdout
    assert "source:a" in told.stdout
