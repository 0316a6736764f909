from datetime import timedelta
from pathlib import Path

import pytest

from penstock.channels.sqlite import SqliteChannels
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config, parse_simulation, topics
from penstock.pipeline.description import SourceSpec
from penstock.pipeline.pipeline import Pipeline

FILE = """
[channels]
address = "kafka://broker:9092"
[spark]
every = "2 seconds"
[sources]
rsvps = "wss://example.org/rsvps"
[profiles.night.spark]
every = "1 minute"
[profiles.night.sources]
rsvps = "simulate://rsvps"
"""


def config(folder: Path, text: str = "", profile: str | None = None, **environ: str) -> Config:
    (folder / "penstock.toml").write_text(text)
    return Config.read(folder, profile, environ)


def source(name: str = "rsvps") -> SourceSpec:
    return SourceSpec(name, "ws://declared", "rsvps", ())


def test_without_a_file_everything_is_local(tmp_path: Path) -> None:
    found = Config.read(tmp_path, environ={})
    assert (found.channels.address, found.redis.url, found.spark.master) == ("kafka://", "local", "local")
    assert (found.page.host, found.page.port, found.local.brokers) == ("127.0.0.1", None, None)


def test_every_section_is_read(tmp_path: Path) -> None:
    found = config(tmp_path, FILE)
    assert (found.channels.address, found.spark.every) == ("kafka://broker:9092", timedelta(seconds=2))


def test_a_profile_goes_over_the_file_and_the_environment_over_both(tmp_path: Path) -> None:
    assert config(tmp_path, FILE, "night").spark.every == timedelta(minutes=1)
    assert config(tmp_path, FILE, "night", PENSTOCK_SPARK_EVERY="5 s").spark.every == timedelta(seconds=5)
    assert config(tmp_path, FILE, "night").channels.address == "kafka://broker:9092"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[kafak]", 'penstock.toml: "kafak" is not a table; did you mean "kafka"?'),
        ("[page]\nprot = 1", 'penstock.toml, [page]: "prot" is not a setting; did you mean "port"?'),
        ("[page]\nport = 0", 'penstock.toml, [page]: "port" is 0; Input should be greater than or equal to 1'),
        ("[sources]\nrsvps = 7", 'penstock.toml, [sources]: "rsvps" is 7; Input should be a valid string'),
    ],
)
def test_a_wrong_setting_is_told_with_its_place_and_the_fix(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        config(tmp_path, text)
    assert str(caught.value) == sentence


def test_a_source_is_heard_where_the_pipeline_says_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    assert config(tmp_path).source_address(source()) == "ws://declared"
    assert config(tmp_path, FILE).source_address(source()) == "wss://example.org/rsvps"
    assert config(tmp_path, FILE, "night").source_address(source()) == "simulate://rsvps"
    assert config(tmp_path, FILE).source_address(source("orders")) == "ws://declared"


def test_the_environment_tells_the_address_of_a_source_whatever_the_case_of_its_name(tmp_path: Path) -> None:
    found = config(tmp_path, FILE, PENSTOCK_SOURCES_RSVPS="ws://here")
    assert found.source_address(source()) == found.source_address(source("RSVPs")) == "ws://here"
    assert config(tmp_path, '[sources]\nRSVPs = "ws://there"').source_address(source("RSVPs")) == "ws://there"


def test_state_lies_beside_the_pipeline(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found.state == tmp_path / ".penstock"
    assert found.ledger == tmp_path / ".penstock" / "audit" / "ledger.db"
    assert found.checkpoints == str(tmp_path / ".penstock" / "checkpoints")
    assert config(tmp_path, '[spark]\ncheckpoints = "s3://bucket/c"').checkpoints == "s3://bucket/c"


def test_a_lake_lies_beside_the_pipeline_or_where_it_is_told_to(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found.lake_path("delta://lake/rsvps") == str(tmp_path / "lake" / "rsvps")
    assert found.lake_path("delta:///data/lake") == "/data/lake"
    assert found.lake_path("delta://s3://bucket/lake") == "s3://bucket/lake"


def test_a_tier_alone_needs_the_address_of_its_broker(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"^\[channels\] address: it is kafka://.*"):
        config(tmp_path).bind()


@pytest.mark.parametrize(
    ("address", "folder", "sync"),
    [
        ("file://", ".penstock/channels", True),
        ("file://?sync=no", ".penstock/channels", False),
        ("file://sub/dir", "sub/dir", True),
        ("file://sub/dir?sync=no", "sub/dir", False),
        ("file://a%20b", "a b", True),
    ],
)
def test_files_lie_in_the_state_folder_or_beside_the_pipeline(
    tmp_path: Path, address: str, folder: str, sync: bool
) -> None:
    # Of a folder whose name would be something else in an address, too.
    home = tmp_path / "50%20?#"
    home.mkdir()
    environ = {"PENSTOCK_CHANNELS_ADDRESS": address}
    assert Config.read(home, environ=environ).bind() == SqliteChannels(home / folder, sync)
    assert Config.read(home / ".." / home.name, environ=environ).bind() == SqliteChannels(home / folder, sync)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("simulate://rsvps", ("rsvps", {})),
        ("simulate://rsvps?rate=200&senders=20", ("rsvps", {"rate": "200", "senders": "20"})),
        ("simulate://rsvps?rate=1&rate=2", ("rsvps", {"rate": "2"})),
        ("simulate://rsvps?no-resume&rate=5", ("rsvps", {"no-resume": "", "rate": "5"})),
        ("ws://example.org/rsvps?rate=200", None),
        ("", None),
    ],
)
def test_an_address_may_be_that_of_a_simulation(url: str, found: tuple[str, dict[str, str]] | None) -> None:
    assert parse_simulation(url) == found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"max.message.bytes": "1000"}, {}),
        ({"max.message.bytes": "5000000", "segment.ms": "1"}, {"max.message.bytes": "5065536"}),
    ],
)
def test_dead_letters_may_be_as_large_as_what_they_are_of(config: dict[str, str], expected: dict[str, str]) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", config=config)
    found = {topic.name: topic for topic in topics(app.describe())}
    assert found["rsvps.dead"].config == expected


def test_every_topic_that_a_pipeline_needs_is_listed() -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", partitions=4, replicas=3, retention="1 day")
    app.sql_query("counts", key="n", sql="SELECT * FROM rsvps")
    found = {topic.name: topic for topic in topics(app.describe())}
    assert list(found) == [
        "rsvps",
        "rsvps.dead",
        "counts",
        "penstock.meetups.heartbeats",
        "penstock.meetups.bookmarks",
        "penstock.meetups.status",
    ]
    assert found["rsvps"] == Topic("rsvps", 4, 3, retention=timedelta(days=1))
    assert found["rsvps.dead"] == Topic("rsvps.dead", 1, 3)
    assert [name for name, topic in found.items() if topic.compacted] == [
        "counts",
        "penstock.meetups.bookmarks",
        "penstock.meetups.status",
    ]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("1 hour", timedelta(days=1)), ("3 days", timedelta(days=3)), (None, None)],
)
def test_a_result_waits_for_a_store_that_is_away_a_day_at_least(keep: str | None, kept: timedelta | None) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps")
    app.sql_query("counts", key="n", sql="SELECT * FROM rsvps", retention=keep)
    assert [topic.retention for topic in topics(app.describe()) if topic.name == "counts"] == [kept]
