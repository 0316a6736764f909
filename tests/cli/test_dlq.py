"""The command over a real broker."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from tests.channels.traffic import send
from tests.cli.standing import standing
from typer.testing import CliRunner, Result

from penstock.channels.kafka import Kafka
from penstock.cli.dlq import app, letter_lines, redrive_lines
from penstock.core.contracts import Entry, Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Headers, Origin, Record
from penstock.operate.dead_letters import Letter, Outcome, Verdict

Fresh = Callable[[str], str]
NOW = time.time_ns() // 1_000
HOSTILE = "it is \x1b[31mred\x9b2J\r\n‮"


@pytest.fixture
def channel(kafka: Kafka, fresh: Fresh) -> str:
    name = fresh("letters")
    kafka.ensure([Topic(name, 2), Topic(f"{name}.dead")])
    return name


def held(kafka: Kafka, channel: str) -> list[Entry]:
    ends = {partition: end for partition, (_, end) in kafka.bounds(channel).items()}
    found: list[Entry] = []
    with kafka.reader({channel: {}}) as reader:
        while any(reader.positions(channel)[partition] < end for partition, end in ends.items()):
            found += reader.read(1_000, 1)
    return found


def letter(
    seq: int | None,
    value: bytes | None = b"{",
    reason: str = "it is not JSON",
    sender: str = "kiosk 7",
    own: Headers = (),
) -> Record:
    origin = Origin(sender, 1, seq, NOW) if seq is not None else None
    extra = (*own, ("reason", reason.encode()), ("place", b"rsvps:1:%d" % (seq or 0)))
    return Record(value, origin, b"k", extra)


def run(kafka: Kafka, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--servers", kafka.servers])


def rows(result: Result) -> list[list[str]]:
    lines = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line[1:-1]] for line in lines]


def misconfigured(result: Result) -> Misconfigured:
    assert isinstance(result.exception, Misconfigured), result.output
    return result.exception


# --- list -------------------------------------------------------------------------------------------------------------


def test_reasons_are_counted_per_channel(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(2), letter(3, reason='the field "guests" is missing')])
    (often, once) = rows(run(kafka, "list", channel))
    assert (often[0], often[1], often[-1]) == (f"{channel}.dead", "2", "it is not JSON")
    assert (once[1], once[-1]) == ("1", 'the field "guests" is missing')
    assert [f"{channel}.dead", "2"] in [row[:2] for row in rows(run(kafka, "list"))]


def test_a_channel_without_letters_is_listed_with_none(kafka: Kafka, channel: str) -> None:
    assert rows(run(kafka, "list", f"{channel}.dead")) == [[f"{channel}.dead", "0", "", "", "", ""]]


def test_each_letter_is_listed_the_newest_last(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(seq, b"x" * seq) for seq in range(1, 6)])
    result = run(kafka, "list", channel, "--each", "--limit", "2")
    first, last = rows(result)
    assert first[0].endswith(".dead:0:3")
    assert (last[0], *last[2:]) == (f"{channel}.dead:0:4", "kiosk 7/1: 5", "5", "rsvps:1:5", "it is not JSON")
    assert "the newest of 5 dead letters; --limit 5 shows all" in result.stdout


def test_more_reasons_than_asked_for_are_counted(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(seq, reason=f"reason {seq}") for seq in range(3)])
    result = run(kafka, "list", channel, "--limit", "2")
    assert len(rows(result)) == 2
    assert "and 1 more; --limit 3 shows all" in result.stdout


def test_a_list_for_programs_is_json(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(2, own=(("redriven", b"1"),)), letter(None, None, HOSTILE)])
    (told,) = json.loads(run(kafka, "list", channel, "--json", "--reason", "json").stdout)["channels"]
    (reason,) = told["reasons"]
    assert (told["channel"], told["letters"], reason["count"], reason["came_back"]) == (f"{channel}.dead", 2, 2, 1)
    assert reason["first"] <= reason["last"]
    result = run(kafka, "list", channel, "--each", "--json")
    assert result.stdout.isascii()
    each = json.loads(result.stdout)
    assert each["matching"] == 3
    one, two, three = each["letters"]
    assert (one["sender"], one["epoch"], one["seq"], one["place"]) == ("kiosk 7", 1, 1, "rsvps:1:1")
    assert two["came_back"] is True
    assert (three["sender"], three["size"], three["reason"]) == (None, 0, HOSTILE)


def test_the_old_and_those_of_others_are_left_out(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(2, sender="phone")])
    (row,) = rows(run(kafka, "list", channel, "--each", "--since", "10m", "--sender", "phone"))
    assert row[2] == "phone/1: 2"
    assert rows(run(kafka, "list", channel, "--each", "--since", "0s")) == []


@pytest.mark.parametrize("options", [["list"], ["list", "--each"]])
def test_what_would_move_the_cursor_is_spelled_out(kafka: Kafka, channel: str, options: list[str]) -> None:
    send(kafka, f"{channel}.dead", [letter(1, reason=HOSTILE, sender="a\x1b[2Jb")])
    for output in (run(kafka, *options, channel).stdout, run(kafka, "show", channel, "0:0").stdout):
        assert r"it is \x1b[31mred\x9b2J\r\n\u202e" in output
        assert not [char for char in output if not char.isprintable() and char != "\n"]


# --- show -------------------------------------------------------------------------------------------------------------


def test_a_letter_is_shown_with_all_that_is_known(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(41, '{"né":\n\x1b[1m'.encode(), own=(("trace", b"\xff"),))])
    lines = run(kafka, "show", channel, "0:1").stdout.splitlines()
    assert lines[:2] == [f"at:       {channel}.dead:0:1", "reason:   it is not JSON"]
    assert "record:   rsvps:1:41" in lines
    assert any(line.startswith("origin:   kiosk 7/1: 41, sent 20") for line in lines)
    assert r"  trace: \xff" in lines
    assert lines[-3:] == ["value:    12 bytes", '  {"né":', r"  \x1b[1m"]
    assert run(kafka, "show", channel, "rsvps:1:41").stdout.splitlines() == lines


def test_what_is_no_text_is_shown_in_hex(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1, b"\xff\x00A" * 6)])
    assert run(kafka, "show", channel, "0:0").stdout.splitlines()[-2:] == [
        "  00000000  ff 00 41 ff 00 41 ff 00 41 ff 00 41 ff 00 41 ff  ..A..A..A..A..A.",
        "  00000010  00 41                                            .A",
    ]


def test_a_large_value_is_cut_and_raw_is_all_of_it(kafka: Kafka, channel: str) -> None:
    value = "é".encode() * 5_000
    send(kafka, f"{channel}.dead", [letter(1, b"." + value), letter(2, b"\xff\r\n\x00")])
    lines = run(kafka, "show", channel, "0:0").stdout.splitlines()
    assert lines[-2:] == ["  ." + "é" * 2047, "these are the first 4,096 bytes; --raw writes all"]
    assert run(kafka, "show", channel, "0:0", "--raw").stdout_bytes == b"." + value
    assert run(kafka, "show", channel, "0:1", "--raw").stdout_bytes == b"\xff\r\n\x00"


def test_a_null_is_shown_as_such(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1, None, "the value is null"), Record(None)])
    assert run(kafka, "show", channel, "0:0").stdout.splitlines()[-1] == "value:    null"
    lines = run(kafka, "show", channel, "0:1").stdout.splitlines()
    assert {"key:      none", "value:    null", "origin:   no identity"} <= set(lines)
    assert run(kafka, "show", channel, "0:1", "--raw").stdout_bytes == b""


def test_a_letter_for_programs_is_json(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1, b"\xff")])
    told = json.loads(run(kafka, "show", channel, "0:0", "--json").stdout)
    assert (told["offset"], told["seq"], base64.b64decode(told["value"])) == (0, 1, b"\xff")
    assert told["headers"][0] == {"name": "sender", "value": base64.b64encode(b"kiosk 7").decode()}


# --- redrive ----------------------------------------------------------------------------------------------------------


def test_what_is_redriven_lies_in_the_channel_with_its_identity_once(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(None, b"nameless"), letter(2)])
    dry = run(kafka, "redrive", channel, "--all", "--dry-run")
    assert dry.exit_code == 0
    assert f"{channel}.dead:0:1 (no identity) would be sent" in dry.stdout
    assert dry.stdout.endswith(f"{channel}: 3 would be sent, 0 skipped\n")
    assert not held(kafka, channel)
    first = run(kafka, "redrive", channel, "--all")
    assert (first.exit_code, first.stdout) == (0, f"{channel}: 3 sent, 0 skipped\n")
    second = run(kafka, "redrive", channel, "--all")
    assert (second.exit_code, second.stdout) == (0, f"{channel}: 0 sent, 3 skipped: 3 redriven before\n")
    one, nameless, two = held(kafka, channel)
    assert [Origin.of(entry.headers) for entry in (one, two)] == [Origin("kiosk 7", 1, seq, NOW) for seq in (1, 2)]
    assert (nameless.key, nameless.value) == (b"k", b"nameless")
    assert list(nameless.headers) == [("redriven", b"1"), ("from", f"{channel}.dead:0:1".encode())]


def test_what_came_back_is_told_and_exits_with_1(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(2, own=(("redriven", b"1"), ("from", b"x.dead:0:0")))])
    result = run(kafka, "redrive", channel, "--sender", "kiosk 7")
    assert result.exit_code == 1
    first, last = result.stdout.splitlines()
    assert first.startswith(f"{channel}.dead:0:1 (kiosk 7/1: 2) is not sent: ")
    assert last == f"{channel}: 1 sent, 1 skipped: 1 rejected again"


def test_letters_are_redriven_by_place_into_another_channel(kafka: Kafka, channel: str, fresh: Fresh) -> None:
    other = fresh("other")
    kafka.ensure([Topic(other)])
    send(kafka, f"{channel}.dead", [letter(seq) for seq in range(1, 5)])
    result = run(kafka, "redrive", channel, "0:3", "rsvps:1:2", "--into", other, "--json")
    told = json.loads(result.stdout)
    assert (told["into"], told["dry_run"], told["counts"]["sent"]) == (other, False, 2)
    assert [(one["origin"]["seq"], one["verdict"]) for one in told["letters"]] == [(2, "sent"), (4, "sent")]
    assert [origin.seq for entry in held(kafka, other) if (origin := Origin.of(entry.headers))] == [2, 4]
    assert not held(kafka, channel)


def test_an_aborted_transaction_at_the_end_of_the_channel_is_no_obstacle(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(2)])
    send(kafka, channel, [Record(b"{", Origin("kiosk 7", 1, 1, NOW), extra=(("redriven", b"1"),))])
    conf: dict[str, str | int | float | bool] = {"bootstrap.servers": kafka.servers, "transactional.id": channel}
    producer = Producer(conf)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(channel, b"gone", partition=0)
    producer.flush(10)
    producer.abort_transaction(30)
    result = run(kafka, "redrive", channel, "--all")
    assert result.stdout == f"{channel}: 1 sent, 1 skipped: 1 redriven before\n"


# --- what is asked wrongly --------------------------------------------------------------------------------------------


def test_without_a_selection_nothing_is_redriven(kafka: Kafka, channel: str) -> None:
    for arguments in ((), ("0:1", "--all")):
        assert misconfigured(run(kafka, "redrive", channel, *arguments)).location == "dlq redrive"


def test_a_misspelled_channel_is_answered_with_the_right_one(kafka: Kafka, channel: str) -> None:
    misspelled = channel.replace("letters", "leters")
    for command in (["list"], ["show", "0:0"], ["redrive", "--all"]):
        error = misconfigured(run(kafka, command[0], misspelled, *command[1:]))
        assert error.location == f"channel {misspelled}.dead"
        assert error.fix.startswith('did you mean "letters-')


@pytest.mark.parametrize("location", ["", "17", "0:", ":1", "0:x", "a b:0:1", "0:٣", "0:" + "9" * 30, "../0:1\n"])
def test_what_is_no_place_is_told(kafka: Kafka, channel: str, location: str) -> None:
    for command in ("show", "redrive"):
        assert "PARTITION:OFFSET" in misconfigured(run(kafka, command, channel, location)).fix


def test_an_offset_beyond_the_end_is_told_with_what_is_there(kafka: Kafka, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1), letter(2)])
    for command in (("show", channel, "0:2"), ("redrive", channel, "0:0", "0:2")):
        error = misconfigured(run(kafka, *command))
        assert error.location == f"channel {channel}.dead"
        assert "0:0 to 0:1" in error.fix
    assert not held(kafka, channel)


def test_into_dead_letters_and_into_the_pipelines_own_channels_nothing_is_redriven(kafka: Kafka, channel: str) -> None:
    kafka.ensure([Topic("penstock.test.heartbeats")])
    for into in (f"{channel}.dead", "penstock.test.heartbeats"):
        assert misconfigured(run(kafka, "redrive", channel, "--all", "--into", into)).location == f"channel {into}"


def test_a_time_that_is_none_is_told(kafka: Kafka, channel: str) -> None:
    assert misconfigured(run(kafka, "list", channel, "--since", "soon")).location == "--since"


def test_raw_and_json_exclude_each_other(kafka: Kafka, channel: str) -> None:
    assert misconfigured(run(kafka, "show", channel, "0:0", "--raw", "--json")).location == "--raw, --json"


# --- where the channels are -------------------------------------------------------------------------------------------


@pytest.fixture
def running(kafka: Kafka, tmp_path: Path) -> Iterator[Path]:
    """A folder that a run holds, as far as other commands can see."""
    with standing(tmp_path, kafka.servers) as folder:
        yield folder


def test_the_run_in_the_folder_tells_where(kafka: Kafka, running: Path, channel: str) -> None:
    send(kafka, f"{channel}.dead", [letter(1)])
    result = CliRunner().invoke(app, ["redrive", channel, "--all", "--folder", str(running)])
    assert (result.exit_code, result.stdout) == (0, f"{channel}: 1 sent, 0 skipped\n")


def test_so_do_the_settings(kafka: Kafka, tmp_path: Path, channel: str) -> None:
    (tmp_path / "penstock.toml").write_text(f'[channels]\naddress = "{kafka.where}"\n')
    result = CliRunner().invoke(app, ["list", channel, "--folder", str(tmp_path)])
    assert rows(result)[0][0] == f"{channel}.dead"


def test_where_nothing_runs_it_exits_with_2_and_a_sentence(tmp_path: Path) -> None:
    assert misconfigured(CliRunner().invoke(app, ["list", "--folder", str(tmp_path)])).location == str(tmp_path)


# --- dead letters as text ---------------------------------------------------------------------------------------------


def shown(value: bytes | None, headers: Headers = (), appended: int = 0, key: bytes | None = None) -> list[str]:
    return list(letter_lines(Letter.of(Entry("rsvps.dead", 0, 17, appended, key, value, headers))))


@pytest.mark.parametrize(
    ("micros", "told"),
    [
        (-1_000, "unknown time"),
        (0, "unknown time"),
        (253_402_300_799_000_000, "9999-12-31 23:59:59"),
        (2**63 - 1, "9223372036854775807 µs"),
    ],
)
def test_any_time_can_be_told(micros: int, told: str) -> None:
    lines = shown(b"", Origin("a", 1, 1, micros).headers(), micros)
    assert lines[2].startswith(f"rejected: {told}")
    assert told in lines[4]


def test_an_empty_value_has_no_lines() -> None:
    assert shown(b"")[-1] == "value:    0 bytes"


def test_what_was_cut_at_intake_is_told() -> None:
    assert "value:    70,000 bytes, of which 3 are stored" in shown(b"abc", [("size", b"70000")])


def test_a_letter_that_came_back_says_so() -> None:
    assert "redriven: once, and rejected again" in shown(b"", [("redriven", b"1")])


def test_a_large_key_and_a_large_header_are_cut() -> None:
    lines = shown(b"", [("h", b"x" * 10_000)], key=b"\xff" + b"k" * 10_000)
    assert r"key:      \xffkkk" in lines[5][:20]
    assert lines[5].endswith("k … (10,001 bytes)")
    assert all(len(line) < 4_200 for line in lines)


def test_many_are_named_up_to_a_limit_and_all_are_counted() -> None:
    outcomes = [Outcome(f"rsvps.dead:0:{n}", None, Verdict.BACK, "it is \x1b[31mred") for n in range(1_060)]
    lines = list(redrive_lines("rsvps", False, [*outcomes, Outcome("rsvps.dead:0:1060", None, Verdict.SENT)]))
    assert lines[0] == r"rsvps.dead:0:0 (no identity) is not sent: it is \x1b[31mred"
    assert lines[50:] == [
        "and 1,010 more; --json lists all",
        "rsvps: 1 sent, 1,060 skipped: 1,060 rejected again",
    ]


def test_every_kind_of_skipping_has_its_words() -> None:
    *_, last = redrive_lines("rsvps", True, [Outcome("rsvps.dead:0:1", None, verdict, "why") for verdict in Verdict])
    assert last == (
        "rsvps: 1 would be sent, "
        "6 skipped: 1 redriven before, 1 rejected again, 1 too late for a query, "
        "1 excluded by a query that fails with it, 1 stored only in part, "
        "1 rejected by the channel"
    )
