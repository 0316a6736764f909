"""Out of a channel by hand: in memory where that is enough, over a real broker where processes are meant."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.channels.memory import MemoryChannels
from penstock.cli import app
from penstock.cli.consume import GroupReader, Printer, json_line, text_line
from penstock.cli.produce import json_record
from penstock.cli.standard import Output
from penstock.core.contracts import Entry, Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Headers, Origin, Record
from penstock.testing import ManualClock

Fresh = Callable[[str], str]
Eventually = Callable[..., None]
PENSTOCK = [sys.executable, "-m", "penstock"]


class Memory:
    """Channels of this process, and the command on them."""

    def __init__(self) -> None:
        self.address = f"memory://{uuid4().hex}"
        found = bind(self.address)
        assert isinstance(found, MemoryChannels)
        self.channels = found

    def fill(self, *values: bytes | None, key: bytes | None = None, channel: str = "c", partitions: int = 1) -> None:
        self.channels.ensure([Topic(channel, partitions)])
        for value in values:
            self.channels.append(channel, value, key)

    def consume(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["consume", *arguments, "--servers", self.address])

    def printed(self, *arguments: str) -> list[str]:
        result = self.consume("--timeout", "0s", *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()


@pytest.fixture
def memory() -> Memory:
    return Memory()


def misconfigured(result: Result) -> Misconfigured:
    assert isinstance(result.exception, Misconfigured), result.output
    assert result.exception.fix
    return result.exception


# --- where to begin ---------------------------------------------------------------------------------------------------


def test_only_what_comes_from_now_on_is_printed_unless_more_is_asked_for(memory: Memory) -> None:
    memory.fill(b"old")
    assert memory.printed("--topic", "c") == []


def test_all_that_is_kept_is_printed_from_the_beginning(memory: Memory) -> None:
    memory.fill(b"a", b"", None)
    result = memory.consume("--topic", "c", "--from-beginning", "--timeout", "0s")
    assert result.stdout == "a\n\nnull\n"
    assert result.stderr == "3 records\n"


def test_an_offset_of_a_partition(memory: Memory) -> None:
    memory.fill(b"a", b"b", b"c")
    assert memory.printed("--topic", "c", "--offset", "1") == ["b", "c"]
    assert memory.printed("--topic", "c", "--offset", "1", "--partition", "0") == ["b", "c"]


def test_one_partition_alone(memory: Memory) -> None:
    memory.channels.ensure([Topic("c", 3)])
    locations = {memory.channels.append("c", b"%d" % number, b"%d" % number).partition for number in range(30)}
    assert locations == {0, 1, 2}
    everything = memory.printed("--topic", "c", "--from-beginning")
    parts = [memory.printed("--topic", "c", "--from-beginning", "--partition", str(one)) for one in range(3)]
    assert sorted(everything) == sorted(line for part in parts for line in part)
    assert all(parts)


def test_since_a_moment(memory: Memory) -> None:
    memory.fill(b"a")
    assert memory.printed("--topic", "c", "--since", "10m") == ["a"]
    assert memory.printed("--topic", "c", "--since", "0s") == []


def test_several_channels_at_once(memory: Memory) -> None:
    memory.fill(b"a")
    memory.fill(b"b", channel="d")
    assert sorted(memory.printed("--topic", "c", "--topic", "d", "--topic", "c", "--from-beginning")) == ["a", "b"]


def test_no_more_than_was_asked_for_is_printed(memory: Memory) -> None:
    memory.fill(*[b"%d" % number for number in range(2_500)])
    result = memory.consume("--topic", "c", "--from-beginning", "--max-messages", "2100")
    assert result.stdout.splitlines() == [str(number) for number in range(2_100)]


# --- how it is printed ------------------------------------------------------------------------------------------------


def test_keys_are_printed_on_request(memory: Memory) -> None:
    memory.fill(b"v", key=b"k")
    assert memory.printed("--topic", "c", "--from-beginning", "--print-key") == ["k : v"]


def test_json_tells_all(memory: Memory) -> None:
    memory.fill(b"\xff", key=b"k")
    (line,) = memory.printed("--topic", "c", "--from-beginning", "--json")
    told = json.loads(line)
    assert told.pop("appended") > 0
    assert told == {
        "channel": "c",
        "partition": 0,
        "offset": 0,
        "key": "k",
        "value": {"base64": "/w=="},
        "headers": [],
        "origin": None,
    }


def entry(key: bytes | None = b"k", value: bytes | None = b"v", headers: Headers = ()) -> Entry:
    return Entry("c", 2, 7, 1_700_000_000_123_456, key, value, headers)


def test_only_the_value_is_shown_unless_more_is_asked_for() -> None:
    assert text_line(entry()) == b"v\n"


def test_the_key_is_shown_before_the_value() -> None:
    assert text_line(entry(), print_key=True) == b"k : v\n"


def test_null_and_empty_are_told_apart() -> None:
    assert text_line(entry(None, None), print_key=True) == b"null : null\n"
    assert text_line(entry(b"", b""), print_key=True) == b" : \n"


def test_bytes_pass_as_they_are_and_are_spelled_out_where_that_is_safer() -> None:
    hostile = entry(value=b"\x1b[31m\xff\r")
    assert text_line(hostile) == b"\x1b[31m\xff\r\n"
    assert text_line(hostile, escape=True) == rb"\x1b[31m\xff\r" + b"\n"


def test_json_tells_everything() -> None:
    origin = Origin("s", 1, 2, 3)
    assert json.loads(json_line(entry(None, b"\xff", (*origin.headers(), ("x", b"y"))))) == {
        "channel": "c",
        "partition": 2,
        "offset": 7,
        "appended": 1_700_000_000_123_456,
        "key": None,
        "value": {"base64": "/w=="},
        "headers": [
            {"name": "sender", "value": "s"},
            {"name": "epoch", "value": "1"},
            {"name": "seq", "value": "2"},
            {"name": "time", "value": "3"},
            {"name": "x", "value": "y"},
        ],
        "origin": {"sender": "s", "epoch": 1, "seq": 2, "time": 3},
    }


def test_an_origin_that_contradicts_itself_is_none() -> None:
    assert json.loads(json_line(entry(headers=(("seq", b"1"),))))["origin"] is None


def test_json_stays_on_its_line_and_can_be_read_again() -> None:
    odd = entry(b"\x00", b"a\nb\xe2\x80\xa8", (("h", b"\xfe"), ("h", b"")))
    line = json_line(odd)
    assert line.count(b"\n") == 1
    again = json_record(line)
    assert (again.key, again.value, again.headers()) == (odd.key, odd.value, list(odd.headers))


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_goes_on_where_it_was(memory: Memory) -> None:
    memory.fill(b"a", b"b", b"c", key=b"k")
    group = ["--topic", "c", "--group", "g", "--print-key"]
    first = memory.consume(*group, "--from-beginning", "--max-messages", "2")
    assert first.stdout == "k : a\nk : b\n"
    assert first.stderr.splitlines() == ["assigned c/0 at offset 0", "revoked c/0", "2 records"]
    again = memory.consume(*group, "--from-beginning", "--max-messages", "1")
    assert again.stdout == "k : c\n"
    assert again.stderr.splitlines()[0] == "assigned c/0 at offset 2"


class HasEnough(Output):
    """An output whose reader goes away once it has got something."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def write(self, lines: Iterable[bytes]) -> None:
        self.got += lines

    def closed(self) -> bool:
        return bool(self.got)


def test_what_was_printed_when_the_reader_goes_away_is_not_committed(memory: Memory) -> None:
    memory.fill(b"a", b"b")
    clock, out = ManualClock(), HasEnough()
    member = GroupReader(lambda _: None, clock)
    with (
        suppress(BrokenPipeError),
        member.joined(memory.channels, "g", ["c"], beginning=True) as reader,
    ):
        Printer(out, text_line, clock).print_all(reader, None, None, Event())
    assert out.got == [b"a\n", b"b\n"]
    assert "g" not in memory.channels.groups()


def test_a_new_group_begins_now_unless_it_is_told_otherwise(memory: Memory) -> None:
    memory.fill(b"a")
    assert memory.printed("--topic", "c", "--group", "g") == []


# --- a member, on a clock that stands unless it is moved


class Joined:
    """Some records, and members whose clock stands unless it is moved."""

    def __init__(self, records: int = 4, partitions: int = 1) -> None:
        self.clock = ManualClock()
        self.channels = MemoryChannels(None, self.clock, timedelta(seconds=10))
        self.channels.ensure([Topic("c", partitions)])
        for number in range(records):
            self.channels.append("c", b"%d" % number, b"%d" % number)
        self.said: list[str] = []

    def join(self, stack: ExitStack, beginning: bool = True) -> GroupReader:
        member = GroupReader(self.said.append, self.clock)
        return stack.enter_context(member.joined(self.channels, "g", ["c"], beginning=beginning))

    @property
    def committed(self) -> int | None:
        return self.channels.group("g").committed.get(("c", 0))


def values(entries: object) -> list[bytes | None]:
    assert isinstance(entries, list)
    return [entry.value for entry in entries if isinstance(entry, Entry)]


def test_a_member_tells_what_it_is_given_and_from_where() -> None:
    joined = Joined()
    with ExitStack() as stack:
        member = joined.join(stack)
        assert values(member.read(2, 0)) == [b"0", b"1"]
        assert joined.said == ["assigned c/0 at offset 0"]
    assert joined.said == ["assigned c/0 at offset 0", "revoked c/0"]


def test_what_a_member_read_is_committed_only_when_it_asks_for_more() -> None:
    joined = Joined()
    with ExitStack() as stack:
        member = joined.join(stack)
        member.read(2, 0)
        joined.clock.move(2)
        assert joined.committed is None
        member.read(1, 0)
        assert joined.committed == 2


def test_all_is_committed_at_a_good_end() -> None:
    joined = Joined()
    with ExitStack() as stack:
        joined.join(stack).read(3, 0)
    assert joined.committed == 3
    with ExitStack() as stack:
        assert values(joined.join(stack).read(9, 0)) == [b"3"]
    assert joined.said[2] == "assigned c/0 at offset 3"


def test_what_was_not_dealt_with_is_not_committed_and_nothing_more_is_said() -> None:
    joined = Joined()
    with suppress(BrokenPipeError), ExitStack() as stack:
        member = joined.join(stack)
        member.read(2, 0)
        member.read(1, 0)
        raise BrokenPipeError
    assert joined.said == ["assigned c/0 at offset 0"]
    with ExitStack() as stack:
        assert values(joined.join(stack).read(1, 0)) == [b"0"]


def test_a_member_gives_back_what_another_gets_after_it_was_committed() -> None:
    joined = Joined(partitions=2, records=0)
    with ExitStack() as stack:
        one, other = joined.join(stack), joined.join(stack)
        one.read(9, 0)
        for number in range(20):
            joined.channels.append("c", b"x", b"%d" % number)
        assert len(one.read(99, 0)) == 20
        for _ in range(4):
            joined.clock.move(1)
            other.read(9, 0)
            one.read(9, 0)
        gave = [said for said in joined.said if said.startswith("revoked")]
        assert len(gave) == 1
        assert sum(joined.channels.group("g").committed.values()) == 20


def test_a_member_that_was_silent_for_too_long_says_what_it_lost() -> None:
    joined = Joined()
    with ExitStack() as stack:
        member = joined.join(stack)
        member.read(9, 0)
        joined.clock.move(60)
        member.read(9, 0)
    assert joined.said[0] == "assigned c/0 at offset 0"
    assert any(said.startswith("commit failed") for said in joined.said)
    assert "lost c/0" in joined.said


def test_from_now_on_is_where_nothing_is_committed() -> None:
    joined = Joined()
    with ExitStack() as stack:
        member = joined.join(stack, beginning=False)
        assert values(member.read(9, 0)) == []
        joined.channels.append("c", b"new")
        assert values(member.read(9, 0)) == [b"new"]
    assert joined.said[0] == "assigned c/0 at offset 4"


# --- questions that are wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "location"),
    [
        (["--topic", "d"], "channel d"),
        (["--topic", "c", "--from-beginning", "--since", "1m"], "--from-beginning and --since"),
        (["--topic", "c", "--offset", "0"], "--offset"),
        (["--topic", "c", "--offset", "9", "--partition", "1"], "--offset"),
        (["--topic", "c", "--partition", "7"], "--partition"),
        (["--topic", "c", "--since", "then"], "--since"),
        (["--topic", "c", "--timeout", "soon"], "--timeout"),
        (["--topic", "c", "--group", "g", "--offset", "0"], "--offset"),
        (["--topic", "c", "--group", "g", "--partition", "0"], "--partition"),
    ],
)
def test_wrong_options_are_rejected_with_the_fix(memory: Memory, arguments: Sequence[str], location: str) -> None:
    memory.fill(partitions=2)
    assert misconfigured(memory.consume(*arguments)).location == location


def test_what_keeps_nothing_cannot_be_read_from_its_beginning() -> None:
    result = CliRunner().invoke(app, ["consume", "--topic", "c", "--from-beginning", "--servers", "tcp://127.0.0.1:1"])
    assert misconfigured(result).location == "channel c"


def test_a_standard_output_that_is_closed_is_told(tmp_path: Path) -> None:
    command = [*PENSTOCK, "consume", "--topic", "t", "--servers", f"file://{tmp_path}/channels"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(b"penstock: standard output: ")


# --- processes --------------------------------------------------------------------------------------------------------


def send(kafka: Kafka, channel: str, values: Sequence[bytes]) -> None:
    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, [Record(value, None, value) for value in values])

    asyncio.run(go())


@contextmanager
def consuming(kafka: Kafka, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    command = [*PENSTOCK, "consume", *arguments, "--servers", kafka.servers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_comes_is_printed_at_once(kafka: Kafka, fresh: Fresh, eventually: Eventually) -> None:
    channel, numbers = fresh("live"), count()
    kafka.ensure([Topic(channel)])
    with consuming(kafka, "--topic", channel, "--max-messages", "1") as process:

        def heard() -> bool:
            """One of those that are sent again and again came after it began."""
            send(kafka, channel, [b"%d" % next(numbers)])
            return process.poll() is not None

        eventually(heard)
        assert process.returncode == 0
        out, err = process.communicate()
    assert out.strip().isdecimal()
    assert err == "1 record\n"


def test_a_reader_that_has_enough_ends_it_quietly(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("head")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, [b"%01000d" % number for number in range(3_000)])
    group = fresh("head")
    with consuming(kafka, "--topic", channel, "--from-beginning", "--group", group) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert int(process.stdout.readline()) == 0
        process.stdout.close()
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    # No more than the pipe holds was printed, and no more than that may be committed.
    committed = kafka.group(group).committed if group in kafka.groups() else {}
    assert committed.get((channel, 0), 0) < 200


def test_ctrl_c_commits_what_was_printed_and_leaves_the_group(kafka: Kafka, fresh: Fresh) -> None:
    channel, group = fresh("left"), fresh("left")
    kafka.ensure([Topic(channel, 2)])
    send(kafka, channel, [b"%d" % number for number in range(100)])
    with consuming(kafka, "--topic", channel, "--from-beginning", "--group", group, "--print-key") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == f"assigned {channel}/0, {channel}/1 at offset 0, 0\n"
        lines = {process.stdout.readline() for _ in range(100)}
        assert lines == {f"{number} : {number}\n" for number in range(100)}
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == f"revoked {channel}/0, {channel}/1\n100 records\n"
    found = kafka.group(group)
    assert found.members == {}
    assert sum(found.committed.values()) == 100


def test_two_members_share_and_the_second_tells_what_it_was_given(
    kafka: Kafka, fresh: Fresh, eventually: Eventually
) -> None:
    channel, group = fresh("shared"), fresh("shared")
    kafka.ensure([Topic(channel, 4)])
    with consuming(kafka, "--topic", channel, "--group", group) as one:
        assert one.stderr is not None
        assert one.stderr.readline().startswith(
            f"assigned {channel}/0, {channel}/1, {channel}/2, {channel}/3 at offset 0, 0"
        )
        with consuming(kafka, "--topic", channel, "--group", group) as other:
            assert other.stderr is not None
            assert one.stderr.readline().startswith(f"revoked {channel}/")
            assert other.stderr.readline().count(f"{channel}/") == 2
            other.send_signal(signal.SIGTERM)
            assert other.wait(30) == 0
        assert one.stderr.readline().count(f"{channel}/") == 2
