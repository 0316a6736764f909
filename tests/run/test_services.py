"""What is found in a folder, and who is believed."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.run.services import ROLE, Needs, RunningPipeline, Services, with_running_services
from penstock.supervise.folder import StateFolder

KAFKA, REDIS = "127.0.0.1:9092", "redis://127.0.0.1:6379/0"
FAR = """
[profiles.prod.channels]
address = "redis://me:secret@far:6379/1"
[profiles.prod.redis]
url = "redis://me:secret@far:6379/2"
"""


class Workplace:
    """A folder in which this process stands for a run, or for `penstock up`."""

    def __init__(self, folder: Path, holding: ExitStack) -> None:
        self.folder, self.state, self._holding = folder, folder / ".penstock", holding

    def config(self, profile: str | None = None, **environ: str) -> Config:
        return Config.read(self.folder, profile, environ)

    def services(self, pid: int | None = None, kafka: str | None = KAFKA, up: bool = True) -> Services:
        folder = self._holding.enter_context(StateFolder(self.state, ROLE).locked())
        found = Services(pid or os.getpid(), kafka, REDIS, up)
        found.write(folder)
        return found

    def run(self, config: Config) -> None:
        folder = self._holding.enter_context(StateFolder(self.state).locked())
        address, redis = config.channels.address, config.redis.url
        RunningPipeline(os.getpid(), "app", "status", config.bind().where, None, redis, "", address).write(folder.path)


@pytest.fixture
def location(tmp_path: Path) -> Iterator[Workplace]:
    with ExitStack() as holding:
        yield Workplace(tmp_path, holding)


# --- whom to believe --------------------------------------------------------------------------------------------------


def test_services_are_found_while_somebody_holds_them(location: Workplace) -> None:
    assert Services.at(location.state) is None
    held = location.services()
    assert Services.at(location.state) == held
    assert held.where == f"Kafka at {KAFKA}, Redis at {REDIS}"


def test_a_note_that_somebody_else_has_left_is_not_believed(location: Workplace) -> None:
    location.services(pid=999_999)
    assert Services.at(location.state) is None


def test_a_note_of_a_later_version_is_understood(location: Workplace) -> None:
    held = location.services()
    note = json.loads((location.state / Services.FILE).read_text())
    (location.state / Services.FILE).write_text(json.dumps({**note, "postgres": "x"}))
    assert Services.at(location.state) == held


# --- what is needed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "url", "needs"),
    [
        ("kafka://", "local", Needs(kafka=True, redis=True)),
        ("kafka://broker:9092", "local", Needs(kafka=False, redis=True)),
        ("file://", "redis://far", Needs(kafka=False, redis=False)),
    ],
)
def test_what_the_settings_place_elsewhere_is_not_needed(
    location: Workplace, address: str, url: str, needs: Needs
) -> None:
    assert Needs.all(location.config(PENSTOCK_CHANNELS_ADDRESS=address, PENSTOCK_REDIS_URL=url)) == needs


# --- here -------------------------------------------------------------------------------------------------------------


def test_where_nothing_runs_that_is_said(location: Workplace) -> None:
    with pytest.raises(Misconfigured, match=r"nothing runs here; start a pipeline .*: penstock up"):
        with_running_services(location.config())
    elsewhere = location.config(PENSTOCK_CHANNELS_ADDRESS="kafka://broker:9092")
    assert with_running_services(elsewhere) == elsewhere


def test_the_services_of_the_folder_are_found(location: Workplace) -> None:
    location.services()
    assert with_running_services(location.config()).channels.address == f"kafka://{KAFKA}"
    assert with_running_services(location.config(PENSTOCK_CHANNELS_ADDRESS="redis://")).channels.address == REDIS
    assert (
        with_running_services(location.config(PENSTOCK_CHANNELS_ADDRESS="kafka://far:1")).channels.address
        == "kafka://far:1"
    )


def test_services_that_are_just_being_started_are_not_waited_for(location: Workplace) -> None:
    location.services(up=False)
    for address in ("kafka://", "redis://"):
        with pytest.raises(Misconfigured, match=rf"process {os.getpid()} is still starting the services; try again"):
            with_running_services(location.config(PENSTOCK_CHANNELS_ADDRESS=address))
    elsewhere = with_running_services(location.config(PENSTOCK_CHANNELS_ADDRESS="kafka://far:1"))
    assert elsewhere.channels.address == "kafka://far:1"


def test_a_run_is_found_without_the_profile_that_it_was_started_with(location: Workplace) -> None:
    (location.folder / "penstock.toml").write_text(FAR)
    far = location.config("prod")
    location.run(far)
    assert with_running_services(location.config()) == with_running_services(far) == far


def test_a_run_is_found_without_the_environment_that_it_was_started_with(location: Workplace) -> None:
    location.services(kafka=None)
    location.run(location.config(PENSTOCK_CHANNELS_ADDRESS="file://sub?sync=no"))
    assert with_running_services(location.config()).bind().where == f"{(location.folder / 'sub').as_uri()}?sync=no"


SECRET = "redis://me:secret@far:6379/0"


def running(pid: int) -> RunningPipeline:
    return RunningPipeline(pid, "app", "penstock.app.status", "redis://far:6379/0", None, SECRET, "/app.py", SECRET)


def test_a_run_is_found_while_it_holds_its_folder(tmp_path: Path) -> None:
    config = Config.read(tmp_path, environ={})
    with StateFolder(config.state).locked() as folder:
        running(os.getpid()).write(folder.path)
        assert RunningPipeline.find(config) == running(os.getpid())
    with pytest.raises(Misconfigured, match="nothing runs here; start it: penstock run FILE"):
        RunningPipeline.find(config)


def test_the_note_of_a_run_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked() as folder:
        running(999_999).write(folder.path)
        assert RunningPipeline.at(tmp_path) is None


def test_a_run_file_of_a_later_version_is_understood(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked() as folder:
        running(os.getpid()).write(folder.path)
        note = json.loads((folder.path / RunningPipeline.FILE).read_text())
        (folder.path / RunningPipeline.FILE).write_text(json.dumps({**note, "unheard": "of"}))
        assert RunningPipeline.at(tmp_path) == running(os.getpid())


def test_passwords_are_kept_for_its_owner_and_not_told(tmp_path: Path) -> None:
    running(1).write(tmp_path)
    file = tmp_path / RunningPipeline.FILE
    assert "secret" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    told = running(1).to_json()
    assert "secret" not in json.dumps(told)
    assert told["redis"] == told["channels"] == "redis://far:6379/0"
