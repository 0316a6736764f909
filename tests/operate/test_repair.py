"""What `penstock repair` finds in a state folder, with real files of each kind."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
import redis
from deltalake import write_deltalake
from tests.damaging import Damage, deleted, emptied, overwritten, truncated
from tests.servers import RedisServer
from typer.testing import CliRunner

from penstock.audit.ledger import Ledger
from penstock.channels.sqlite import SqliteChannels
from penstock.cli import app
from penstock.core.contracts import Topic
from penstock.operate.repair import ASIDE, damages
from penstock.pipeline.config import Config
from penstock.supervise.kafka import crc32c


def found(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(app, ["repair", "--folder", str(folder), "--json", *options])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config.read(tmp_path)
    config.state.mkdir()
    return config


def test_nothing_is_damaged_in_a_new_folder(tmp_path: Path, config: Config) -> None:
    assert found(tmp_path) == (0, [])


def test_a_damaged_ledger_is_kept_as_a_copy(tmp_path: Path, config: Config) -> None:
    Ledger(config.ledger).close()
    overwritten(config.ledger, random.Random(1))
    code, (one,) = found(tmp_path)
    assert (code, one["file"], one["repaired"]) == (1, str(config.ledger), None)
    code, (one,) = found(tmp_path, "--apply")
    assert code == 0
    assert one["repaired"]
    assert found(tmp_path) == (0, [])
    assert [path.name for path in config.ledger.parent.iterdir() if path.suffix == ".old-1"] == ["ledger.db.old-1"]


def test_a_damaged_spool_is_named_with_its_file(tmp_path: Path, config: Config) -> None:
    SqliteChannels(config.state / "spool").ensure([Topic("rsvps")])
    (file,) = (config.state / "spool" / "rsvps").glob("*.db")
    emptied(file, random.Random(1))
    code, (one,) = found(tmp_path)
    assert (code, one["file"]) == (1, str(file))
    assert found(tmp_path, "--apply")[0] == 0
    assert found(tmp_path) == (0, [])
    assert list((config.state / ASIDE).iterdir())


def test_a_damaged_redis_file_is_put_aside_and_redis_starts_again(config: Config) -> None:
    folder = config.state / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    with server.client() as client:
        for number in range(200):
            client.set(f"key:{number}", "x" * 100)
        client.config_set("appendfsync", "always")
        client.set("last", "x")
    server.kill()
    assert list(damages(config)) == []
    (file,) = [*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")]
    overwritten(file, random.Random(1))
    (damage,) = damages(config)
    assert damage.file.parent == file.parent
    assert damage.repair is not None
    damage.repair()
    assert list(damages(config)) == []
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 0
    server.kill()


def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path, config: Config) -> None:
    checkpoint = Path(config.checkpoints) / "by_country"
    for kind in ("offsets", "commits"):
        (checkpoint / kind).mkdir(parents=True)
        (checkpoint / kind / "0").write_text("")
    (checkpoint / "metadata").write_text('{"id": "x"}')
    code, (one,) = found(tmp_path, "--apply")
    assert (code, one["file"], one["repaired"]) == (1, str(checkpoint), None)
    assert "--new-checkpoint by_country" in one["fix"]


@pytest.mark.parametrize("damage", [truncated, overwritten, emptied, deleted])
def test_a_damaged_file_of_a_lake_is_named(tmp_path: Path, config: Config, damage: Damage) -> None:
    table = config.state / "lake" / "rsvps"
    for start in (0, 100):
        write_deltalake(table, pa.table({"n": list(range(start, start + 100))}), mode="append")
    assert found(tmp_path) == (0, [])
    file = min(table.glob("*.parquet"))
    damage(file, random.Random(1))
    code, (one,) = found(tmp_path)
    assert (code, one["file"]) == (1, str(file))


def test_a_damaged_entry_of_the_log_of_a_lake_is_named(tmp_path: Path, config: Config) -> None:
    table = config.state / "lake" / "rsvps"
    write_deltalake(table, pa.table({"n": [1]}))
    entry = table / "_delta_log" / "00000000000000000000.json"
    truncated(entry, random.Random(1))
    assert [one["file"] for one in found(tmp_path)[1]] == [str(entry)]


def segment(config: Config, partition: str, broker: int = 1, damaged: bool = True) -> Path:
    """A segment of Kafka's with three batches of one record, of which the second may be damaged."""
    data = bytearray()
    for offset in range(3):
        # From the attributes on, which the checksum covers; the last offset of the batch is its first.
        covered = bytes(6) + b"what lies in a batch, of which nothing is looked at here"
        crc = crc32c(covered)
        data += struct.pack(">qiibI", offset, len(covered) + 9, 0, 2, crc) + covered
    if damaged:
        data[len(data) // 2] ^= 1
    file = config.state / "kafka" / str(broker) / "data" / partition / f"{0:020d}.log"
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    return file


def test_a_damaged_batch_of_kafka_is_taken_out(tmp_path: Path, config: Config) -> None:
    file = segment(config, "rsvps-0")
    size = file.stat().st_size
    code, (one,) = found(tmp_path)
    assert (code, one["file"]) == (1, str(file))
    assert "1 to 1 of rsvps, partition 0" in one["problem"]
    assert found(tmp_path, "--apply")[0] == 0
    assert file.stat().st_size == size * 2 // 3
    assert [kept.stat().st_size for kept in (config.state / ASIDE).iterdir()] == [size]
    assert found(tmp_path) == (0, [])


def test_a_damaged_copy_of_several_is_fetched_again(tmp_path: Path, config: Config) -> None:
    file, other = segment(config, "rsvps-0"), segment(config, "rsvps-0", 2, damaged=False)
    assert found(tmp_path, "--apply")[0] == 0
    assert not file.parent.exists()
    assert other.exists()


def test_what_kafka_knows_of_itself_is_named_and_left_alone(tmp_path: Path, config: Config) -> None:
    file = segment(config, "__cluster_metadata-0")
    code, (one,) = found(tmp_path, "--apply")
    assert (code, one["file"], one["repaired"]) == (1, str(file), None)
