"""The command over a real broker, and over files: the same flags, the same answers."""

import asyncio
import json
import subprocess
import sys
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


def wrong(channels: Channels, *arguments: str) -> str:
    result = topics(channels, *arguments)
    assert isinstance(result.exception, Misconfigured), result.output
    return str(result.exception)


def send(channels: Channels, channel: str, count: int) -> None:
    async def go() -> None:
        async with channels.sender() as sender:
            await sender.send(channel, [Record(b"x", key=b"k") for _ in range(count)])

    asyncio.run(go())


# --- on any middleware ------------------------------------------------------------------------------------------------


def test_a_topic_is_made_listed_described_and_deleted(channels: Channels, fresh: Fresh) -> None:
    name = fresh("whole")
    made = done(channels, "--create", "--topic", name, "--partitions", "3", "--replication-factor", "1")
    assert made == f"made {name}: 3 partitions, 1 replica, 0 records by offsets, kept for ever\n"
    assert name in done(channels, "--list").splitlines()
    assert name in told(channels, "--list")["topics"]
    send(channels, name, 5)
    described = done(channels, "--describe", "--topic", name).splitlines()
    assert described[0] == f"{name}: 3 partitions, 1 replica, 5 records by offsets, kept for ever"
    deleted = done(channels, "--delete", "--topic", name)
    assert deleted == f"deleted {name}: 3 partitions, 1 replica, 5 records by offsets, kept for ever\n"
    assert name not in channels.names()


def test_a_description_for_programs_has_all_that_is_known(channels: Channels, fresh: Fresh) -> None:
    name = fresh("told")
    made = told(channels, "--create", "--topic", name, "--partitions", "2", "--keep", "7d", "--compacted")
    assert (made["made"], made["keep"], made["compacted"], made["replicas"]) == (True, 604_800, True, 1)
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
    said = wrong(channels, "--create", "--topic", name, "--partitions", "4")
    assert said.startswith(f"topic {name}: it is there already, at {channels.where}; leave it as it is: --if-not-")
    left = done(channels, "--create", "--topic", name, "--partitions", "4", "--if-not-exists")
    assert left.startswith(f"it is there already: {name}: 1 partition, ")
    assert told(channels, "--create", "--topic", name, "--if-not-exists")["made"] is False
    assert channels.topic(name).partitions == 1


def test_a_topic_gets_more_partitions_and_never_fewer(channels: Channels, fresh: Fresh) -> None:
    name = fresh("grown")
    channels.ensure([Topic(name, 2)])
    grown = told(channels, "--alter", "--topic", name, "--partitions", "5")
    assert (grown["added"], len(channels.bounds(name))) == (3, 5)
    said = wrong(channels, "--alter", "--topic", name, "--partitions", "4")
    assert said.startswith(f"--partitions: {name} has 5, and never gets fewer: what lies in them would be lost; ")
    assert wrong(channels, "--alter", "--topic", name, "--partitions", "5").startswith(
        f"--partitions: {name} has 5 already"
    )
    more = done(channels, "--alter", "--topic", name, "--partitions", "6").splitlines()
    assert more[1] == "1 partition more: from now on, some keys lie in others than before"


def test_a_misspelled_name_is_answered_with_the_right_one(channels: Channels, fresh: Fresh) -> None:
    name = fresh("spelling")
    channels.ensure([Topic(name)])
    for action in (["--describe"], ["--delete"], ["--alter", "--partitions", "2"]):
        misspelled = name.replace("ll", "l")
        said = wrong(channels, *action, "--topic", misspelled)
        assert said.startswith(f"topic {misspelled}: there is none of that name at {channels.where}; ")
        assert 'did you mean "spelling-' in said


def test_what_is_not_there_need_not_be(channels: Channels) -> None:
    for action in (["--describe"], ["--delete"], ["--alter", "--partitions", "2"]):
        said = done(channels, *action, "--topic", "absent", "--if-exists")
        assert said == "absent is not there; nothing was done\n"
    assert told(channels, "--delete", "--topic", "absent", "--if-exists") == {"topic": "absent", "there": False}


def test_the_books_of_a_pipeline_are_deleted_only_on_purpose(channels: Channels) -> None:
    channels.ensure([Topic("penstock.old.bookmarks")])
    said = wrong(channels, "--delete", "--topic", "penstock.old.bookmarks")
    assert said.startswith("topic penstock.old.bookmarks: a pipeline keeps its own books there")
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
    said = done(kafka, "--alter", "--topic", name, "--keep", "36 hours", "--config", "max.message.bytes=5000")
    assert said == f"now {name}: 1 partition, 1 replica, 0 records by offsets, kept for 36 hours\n"
    assert kafka.topic(name).config["max.message.bytes"] == "5000"
    done(kafka, "--alter", "--topic", name, "--keep", "forever")
    assert kafka.topic(name).retention is None
    # What was not asked for stays.
    assert kafka.topic(name).config["max.message.bytes"] == "5000"
    assert told(kafka, "--alter", "--topic", f"{name}-last", "--keep", "1d")["keep"] == 86_400
    assert kafka.topic(f"{name}-last").compacted


def test_a_setting_that_kafka_does_not_know_is_told(kafka: Kafka, fresh: Fresh) -> None:
    name = fresh("odd")
    said = wrong(kafka, "--create", "--topic", name, "--config", "retention=7")
    assert said == f"Kafka at {kafka.servers}: Unknown topic config name: retention"
    kafka.ensure([Topic(name)])
    assert "Unknown topic config name" in wrong(kafka, "--alter", "--topic", name, "--config", "retention=7")


def test_more_replicas_than_there_are_brokers_are_refused(kafka: Kafka, fresh: Fresh) -> None:
    name = fresh("copies")
    said = wrong(kafka, "--create", "--topic", name, "--replication-factor", "3")
    assert said.startswith(f"channel {name}: 3 replicas are asked for, and there is 1 broker; ask for at most 1, or ")
    assert name not in kafka.names()


def test_what_a_middleware_does_not_give_is_told_and_exits_with_1(tmp_path: Path) -> None:
    files = bind(f"file://{tmp_path / 'channels'}")
    result = topics(files, "--create", "--topic", "copies", "--replication-factor", "3")
    assert (result.exit_code, files.names()) == (1, ["copies"])
    assert result.stdout.splitlines()[1] == "channel copies has 1 copy, and 3 replicas are declared"


def test_others_cannot_change_settings_and_say_so(tmp_path: Path) -> None:
    files = bind(f"file://{tmp_path / 'channels'}")
    files.ensure([Topic("fixed")])
    said = wrong(files, "--alter", "--topic", "fixed", "--keep", "7d")
    assert said.startswith(f"topics --alter: {files.where} cannot change the settings of a topic that is there; ")


# --- what is asked wrongly --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "topics: it is not said what to do; give one of --create, --list, --describe, --alter, --delete"),
        (["--create", "--list"], "topics: --create and --list are asked for at once; give one of"),
        (["--create"], "topics --create: it is not said which topic; name it: --topic NAME"),
        (["--delete"], "topics --delete: it is not said which topic"),
        (["--alter", "--topic", "x"], "topics --alter: it is not said what to change; give --partitions, --config or"),
        (["--list", "--partitions", "3"], "--partitions: it says nothing to --list; it goes with --create, --alter"),
        (["--list", "--topic", "x"], "--topic: it says nothing to --list; it goes with --create, --describe"),
        (["--alter", "--topic", "x", "--compacted"], "--compacted: it says nothing to --alter; it goes with --create"),
        (["--delete", "--topic", "x", "--if-not-exists"], "--if-not-exists: it says nothing to --delete"),
        (["--create", "--topic", "a b"], '--topic: "a b" is not a name; use letters'),
        (["--create", "--topic", ".."], '--topic: ".." is not a name'),
        (["--create", "--topic", ""], '--topic: "" is not a name'),
        (["--create", "--topic", "x\x1b[31m"], r'--topic: "x\x1b[31m" is not a name'),
        (["--create", "--topic", "x" * 250], "--topic: "),
        (["--create", "--topic", "x", "--keep", "soon"], '--keep: "soon" is not a duration'),
        (["--create", "--topic", "x", "--keep", "0s"], "--keep: 0s is no time; give some time, or forever"),
        (["--create", "--topic", "x", "--config", "retention"], '--config: "retention" is no setting; write KEY=VALUE'),
    ],
)
def test_a_wrong_question_is_answered_with_the_fix(arguments: list[str], said: str) -> None:
    assert wrong(bind("memory://topics"), *arguments).startswith(said)


@pytest.mark.parametrize("partitions", ["0", "-1", "10001", "many"])
def test_a_number_of_partitions_that_is_none_is_told(partitions: str) -> None:
    result = topics(bind("memory://topics"), "--create", "--topic", "x", "--partitions", partitions)
    assert result.exit_code == 2
    assert "Invalid value for '--partitions'" in result.stderr


def test_where_nothing_is_kept_there_are_no_topics() -> None:
    result = CliRunner().invoke(app, ["topics", "--list", "--servers", "tcp://127.0.0.1:9"])
    assert str(result.exception).startswith("topics at tcp://127.0.0.1:9: nothing is kept there, so there are none; ")


def test_no_topics_yet_is_said_beside_the_names(tmp_path: Path) -> None:
    result = topics(bind(f"file://{tmp_path}/none"), "--list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "there are none yet at " in result.stderr


def test_where_nothing_runs_it_exits_with_2_and_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "topics", "--list"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(f"penstock: {tmp_path}: nothing runs here; ")
    assert "penstock up" in told.stderr
