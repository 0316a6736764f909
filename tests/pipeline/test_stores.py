"""The stores that a description asks for."""

from datetime import timedelta
from pathlib import Path

from penstock.pipeline.config import Config
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stores import make_store
from penstock.stores.lake import LakeStore
from penstock.stores.redis import RedisStore


def stores(folder: Path, url: str, ttl: str | None = None) -> list[RedisStore | LakeStore]:
    app = Pipeline("p")
    app.channel("things", schema="name STRING")
    app.store("things", url, ttl=ttl)
    (folder / "penstock.toml").write_text('[redis]\nurl = "redis://here:1/0"\n')
    description = app.describe()
    config = Config.read(folder, environ={})
    return [make_store(spec, description, config, "id") for spec in description.stores]


def test_a_lake_lies_beside_the_pipeline(tmp_path: Path) -> None:
    assert stores(tmp_path, "delta://lake") == [LakeStore(str(tmp_path / "lake"), "things", "id")]


def test_a_live_table_is_in_the_redis_of_the_wiring_or_in_that_of_its_address(tmp_path: Path) -> None:
    assert stores(tmp_path, "redis://", "1 day") == [
        RedisStore("redis://here:1/0", "things", timedelta(days=1), "id"),
    ]
    assert stores(tmp_path, "redis://there:2/0") == [RedisStore("redis://there:2/0", "things", None, "id")]
