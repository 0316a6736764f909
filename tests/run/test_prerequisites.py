"""What a run needs of this machine is checked before anything is fetched."""

import socket
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured, SeveralMisconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline
from penstock.run import services
from penstock.run.services import Needs, require
from penstock.supervise.folder import StateFolder

ALL = Needs(kafka=True, redis=True)


def described(port: int = 1) -> Description:
    app = Pipeline("app")
    app.source(f"listen+http://127.0.0.1:{port}/in", into="rsvps")
    app.store("rsvps", "redis://")
    return app.describe()


def test_all_that_is_missing_is_told_at_once_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        port, redis = taken.getsockname()[1], other.getsockname()[1]
        config = Config.read(tmp_path, environ={"PENSTOCK_LOCAL_REDIS_PORT": str(redis)})
        with pytest.raises(SeveralMisconfigured) as error:
            require(config, ALL, described(port))
    locations = [one.location for one in error.value.errors]
    assert locations == ["Java", "Redis", f"source rsvps, address 127.0.0.1:{port}", "[local] redis_port"]
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STATE", 1 << 60)
    with pytest.raises(Misconfigured) as error:
        require(Config.read(tmp_path, environ={}), Needs(kafka=False, redis=False))
    assert error.value.location == str(tmp_path / ".penstock")


def test_where_a_pipeline_runs_already_nothing_else_is_looked_at(tmp_path: Path) -> None:
    config = Config.read(tmp_path, environ={})
    with StateFolder(config.state).locked(), pytest.raises(Misconfigured) as error:
        require(config, ALL)
    assert not isinstance(error.value, SeveralMisconfigured)
    assert error.value.location == str(tmp_path / ".penstock")
