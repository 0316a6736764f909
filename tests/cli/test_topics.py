"""The command over a real broker, and over files: the same flags, the same answers."""

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.cli import app
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Record

Fresh = Callable[[str], str]


@pytest.fixture(params=["kafka", "file"])
def channels(request: pytest.FixtureRequest, tmp_path: Path) -> Channels:
    if request.param == "kafka":
        found: Channels = request.getfixturevalue("kafka")
        return found
    return bind(f"file://{tmp_path / 'channels'}")


def topics(channels: Channels, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["topics", *arguments, "--servers", channels.where])


def done(channels: Channels, *arguments: str) -> str:
    result = topics(channels, *arguments)
    assert result.exit_code == 0, result.exception or result.output
    return result.stdout


def told(channels: Channels, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(done(channels, *arguments, "--json")))


def misconfigured(channels: Channels, *arguments: str) -> Misconfigured:
    result = topics(channels, *arguments)
    assert isinstance(result.exception, Misconfigured), result.output
    return result.exception


def send(channels: Channels, channel: str, count: int) -> None:
    async def go() -> None:
        async with channels.sender() as sender:
            await sender.send(channel, [Record(b"x", key=b"k") for _ in range(count)])

    asyncio.run(go())


# --- on any middleware ------------------------------------------------------------------------------------------------


def test_a_topic_is_made_listed_described_and_deleted(channels: Channels, fresh: Fresh) -> None:
    name = fresh("whole")
    made = done(channels, "--create", "--topic", name, "--partitions", "3", "--replication-factor", "1")
    assert made == f"created {name}: 3 partitions, 1 replica, 0 offsets, kept forever\n"
    assert name in done(channels, "--list").splitlines()
    assert name in told(channels, "--list")["topics"]
    send(channels, name, 5)
    described = done(channels, "--describe", "--topic", name).splitlines()
    assert described[0] == f"{name}: 3 partitions, 1 replica, 5 offsets, kept forever"
    deleted = done(channels, "--delete", "--topic", name)
    assert deleted == f"deleted {name}: 3 partitions, 1 replica, 5 offsets, kept forever\n"
    assert name not in channels.names()


def test_a_description_for_programs_has_all_that_is_known(channels: Channels, fresh: Fresh) -> None:
    name = fresh("told")
    made = told(channels, "--create", "--topic", name, "--partitions", "2", "--retention", "7d", "--compacted")
    assert (made["created"], made["retention"], made["compacted"], made["replicas"]) == (True, 604_800, True, 1)
    send(channels, name, 4)
    (one,) = told(channels, "--describe", "--topic", name)["topics"]
    assert (one["topic"], one["records"], len(one["partitions"])) == (name, 4, 2)
    assert sorted((each["first"], each["next"], each["records"]) for each in one["partitions"]) == [
        (0, 0, 0),
        (0, 4, 4),
    ]
    assert channels.topic(name).retention == timedelta(days=7)


def test_without_a_name_all_are_described(channels: Channels, fresh: Fresh) -> None:
    names = [fresh("each"), fresh("each")]
    channels.ensure([Topic(name) for name in names])
    assert set(names) <= {one["topic"] for one in told(channels, "--describe")["topics"]}
    lines = done(channels, "--describe").splitlines()
    assert all(any(line.startswith(f"{name}: 1 partition,") for line in lines) for name in names)


def test_what_is_there_is_not_made_again(channels: Channels, fresh: Fresh) -> None:
    name = fresh("twice")
    channels.ensure([Topic(name)])
    error = misconfigured(channels, "--create", "--topic", name, "--partitions", "4")
    assert error.location == f"topic {name}"
    assert "--if-not-exists" in error.fix
    left = done(channels, "--create", "--topic", name, "--partitions", "4", "--if-not-exists")
    assert left.startswith(f"exists already: {name}: 1 partition, ")
    assert told(channels, "--create", "--topic", name, "--if-not-exists")["created"] is False
    assert channels.topic(name).partitions == 1


def test_a_topic_gets_more_partitions_and_never_fewer(channels: Channels, fresh: Fresh) -> None:
    name = fresh("grown")
    channels.ensure([Topic(name, 2)])
    grown = told(channels, "--alter", "--topic", name, "--partitions", "5")
    assert (grown["added"], len(channels.bounds(name))) == (3, 5)
    for count in ("4", "5"):
        error = misconfigured(channels, "--alter", "--topic", name, "--partitions", count)
        assert (error.location, f"{name} has 5" in error.problem) == ("--partitions", True)
    more = done(channels, "--alter", "--topic", name, "--partitions", "6").splitlines()
    assert more[1].startswith("1 partition added")


def test_a_misspelled_name_is_answered_with_the_right_one(channels: Channels, fresh: Fresh) -> None:
    name = fresh("spelling")
    channels.ensure([Topic(name)])
    for action in (["--describe"], ["--delete"], ["--alter", "--partitions", "2"]):
        misspelled = name.replace("ll", "l")
        error = misconfigured(channels, *action, "--topic", misspelled)
        assert error.location == f"topic {misspelled}"
        assert 'did you mean "spelling-' in error.fix


def test_what_is_not_there_need_not_be(channels: Channels) -> None:
    for action in (["--describe"], ["--delete"], ["--alter", "--partitions", "2"]):
        said = done(channels, *action, "--topic", "absent", "--if-exists")
        assert said == "absent does not exist\n"
    assert told(channels, "--delete", "--topic", "absent", "--if-exists") == {"topic": "absent", "exists": False}


def test_the_books_of_a_pipeline_are_deleted_only_on_purpose(channels: Channels) -> None:
    channels.ensure([Topic("penstock.old.bookmarks")])
    error = misconfigured(channels, "--delete", "--topic", "penstock.old.bookmarks")
    assert (error.location, "--force" in error.fix) == ("topic penstock.old.bookmarks", True)
    done(channels, "--delete", "--topic", "penstock.old.bookmarks", "--force")
    assert "penstock.old.bookmarks" not in channels.names()


# --- on Kafka ---------------------------------------------------------------------------------------------------------


def test_kafka_tells_who_holds_a_partition(kafka: Kafka, fresh: Fresh) -> None:
    name = fresh("held")
    done(kafka, "--create", "--topic", name, "--config", "max.message.bytes=2000000")
    (one,) = told(kafka, "--describe", "--topic", name)["topics"]
    (partition,) = one["partitions"]
    assert (partition["leader"], partition["replicas"], partition["in_sync"]) == (1, [1], [1])
    assert one["config"]["max.message.bytes"] == "2000000"
    lines = done(kafka, "--describe", "--topic", name).splitlines()
    assert "max.message.bytes=2000000, " in lines[1]
    assert [cell.strip() for cell in lines[5].strip("│").split("│")] == ["0", "0", "0", "0", "1", "1", "1"]


def test_kafka_changes_the_settings_of_a_topic_that_is_there(kafka: Kafka, fresh: Fresh) -> None:
    name = fresh("changed")
    kafka.ensure([Topic(name, retention=timedelta(days=1)), Topic(f"{name}-last", compacted=True)])
    said = done(kafka, "--alter", "--topic", name, "--retention", "36 hours", "--config", "max.message.bytes=5000")
    assert said == f"now {name}: 1 partition, 1 replica, 0 offsets, kept for 36 hours\n"
    assert kafka.topic(name).config["max.message.bytes"] == "5000"
    done(kafka, "--alter", "--topic", name, "--retention", "forever")
    assert kafka.topic(name).retention is None
    # What was not asked for stays.
    assert kafka.topic(name).config["max.message.bytes"] == "5000"
    assert told(kafka, "--alter", "--topic", f"{name}-last", "--retention", "1d")["retention"] == 86_400
    assert kafka.topic(f"{name}-last").compacted


def test_a_setting_that_kafka_does_not_know_is_told(kafka: Kafka, fresh: Fresh) -> None:
    name = fresh("odd")
    error = misconfigured(kafka, "--create", "--topic", name, "--config", "retention=7")
    assert error.location == f"Kafka at {kafka.servers}"
    kafka.ensure([Topic(name)])
    error = misconfigured(kafka, "--alter", "--topic", name, "--config", "retention=7")
    assert "Unknown topic config name" in error.problem


def test_more_replicas_than_there_are_brokers_are_refused(kafka: Kafka, fresh: Fresh) -> None:
    name = fresh("copies")
    assert misconfigured(kafka, "--create", "--topic", name, "--replication-factor", "3").location == f"channel {name}"
    assert name not in kafka.names()


def test_what_a_middleware_does_not_give_is_told_and_exits_with_1(tmp_path: Path) -> None:
    files = bind(f"file://{tmp_path / 'channels'}")
    result = topics(files, "--create", "--topic", "copies", "--replication-factor", "3")
    assert (result.exit_code, files.names()) == (1, ["copies"])
    assert result.stdout.splitlines()[1] == "channel copies has 1 copy, and 3 replicas are declared"


def test_others_cannot_change_settings_and_say_so(tmp_path: Path) -> None:
    files = bind(f"file://{tmp_path / 'channels'}")
    files.ensure([Topic("fixed")])
    assert misconfigured(files, "--alter", "--topic", "fixed", "--retention", "7d").location == "topics --alter"


# --- what is asked wrongly --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "location"),
    [
        ([], "topics"),
        (["--create", "--list"], "topics"),
        (["--create"], "topics --create"),
        (["--delete"], "topics --delete"),
        (["--alter", "--topic", "x"], "topics --alter"),
        (["--list", "--partitions", "3"], "--partitions"),
        (["--list", "--topic", "x"], "--topic"),
        (["--alter", "--topic", "x", "--compacted"], "--compacted"),
        (["--delete", "--topic", "x", "--if-not-exists"], "--if-not-exists"),
        (["--create", "--topic", "a b"], "--topic"),
        (["--create", "--topic", ".."], "--topic"),
        (["--create", "--topic", ""], "--topic"),
        (["--create", "--topic", "x" * 250], "--topic"),
        (["--create", "--topic", "x", "--retention", "soon"], "--retention"),
        (["--create", "--topic", "x", "--retention", "0s"], "--retention"),
        (["--create", "--topic", "x", "--config", "retention"], "--config"),
    ],
)
def test_wrong_options_are_rejected_with_the_fix(arguments: list[str], location: str) -> None:
    error = misconfigured(bind("memory://topics"), *arguments)
    assert error.location == location
    assert error.fix


def test_a_name_with_control_characters_is_printed_harmlessly() -> None:
    error = misconfigured(bind("memory://topics"), "--create", "--topic", "x\x1b[31m")
    assert r"x\x1b[31m" in error.problem


@pytest.mark.parametrize("partitions", ["0", "-1", "10001", "many"])
def test_a_number_of_partitions_that_is_none_is_told(partitions: str) -> None:
    result = topics(bind("memory://topics"), "--create", "--topic", "x", "--partitions", partitions)
    assert result.exit_code == 2
    assert "Invalid value for '--partitions'" in result.stderr


def test_where_nothing_is_kept_there_are_no_topics() -> None:
    result = CliRunner().invoke(app, ["topics", "--list", "--servers", "tcp://127.0.0.1:9"])
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.location == "topics at tcp://127.0.0.1:9"


def test_no_topics_yet_is_said_beside_the_names(tmp_path: Path) -> None:
    result = topics(bind(f"file://{tmp_path}/none"), "--list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "there are no topics at " in result.stderr


def test_where_nothing_runs_it_says_how_to_start(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["topics", "--list", "--folder", str(tmp_path)]).exception
    assert isinstance(error, Misconfigured)
    assert "penstock up" in error.fix
