"""`penstock replay`, on files: no server is needed."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.channels.traffic import send
from typer.testing import CliRunner, Result

from penstock import Origin, Record, Topic, bind
from penstock.channels.kafka import Kafka
from penstock.cli import app
from penstock.core.errors import Misconfigured
from penstock.core.scan import scan


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Channels with a hundred numbered records in `cars`."""
    address = f"file://{tmp_path / 'channels'}"
    channels = bind(address)
    channels.ensure([Topic("cars", partitions=3)])
    fill(address, "cars", 100)
    return address


def fill(address: str, channel: str, count: int) -> None:
    async def go() -> None:
        async with bind(address).sender() as sender:
            numbered = [Record(b"%d" % n, Origin("gps", 1, n, n), b"%d" % n) for n in range(1, count + 1)]
            await sender.send(channel, numbered)

    asyncio.run(go())


def penstock(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def test_a_channel_is_replayed_into_one_that_is_made_like_it(address: str) -> None:
    result = penstock("replay", "cars", "--into", "again", "--servers", address)
    assert (result.exit_code, result.stdout) == (0, "cars: 100 records copied to again\n")
    assert bind(address).topic("again").partitions == 3
    assert penstock("verify", "again", "--servers", address).exit_code == 0


def test_it_can_go_to_other_channels(address: str, tmp_path: Path) -> None:
    other = f"file://{tmp_path / 'other'}"
    result = penstock("replay", "cars", "--into", "cars", "--servers", address, "--to", other, "--json")
    told = json.loads(result.stdout)
    assert (told["sent"], told["complete"]) == (100, True)
    assert sum(end for _, end in bind(other).bounds("cars").values()) == 100


def test_what_came_before_is_left_out(address: str) -> None:
    result = penstock("replay", "cars", "--into", "again", "--servers", address, "--until", "1h")
    assert result.stdout == "cars: 0 records copied to again\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--into", "cars"), "--into: "),
        (("--into", "x", "--speed", "fast"), '--speed: "fast"'),
        (("--into", "x", "--speed", "0x"), '--speed: "0x"'),
        (("--into", "x", "--since", "soon"), '--since: "soon" is not a valid time'),
        (("--into", "x", "--to", "ftp://x"), "no binder knows this address"),
        (("--into", "x", "--since", "1h", "--until", "2h"), "--until: "),
    ],
)
def test_wrong_input_is_told(address: str, arguments: tuple[str, ...], said: str) -> None:
    result = penstock("replay", "cars", "--servers", address, *arguments)
    assert said in str(result.exception)


def test_the_same_channel_is_known_by_another_address(address: str) -> None:
    for same in (address, f"{address}?sync=no"):
        result = penstock("replay", "cars", "--into", "cars", "--servers", address, "--to", same)
        assert "--into: it is the same channel" in str(result.exception)


def test_other_channels_are_reached_with_the_settings_of_the_folder(address: str, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[kafka]\nconf = {"security.protocol" = "nonsense"}\n')
    options = ("--servers", address, "--to", "127.0.0.1:1", "--folder", str(tmp_path))
    result = penstock("replay", "cars", "--into", "x", *options)
    assert "security.protocol" in str(result.exception)


def test_what_keeps_nothing_has_no_history() -> None:
    result = penstock("replay", "cars", "--into", "x", "--servers", "tcp://127.0.0.1:1")
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.location == "channel cars"


def change_values(folder: Path, channel: str, first: int) -> None:
    """Turn the bytes of the values from this record on around; once more, and they are whole again."""
    (file,) = (folder / "channels" / channel).glob("*.db")
    with closing(sqlite3.connect(file)) as database, database:
        for id, value in database.execute("SELECT id, value FROM records ORDER BY id").fetchall()[first - 1 :]:
            changed = bytes(255 - byte for byte in value)
            database.execute("UPDATE records SET value = ? WHERE id = ?", (changed, id))


def test_a_replay_that_breaks_off_tells_how_far_it_was_and_can_go_on(address: str, tmp_path: Path) -> None:
    """What is damaged near its end can be read up to there; mended, the rest can be replayed."""
    bind(address).ensure([Topic("long")])
    fill(address, "long", 1_200)
    change_values(tmp_path, "long", 1_200)
    result = penstock("replay", "long", "--into", "again", "--servers", address)
    assert (result.exit_code, result.stdout) == (1, "long: 1,000 records copied to again before it failed\n")
    failure, go_on = result.stderr.splitlines()
    assert failure.startswith("penstock: channel long: ")
    change_values(tmp_path, "long", 1_200)
    (since,) = re.findall(r"^to continue: --since (\S+); ", go_on)
    assert penstock("replay", "long", "--into", "again", "--servers", address, "--since", since).exit_code == 0
    assert penstock("verify", "again", "--first", "1", "--servers", address).exit_code == 0
    verified = json.loads(penstock("verify", "again", "--json", "--servers", address).stdout)
    assert verified["by_sender"][0]["last"] == 1_200


def test_a_replay_that_breaks_off_is_told_as_json(address: str, tmp_path: Path) -> None:
    change_values(tmp_path, "cars", 1)
    result = penstock("replay", "cars", "--into", "again", "--servers", address, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["complete"], told["sent"], told["last"]) == (1, False, 0, None)
    assert "cars" in told["failure"]


def test_a_channel_that_is_not_there_is_told(address: str) -> None:
    result = penstock("replay", "carz", "--into", "x", "--servers", address)
    assert "carz" in str(result.exception)
    assert "x" not in bind(address).names()


def test_a_real_kafka_is_replayed_by_time_and_is_whole(kafka: Kafka, fresh: Callable[[str], str]) -> None:
    channel, again = fresh("cars"), fresh("again")
    kafka.ensure([Topic(channel, partitions=4)])
    send(kafka, channel, [Record(b"%d" % n, Origin("gps", 1, n, n), b"%d" % n) for n in range(1, 501)])
    result = penstock("replay", channel, "--into", again, "--since", "1h", "--speed", "1000x", "--servers", kafka.where)
    assert (result.exit_code, result.stdout) == (0, f"{channel}: 500 records copied to {again}\n")
    assert penstock("verify", again, "--servers", kafka.where, "--first", "1").exit_code == 0
    entries = list(scan(kafka, again))
    assert {Origin.of(entry.headers) for entry in entries} == {Origin("gps", 1, n, n) for n in range(1, 501)}
    assert len({dict(entry.headers)["replay"] for entry in entries}) == 1
