import json
import os
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.run.run_file import Running
from penstock.supervise.folder import StateFolder

SECRET = "redis://me:secret@far:6379/0"


def running(pid: int) -> Running:
    return Running(pid, "app", "penstock.app.status", "redis://far:6379/0", None, SECRET, "/app.py", SECRET)


def test_a_run_is_found_while_it_holds_its_folder(tmp_path: Path) -> None:
    config = Config.read(tmp_path, environ={})
    with StateFolder(config.state).locked() as folder:
        running(os.getpid()).write(folder.path)
        assert Running.find(config) == running(os.getpid())
    with pytest.raises(Misconfigured, match="nothing runs here; start it: penstock run FILE"):
        Running.find(config)


def test_the_note_of_a_run_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked() as folder:
        running(999_999).write(folder.path)
        assert Running.at(tmp_path) is None


def test_a_note_of_a_later_version_is_understood(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked() as folder:
        running(os.getpid()).write(folder.path)
        note = json.loads((folder.path / Running.FILE).read_text())
        (folder.path / Running.FILE).write_text(json.dumps({**note, "unheard": "of"}))
        assert Running.at(tmp_path) == running(os.getpid())


def test_passwords_are_kept_for_its_owner_and_not_told(tmp_path: Path) -> None:
    running(1).write(tmp_path)
    file = tmp_path / Running.FILE
    assert "secret" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    told = running(1).to_json()
    assert "secret" not in json.dumps(told)
    assert told["redis"] == told["channels"] == "redis://far:6379/0"
