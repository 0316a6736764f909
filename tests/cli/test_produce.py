"""Into a channel by hand: as a process of its own, over a real broker."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from unittest.mock import patch

import pytest
from tests.ports import later_port
from typer.testing import CliRunner, Result

from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.cli import app as whole
from penstock.cli.produce import SendResult, app, json_record, parse_separator, read_records, send, text_record
from penstock.cli.standard import Input
from penstock.collect.numbers import Numbering
from penstock.core.contracts import Entry, Topic
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import Origin, Record
from penstock.run.accounts import announce
from penstock.testing import ManualClock

Fresh = Callable[[str], str]
Eventually = Callable[..., None]
PENSTOCK = [sys.executable, "-m", "penstock"]


@pytest.fixture
def channel(kafka: Kafka, fresh: Fresh) -> str:
    name = fresh("produced")
    kafka.ensure([Topic(name)])
    return name


def produced(kafka: Kafka, given: bytes, *arguments: str) -> Result:
    with TemporaryFile() as lines:  # The command reads a file descriptor.
        lines.write(given)
        lines.seek(0)
        with patch.object(Input, "standard", lambda max_length, _: Input(lines.fileno(), max_length)):
            return CliRunner().invoke(whole, ["produce", *arguments, "--servers", kafka.servers])


@contextmanager
def producing(*arguments: str, stdin: int = subprocess.PIPE) -> "Iterator[subprocess.Popen[bytes]]":
    command = [*PENSTOCK, "produce", *arguments]
    process = subprocess.Popen(command, stdin=stdin, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stderr):
            if stream:
                stream.close()


def held(kafka: Kafka, channel: str) -> list[Entry]:
    ends = {partition: end for partition, (_, end) in kafka.bounds(channel).items()}
    found: list[Entry] = []
    with kafka.reader({channel: {}}) as reader:
        while any(reader.positions(channel)[partition] < end for partition, end in ends.items()):
            found += reader.read(1_000, 1)
    return found


def verified(kafka: Kafka, channel: str) -> int:
    return CliRunner().invoke(whole, ["verify", channel, "--first", "1", "--servers", kafka.servers]).exit_code


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def misconfigured(result: Result) -> Misconfigured:
    assert isinstance(result.exception, Misconfigured), result.output
    assert result.exception.fix
    return result.exception


# --- lines ------------------------------------------------------------------------------------------------------------


def test_each_line_becomes_a_numbered_record(kafka: Kafka, channel: str) -> None:
    done = produced(kafka, b"one\n\nthr\xffe\nlast", "--topic", channel, "--sender", "me")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"4 acknowledged by {channel} at {kafka.where}\n"
    entries = held(kafka, channel)
    assert [entry.value for entry in entries] == [b"one", b"", b"thr\xffe", b"last"]
    origins = [Origin.of(entry.headers) for entry in entries]
    assert [origin and (origin.sender, origin.seq) for origin in origins] == [("me", seq) for seq in (1, 2, 3, 4)]
    assert verified(kafka, channel) == 0


def test_keys_headers_and_nulls_as_json(kafka: Kafka, channel: str) -> None:
    lines = b'{"key": "k", "value": "v", "headers": {"a": "1"}}\n{"key": "k", "value": null}\n'
    assert produced(kafka, lines, "--topic", channel, "--no-identity", "--json").exit_code == 0
    found = [(entry.key, entry.value, list(entry.headers)) for entry in held(kafka, channel)]
    assert found == [(b"k", b"v", [("a", b"1")]), (b"k", None, [])]


def test_a_line_that_cannot_be_read_is_named_and_those_before_it_are_sent(kafka: Kafka, channel: str) -> None:
    done = produced(kafka, b"a:1\nb:2\nnonsense\nc:3\n", "--topic", channel, "--key-separator", ":")
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        f"2 acknowledged by {channel} at {kafka.where}",
        'penstock: line 3 is refused: it has no key: "nonsense" has no separator ":"',
    ]
    assert [entry.key for entry in held(kafka, channel)] == [b"a", b"b"]


def test_what_consume_tells_as_json_can_be_put_in_again_with_its_identity(
    kafka: Kafka, channel: str, fresh: Fresh
) -> None:
    other = fresh("copied")
    assert produced(kafka, b"x:\xff\ny:\n", "--topic", channel, "--key-separator", ":").exit_code == 0
    consume = ["consume", "--topic", channel, "--from-beginning", "--max-messages", "2", "--json"]
    told = CliRunner().invoke(whole, [*consume, "--servers", kafka.servers])
    assert produced(kafka, told.stdout_bytes, "--topic", other, "--create", "--json").exit_code == 0
    copies = [(entry.key, entry.value, list(entry.headers)) for entry in held(kafka, other)]
    assert copies == [(entry.key, entry.value, list(entry.headers)) for entry in held(kafka, channel)]


def test_ctrl_c_sends_the_lines_that_were_read_and_no_half_one(
    kafka: Kafka, channel: str, eventually: Eventually
) -> None:
    with producing("--topic", channel, "--servers", kafka.servers) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"1000000\n10000")
        process.stdin.flush()
        eventually(lambda: kafka.bounds(channel)[0][1] == 1)
        process.send_signal(signal.SIGINT)
        told = process.stderr.read().decode().splitlines()
        assert told == [
            f"1 acknowledged by {channel} at {kafka.where}",
            "the last line was incomplete, and was not sent",
        ]
        assert process.wait(30) == 0
    assert [entry.value for entry in held(kafka, channel)] == [b"1000000"]


def test_a_person_is_prompted_and_each_line_is_sent_at_once(kafka: Kafka, channel: str, eventually: Eventually) -> None:
    ours, theirs = pty.openpty()
    with FileIO(ours, "r+"), producing("--topic", channel, "--servers", kafka.servers, stdin=theirs) as process:
        os.close(theirs)
        assert process.stderr is not None
        assert process.stderr.read(1) == b">"
        os.write(ours, b"hello\n")
        assert process.stderr.read(1) == b">"
        eventually(lambda: kafka.bounds(channel)[0][1] == 1)
        os.write(ours, b"\x04")
        assert process.wait(30) == 0


async def test_nothing_is_read_on_while_the_channel_has_not_acknowledged() -> None:
    asked, acknowledge, result = [0], asyncio.Event(), SendResult("c")

    class Slow:
        async def send(self, channel: str, records: Sequence[Record]) -> None:
            await acknowledge.wait()

    async def portions() -> AsyncIterator[Sequence[Record]]:
        for _ in range(3):
            asked[0] += 1
            yield [Record(b"x")]

    sending = asyncio.create_task(send(nullcontext(Slow()), "c", result, portions()))
    for _ in range(100):
        await asyncio.sleep(0)
    assert asked == [1]
    acknowledge.set()
    await sending
    assert result.acknowledged == 3
    assert asked == [3]


async def test_what_was_not_acknowledged_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        async def send(self, channel: str, records: Sequence[Record]) -> None:
            if len(records) > 1:
                raise Unavailable("it", "too bad")

    async def portions() -> AsyncIterator[Sequence[Record]]:
        yield [Record(b"x")]
        yield [Record(b"x"), Record(b"y")]

    result = SendResult("c at memory://")
    await send(nullcontext(Broken()), "c", result, portions())
    assert result.report() == 1
    assert capsys.readouterr().err.splitlines() == [
        "1 acknowledged by c at memory://",
        "penstock: it is unavailable: too bad",
        "2 not acknowledged: they may or may not be in the channel",
    ]


# --- questions that are wrong -----------------------------------------------------------------------------------------


def test_a_channel_that_is_not_there_is_an_error_with_the_fix() -> None:
    bind("memory://produce").ensure([Topic("updates")])
    error = misconfigured(run("--topic", "update", "--servers", "memory://produce"))
    assert error.location == "channel update"
    assert 'did you mean "updates"?' in error.fix
    assert "--create" in error.fix


@pytest.mark.parametrize(
    ("arguments", "location"),
    [
        ([], "produce"),
        (["--topic", "t", "--sender", ""], "--sender"),
        (["--topic", "t", "--key-separator", ""], "--key-separator"),
        (["--topic", "t", "--json", "--key-separator", ":"], "--json"),
        (["--topic", "t", "updates"], "--topic"),
        (["updates", "--every", "often"], "--every"),
        (["updates", "--every", "0s"], "--every"),
        (["random-walk", "--every", "0s"], "--every"),
    ],
)
def test_wrong_options_are_rejected_with_the_fix(arguments: Sequence[str], location: str) -> None:
    assert misconfigured(run(*arguments)).location == location


def test_a_standard_input_that_is_closed_is_told(tmp_path: Path) -> None:
    command = [*PENSTOCK, "produce", "--topic", "t", "--create", "--servers", f"file://{tmp_path}/channels"]
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *command], capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(b"penstock: standard input: ")


# --- reading, without a process ---------------------------------------------------------------------------------------


def reading(
    content: bytes, read_line: Callable[[bytes], Record] = text_record, longest: int = 100, number: bool = True
) -> Iterator[Record]:
    read, write = os.pipe()
    with FileIO(read), FileIO(write, "w") as into:
        into.write(content)
        into.close()
        clock = ManualClock(5)
        numbering = Numbering("s", 1) if number else None
        for portion in read_records(Input(read, longest), read_line, numbering, clock, Event()):
            yield from portion


def test_a_line_that_is_longer_than_the_longest_is_refused_with_its_number() -> None:
    assert len(list(reading(b"x" * 100))) == 1
    with pytest.raises(Refused, match=r"line 2 .* 100 bytes; raise --max-line"):
        list(reading(b"a\n" + b"x" * 101 + b"\n"))


def test_a_line_that_tells_its_sender_is_not_numbered_again() -> None:
    lines = b'{"value": "1"}\n{"value": "2", "headers": {"sender": "t"}}\n{"value": "3"}\n'
    found = list(reading(lines, json_record))
    assert [record.origin for record in found] == [Origin("s", 1, 1, 5), None, Origin("s", 1, 2, 5)]


def test_nobody_numbers_what_shall_have_no_identity() -> None:
    assert list(reading(b"a\n", number=False)) == [Record(b"a")]


# --- generators -------------------------------------------------------------------------------------------------------


def test_updates_of_many_senders_are_whole(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("updates")
    options = ["--topic", channel, "--every", "10ms", "--count", "5", "--senders", "20", "--total", "50"]
    done = run("updates", *options, "--servers", kafka.servers)
    assert done.exit_code == 0, done.output
    assert "1,000 acknowledged" in done.stderr
    assert verified(kafka, channel) == 0
    senders = {json.loads(entry.value or b"")["sender"] for entry in held(kafka, channel)}
    assert senders == {f"sender-{number:02}" for number in range(1, 21)}


def test_a_generator_ends_with_ctrl_c_however_seldom_it_sends(
    kafka: Kafka, fresh: Fresh, eventually: Eventually
) -> None:
    channel = fresh("walk")
    with producing("random-walk", "--topic", channel, "--every", "1h", "--servers", kafka.servers) as process:
        eventually(lambda: channel in kafka.names() and kafka.bounds(channel)[0][1] == 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_random_walk_in_memory() -> None:
    result = run("random-walk", "--every", "1ms", "--total", "3", "--seed", "1", "--servers", "memory://walk")
    assert result.exit_code == 0, result.output
    with bind("memory://walk").reader({"random_walk": {}}) as reader:
        entries = reader.read(9, 0)
    assert [entry.key for entry in entries] == [b"walk"] * 3
    assert all(len((entry.value or b"").partition(b".")[2]) == 4 for entry in entries)


def test_updates_over_tcp_reach_who_listens() -> None:
    """Nothing lies between: consume listens, produce connects."""
    address = f"tcp://127.0.0.1:{later_port()}"
    consume = [*PENSTOCK, "consume", "--topic", "updates", "--max-messages", "20", "--servers", address]
    with subprocess.Popen(consume, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as consumer:
        options = ["--every", "10ms", "--count", "5", "--total", "20", "--servers", address]
        done = run("updates", *options)
        out, _ = consumer.communicate(timeout=60)
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["seq"] for line in out.splitlines()] == list(range(1, 21))


def test_results_dead_letters_and_internal_channels_are_refused(kafka: Kafka, fresh: Fresh) -> None:
    result, bookmarks = fresh("result"), f"penstock.{fresh('p')}.bookmarks"
    kafka.ensure([Topic(result), Topic(bookmarks, compacted=True), Topic(f"{result}.dead")])
    announce(kafka, bookmarks, "people", result, "a1b2c3d4", 0)
    for name in (result, f"{result}.dead", bookmarks):
        refused = CliRunner().invoke(whole, ["produce", "--topic", name, "--servers", kafka.servers], input="x\n")
        assert refused.exit_code == 2 or isinstance(refused.exception, Misconfigured), name
        updates = ["produce", "updates", "--topic", name, "--total", "1", "--servers", kafka.servers]
        assert CliRunner().invoke(whole, updates).exit_code != 0
    assert sum(end for _, end in kafka.bounds(result).values()) == 0


# --- a line into a record ---------------------------------------------------------------------------------------------


def test_a_line_is_all_value_where_no_separator_is_told() -> None:
    assert text_record(b"k:v\t") == Record(b"k:v\t")


def test_an_empty_line_is_an_empty_value() -> None:
    assert text_record(b"") == Record(b"")


def test_the_first_separator_parts_key_and_value() -> None:
    assert text_record(b"a:b:c", b":") == Record(b"b:c", None, b"a")
    assert text_record(b"a:::c", b"::") == Record(b":c", None, b"a")
    assert text_record(b":", b":") == Record(b"", None, b"")


def test_a_line_without_its_separator_is_refused_and_shown() -> None:
    with pytest.raises(Refused, match=r'"no\\x1bkey" .* ":"$'):
        text_record(b"no\x1bkey", b":")
    with pytest.raises(Refused, match=r'"x{60}…"'):
        text_record(b"x" * 100, b":")


def test_what_is_no_utf_8_passes_as_it_is() -> None:
    assert text_record(b"\xff\x00:\xfe", b":") == Record(b"\xfe", None, b"\xff\x00")


def test_a_separator_is_typed_as_it_looks() -> None:
    assert parse_separator("\\t") == b"\t"
    assert parse_separator(" : ") == b" : "
    assert parse_separator("\udcff") == b"\xff"
    with pytest.raises(Misconfigured, match="--key-separator"):
        parse_separator("")


def test_json_tells_key_value_and_headers() -> None:
    told = b'{"key": "k", "value": "v", "headers": {"a": "1"}}'
    assert json_record(told) == Record(b"v", None, b"k", (("a", b"1"),))


def test_headers_of_one_name_are_a_list_in_json() -> None:
    told = b'{"value": null, "headers": [{"name": "a", "value": "1"}, {"name": "a", "value": {"base64": "/w=="}}]}'
    assert json_record(told) == Record(None, None, None, (("a", b"1"), ("a", b"\xff")))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is not a JSON object"),
        (b"{}", '"value" is missing'),
        (b'{"vaule": "x"}', '"vaule" is not a field; did you mean "value"?'),
        (b'{"value": 1}', '"value" must be a text, null, or {"base64": "…"}'),
        (b'{"value": {"base64": "!"}}', '"value" is not base64'),
        (b'{"value": {"base64": "AA==", "more": 1}}', '"value" must be a text'),
        (b'{"value": "", "key": ["k"]}', '"key" must be a text'),
        (b'{"value": "", "headers": "a:1"}', '"headers" must be an object'),
        (b'{"value": "", "headers": [["a", "1"]]}', 'each of "headers" must be'),
        (b'{"value": "", "headers": {"a": 1}}', '"headers.a" must be a text'),
        (b'{"value": "\\ud800"}', "it is not JSON"),
    ],
)
def test_json_that_tells_no_record_is_refused_with_the_reason(line: bytes, reason: str) -> None:
    with pytest.raises(Refused) as found:
        json_record(line)
    assert reason in found.value.reason
