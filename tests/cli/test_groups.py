import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.channels.memory import MemoryChannels
from penstock.cli import app
from penstock.core.contracts import ChannelPartition, Channels, Member, Topic
from penstock.core.errors import Misconfigured

Fresh = Callable[[str], str]


class Quiet:
    """A member that does not care what it is dealt."""

    def assigned(self, locations: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        return {}

    def revoked(self, locations: Sequence[ChannelPartition]) -> None: ...

    def lost(self, locations: Sequence[ChannelPartition]) -> None: ...


class Memory:
    """A channel of two partitions with ten records, and the command on it."""

    def __init__(self) -> None:
        self.address = f"memory://{uuid4().hex}"
        found = bind(self.address)
        assert isinstance(found, MemoryChannels)
        self.channels = found
        self.channels.ensure([Topic("c", 2)])
        for number in range(10):
            self.channels.append("c", b"%d" % number, b"%d" % number)

    def groups(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["groups", *arguments, "--servers", self.address])

    def json(self, *arguments: str) -> dict[str, object]:
        result = self.groups(*arguments, "--json")
        assert result.exit_code == 0, result.output
        found: dict[str, object] = json.loads(result.stdout)
        return found

    @property
    def ends(self) -> dict[int, int]:
        return {partition: end for partition, (_, end) in self.channels.bounds("c").items()}


@pytest.fixture
def memory() -> Memory:
    return Memory()


def joined(channels: Channels, group: str, channel: str) -> AbstractContextManager[Member]:
    return channels.join(group, [channel], Quiet())


def misconfigured(result: Result) -> Misconfigured:
    assert isinstance(result.exception, Misconfigured), result.output
    assert result.exception.fix
    return result.exception


def rows(result: Result) -> list[list[str]]:
    lines = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line[1:-1]] for line in lines]


# --- list and describe ------------------------------------------------------------------------------------------------


def test_groups_are_listed_by_name(memory: Memory) -> None:
    assert memory.groups("--list").stdout == ""
    assert memory.json("--list") == {"groups": []}
    for name in ("b", "a"):
        memory.channels.move(name, {"c": {0: 0}})
    assert memory.groups("--list").stdout == "a\nb\n"
    assert memory.json("--list") == {"groups": ["a", "b"]}


def test_a_group_is_described_with_its_lag(memory: Memory) -> None:
    memory.channels.move("g", {"c": {0: 1}})
    result = memory.groups("--describe")
    end = memory.ends
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"g: empty, 0 members, lag {end[0] - 1}"
    assert rows(result) == [
        ["c", "0", "1", str(end[0]), str(end[0] - 1), "-"],
        ["c", "1", "-", str(end[1]), "-", "-"],
    ]


def test_a_group_is_described_with_its_members(memory: Memory) -> None:
    with joined(memory.channels, "g", "c") as member:
        while len(member.held()) < 2:
            member.read(5, 0.1)
        while any(member.held()[location] < memory.ends[location[1]] for location in member.held()):
            member.read(5, 0.1)
        member.commit()
        told = memory.json("--describe", "--group", "g")
        shown = memory.groups("--describe", "--group", "g")
    assert isinstance(told["groups"], list)
    (group,) = told["groups"]
    ((name, locations),) = group["members"].items()
    assert locations == [{"channel": "c", "partition": 0}, {"channel": "c", "partition": 1}]
    assert (group["state"], group["lag"]) == ("stable", 0)
    assert [row["member"] for row in group["partitions"]] == [name, name]
    assert "g: stable, 1 member, lag 0" in shown.stdout


def test_a_channel_that_is_not_there_has_no_lag(memory: Memory) -> None:
    memory.channels.move("g", {"gone": {0: 1}})
    assert rows(memory.groups("--describe")) == [["gone", "0", "1", "-", "-", "-"]]


def test_a_description_can_be_of_some_channels_only(memory: Memory) -> None:
    memory.channels.ensure([Topic("d")])
    memory.channels.move("g", {"c": {0: 1}, "d": {0: 0}})
    assert {row[0] for row in rows(memory.groups("--describe", "--topic", "d"))} == {"d"}


# --- reset ------------------------------------------------------------------------------------------------------------


def test_a_group_is_moved(memory: Memory) -> None:
    memory.channels.move("g", {"c": {0: 1, 1: 1}})
    ends = memory.ends
    for target, expected in (("end", ends), ("beginning", {0: 0, 1: 0}), ("2", {0: 2, 1: 2})):
        result = memory.groups("--reset", "--group", "g", "--to", target)
        assert result.exit_code == 0, result.output
        assert memory.channels.group("g").committed == {("c", one): at for one, at in expected.items()}
    assert rows(result) == [["c", "0", "0", "2"], ["c", "1", "0", "2"]]
    assert result.stdout.splitlines()[-1] == "g was moved"


def test_a_group_is_moved_to_a_moment(memory: Memory) -> None:
    memory.channels.move("g", {"c": memory.ends})
    assert memory.json("--reset", "--group", "g", "--since", "10m")["dry_run"] is False
    assert set(memory.channels.group("g").committed.values()) == {0}


def test_a_dry_run_moves_nothing(memory: Memory) -> None:
    memory.channels.move("g", {"c": {0: 1}})
    told = memory.json("--reset", "--group", "g", "--to", "beginning", "--dry-run")
    assert told == {
        "group": "g",
        "dry_run": True,
        "moved": [
            {"channel": "c", "partition": 0, "from": 1, "to": 0},
            {"channel": "c", "partition": 1, "from": None, "to": 0},
        ],
    }
    assert "g would be moved" in memory.groups("--reset", "--group", "g", "--to", "end", "--dry-run").stdout
    assert memory.channels.group("g").committed == {("c", 0): 1}


def test_a_group_can_be_given_a_place_before_it_has_one(memory: Memory) -> None:
    assert memory.groups("--reset", "--group", "new", "--topic", "c", "--to", "end").exit_code == 0
    assert memory.channels.group("new").committed == {("c", one): end for one, end in memory.ends.items()}


def test_a_group_with_members_is_not_moved(memory: Memory) -> None:
    with joined(memory.channels, "g", "c") as member:
        member.read(1, 0)
        error = misconfigured(memory.groups("--reset", "--group", "g", "--topic", "c", "--to", "end"))
    assert error.location == "group g"
    assert "1 member" in error.problem


def test_what_only_shows_how_far_a_pipeline_is_is_not_moved(memory: Memory) -> None:
    memory.channels.move("penstock.demo.load", {"c": {0: 1}})
    error = misconfigured(memory.groups("--reset", "--group", "penstock.demo.load", "--to", "beginning"))
    assert error.location == "group penstock.demo.load"
    assert memory.channels.group("penstock.demo.load").committed == {("c", 0): 1}


@pytest.mark.parametrize(
    ("arguments", "location"),
    [
        ([], "groups"),
        (["--list", "--describe"], "groups"),
        (["--list", "--dry-run"], "--to, --since, --dry-run"),
        (["--list", "--group", "g"], "--group, --topic"),
        (["--list", "--topic", "c"], "--group, --topic"),
        (["--describe", "--group", "gg"], "group gg"),
        (["--reset", "--to", "end"], "--reset"),
        (["--reset", "--group", "g"], "--reset"),
        (["--reset", "--group", "g", "--to", "end", "--since", "1m"], "--reset"),
        (["--reset", "--group", "g", "--to", "start"], "--to"),
        (["--reset", "--group", "g", "--to", "99"], "--to"),
        (["--reset", "--group", "none", "--to", "end"], "group none"),
        (["--reset", "--group", "g", "--topic", "d", "--to", "end"], "channel d"),
    ],
)
def test_wrong_options_are_rejected_with_the_fix(memory: Memory, arguments: Sequence[str], location: str) -> None:
    memory.channels.move("g", {"c": {0: 1}})
    assert misconfigured(memory.groups(*arguments)).location == location


def test_a_misspelled_group_is_answered_with_the_right_one(memory: Memory) -> None:
    memory.channels.move("g", {"c": {0: 1}})
    assert 'did you mean "g"?' in misconfigured(memory.groups("--describe", "--group", "gg")).fix


# --- the real one -----------------------------------------------------------------------------------------------------


def test_a_group_of_kafka_is_described_refused_while_it_has_members_and_moved(kafka: Kafka, fresh: Fresh) -> None:
    channel, group = fresh("grouped"), fresh("grouped")
    kafka.ensure([Topic(channel, 2)])

    def groups(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["groups", *arguments, "--group", group, "--servers", kafka.servers])

    with joined(kafka, group, channel) as member:
        while len(member.held()) < 2:
            member.read(1, 0.1)
        member.commit()
        told = json.loads(groups("--describe", "--json").stdout)["groups"][0]
        assert [len(locations) for locations in told["members"].values()] == [2]
        assert [row["lag"] for row in told["partitions"]] == [0, 0]
        assert "1 member" in misconfigured(groups("--reset", "--to", "beginning")).problem
    assert groups("--reset", "--to", "end").exit_code == 0
    listed = CliRunner().invoke(app, ["groups", "--list", "--servers", kafka.servers])
    assert group in listed.stdout.splitlines()
