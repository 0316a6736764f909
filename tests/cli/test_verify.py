"""The verifier as a person calls it: in a process of its own where signals and pipes are meant."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from tests.channels.traffic import send
from tests.cli.standing import standing
from tests.ports import later_port
from typer.testing import CliRunner, Result

from penstock.audit.verify import Verifier
from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.cli.standard import print_parts
from penstock.cli.verify import report_parts, verify
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.testing import ManualClock

Fresh = Callable[[str], str]
PENSTOCK = [sys.executable, "-m", "penstock", "verify"]
EPOCH = 1_794_764_958_116_230


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, arguments)


def file(folder: Path, *seqs: int, sender: str = "sender1", name: str = "updates.jsonl") -> str:
    path = folder / name
    with path.open("a") as out:
        out.writelines(json.dumps({"seq": seq, "sender": sender, "time": 0}) + "\n" for seq in seqs)
    return str(path)


def table(result: Result, sender: str) -> list[str]:
    (row,) = [
        line.split() for line in result.stdout.splitlines() if line.split()[:1] == [sender] and "misses" not in line
    ]
    return row[1:]


def penstock(folder: Path, *arguments: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    called = [*PENSTOCK, *arguments]
    return subprocess.run(called, cwd=folder, input=given, capture_output=True, check=False, timeout=60)


@contextmanager
def started(*arguments: str, stdin: int | None = None) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([*PENSTOCK, *arguments], stdin=stdin, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def documents(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    return map(json.loads, process.stdout)


# --- files and pipes --------------------------------------------------------------------------------------------------


def test_a_whole_file_exits_with_0(tmp_path: Path) -> None:
    result = command(file(tmp_path, 1000, 1001, 1002))
    assert result.exit_code == 0
    assert "Complete: nothing is missing among 3 records of 1 sender." in result.stdout


def test_a_loss_exits_with_1_and_is_named(tmp_path: Path) -> None:
    result = command(file(tmp_path, 1000, 1003, 1001, 1001, 2000))
    assert result.exit_code == 1
    assert table(result, "sender1") == ["5", "1000", "2000", "997", "1", "1"]
    assert "sender1 misses 1002\nsender1 misses 1004–1999 (996 records)\n" in result.stdout
    assert "Incomplete: 997 records missing, 5 records of 1 sender arrived." in result.stdout


def test_what_cannot_be_read_exits_with_2_and_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, 1, 2)
    with Path(path).open("ab") as out:
        out.write(b"nonsense\n" * 30)
    result = command(path)
    assert result.exit_code == 2
    assert "line 3 cannot be read: it is not JSON" in result.stdout
    assert "and 10 more cannot be read" in result.stdout
    assert "Uncertain: nothing is missing among 2 records" in result.stdout


def test_a_loss_beside_what_cannot_be_read_exits_with_1(tmp_path: Path) -> None:
    path = file(tmp_path, 1, 3)
    with Path(path).open("ab") as out:
        out.write(b"nonsense\n")
    result = command(path)
    assert result.exit_code == 1
    assert "they may be among what cannot be read" in result.stdout


def test_an_empty_file_is_not_whole(tmp_path: Path) -> None:
    result = command(file(tmp_path))
    assert result.exit_code == 2
    assert "Nothing to verify" in result.stdout


def test_a_lost_beginning_is_found_when_the_first_number_is_told(tmp_path: Path) -> None:
    path = file(tmp_path, 1003, 1004)
    assert command(path).exit_code == 0
    result = command(path, "--first", "1000")
    assert result.exit_code == 1
    assert "sender1 misses 1000–1002 (3 records)" in result.stdout


def test_fields_have_the_names_that_are_told(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    path.write_text('{"feed": {"n": 1, "who": "a", "life": 7}}\n{"feed": {"n": 3, "who": "a", "life": 7}}\n')
    result = command(str(path), "--seq", "feed.n", "--sender", "feed.who", "--epoch", "feed.life", "--time", "")
    assert result.exit_code == 1
    assert "a/7 misses 2" in result.stdout
    assert command(str(path), "--seq", "feed.n", "--sender", "").exit_code == 1


def test_names_from_outside_cannot_move_the_cursor(tmp_path: Path) -> None:
    result = command(file(tmp_path, 1, 3, sender="a\x1b[2J\nb[bold]"))
    assert "a\\x1b[2J\\nb[bold] misses 2" in result.stdout
    assert "\x1b" not in result.stdout


def test_of_many_senders_those_with_findings_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    for number in range(30):
        path = file(tmp_path, 1, 2, sender=f"good{number}")
    for number in range(25):
        file(tmp_path, 1, number + 3, sender=f"bad{number}")
    result = command(path)
    assert result.exit_code == 1
    assert table(result, "bad24") == ["2", "1", "27", "25", "0", "0"]
    assert "good" not in result.stdout
    assert "bad4 " not in result.stdout.split("misses")[0]
    assert (
        "and 5 more senders with missing, repeated or reordered numbers\n30 senders are complete and in order\n"
        in result.stdout
    )
    assert result.stdout.count(" misses ") == 20
    assert "and 5 more ranges; --json lists all" in result.stdout


def test_many_senders_that_are_all_whole_need_no_table(tmp_path: Path) -> None:
    for number in range(30):
        path = file(tmp_path, 1, 2, sender=f"good{number}")
    said = command(path).stdout.splitlines()
    assert said[0] == "30 senders are complete and in order"
    assert said[-1] == "Complete: nothing is missing among 60 records of 30 senders."


def test_json_is_all_that_is_printed_and_the_last_document_is_final(tmp_path: Path) -> None:
    result = command(file(tmp_path, 1, 3), "--json")
    (told,) = map(json.loads, result.stdout.splitlines())
    assert (told["final"], told["verdict"], result.exit_code) == (True, "loss", 1)
    assert told["gaps"] == [{"sender": "sender1", "epoch": 0, "first": 2, "last": 2}]


def test_standard_input_is_read_to_its_end(tmp_path: Path) -> None:
    found = penstock(tmp_path, "-", "--json", given=Path(file(tmp_path, 5, 4, 6)).read_bytes())
    assert found.returncode == 0
    assert json.loads(found.stdout)["out_of_order"] == 1


def test_a_report_that_cannot_be_written_has_no_verdict(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        called = [*PENSTOCK, file(tmp_path, 1, 3)]
        found = subprocess.run(called, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert found.returncode not in (0, 1)
    assert b"penstock: standard output is unavailable: No space left on device\n" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pipe_is_reported_on_while_it_is_open_and_a_signal_brings_the_verdict(number: signal.Signals) -> None:
    with started("-", "--json", "--every", "100 ms", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        reports = documents(process)
        process.stdin.write('{"seq": 1, "sender": "a"}\n{"seq": 3, "sender": "a"}\n')
        process.stdin.flush()
        opened = next(report for report in reports if report["lapse"]["records"])
        assert (opened["final"], opened["missing"], opened["gaps"][0]["first"]) == (False, 1, 2)
        process.stdin.write('{"seq": 2, "sender": "a"}\n')
        process.stdin.flush()
        assert next(report for report in reports if report["lapse"]["records"])["missing"] == 0
        process.send_signal(number)
        *_, last = reports
        assert (last["final"], last["verdict"], last["records"]) == (True, "whole", 3)
        assert process.wait(30) == 0


def test_what_keeps_nothing_is_followed() -> None:
    """Over tcp, all is still to come: an end of now would be the beginning."""
    channels = bind(f"tcp://127.0.0.1:{later_port()}")
    with started("updates", "--servers", channels.where, "--json", "--every", "100 ms") as process:
        reports = documents(process)
        send(channels, "updates", numbered(1, 2, 3))
        next(report for report in reports if report["records"] == 3)
        process.send_signal(signal.SIGINT)
        *_, last = reports
        assert (last["final"], last["verdict"]) == (True, "whole")
        assert process.wait(30) == 0


def test_a_lapse_is_told_in_a_line(tmp_path: Path) -> None:
    with started("-", "--every", "100 ms", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('nonsense\n{"seq": 1, "sender": "a"}\n{"seq": 3, "sender": "a"}\n')
        process.stdin.flush()
        told = next(line for line in process.stdout if "2 records in " in line)
        assert " UTC: 2 records in 0." in told
        assert "; 1 missing; 1 cannot be read" in told
        assert process.stdout.readline() == "a misses 2\n"


@pytest.mark.parametrize(
    ("arguments", "location"),
    [
        (["./absent"], "./absent"),
        (["absent.jsonl"], "absent.jsonl"),
        (["."], "."),
        (["updates"], "channel updates"),
        (["-", "--every", "soon"], "--every"),
        (["-", "--seq", ""], "--seq"),
        (["./some", "--follow"], "--follow"),
    ],
)
def test_what_cannot_be_verified_is_rejected_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = command(*arguments)
    assert isinstance(found.exception, Misconfigured)
    assert found.exception.location == location
    assert found.exception.fix
    assert not found.stdout


# --- channels ---------------------------------------------------------------------------------------------------------


def numbered(*seqs: int) -> list[Record]:
    return [Record(b"{}", Origin("a", 1, seq, 0), b"%d" % seq) for seq in seqs]


def test_a_channel_with_a_gap_disorder_and_a_double_is_told_apart(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("verified")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(1000, 1003, 1001, 1001))
    send(kafka, channel, [Record(b'{"seq": 1004, "sender": "a", "epoch": 1}'), Record(b'{"seq": 7, "sender": "b"}')])
    result = command(channel, "--servers", kafka.servers, "--grace", "0s")
    assert result.exit_code == 1
    assert table(result, "a") == ["1", "5", "1000", "1004", "1", "1", "1"]
    assert "a/1 misses 1002\n" in result.stdout
    send(kafka, channel, numbered(1002))
    assert command(channel, "--servers", kafka.servers).exit_code == 0


def test_the_channels_of_the_pipeline_that_runs_here_are_found(tmp_path: Path, kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("found")
    kafka.ensure([Topic(channel, partitions=3)])
    send(kafka, channel, numbered(*range(1, 3_001)))
    with standing(tmp_path, kafka.servers):
        result = command(channel, "--folder", str(tmp_path), "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["records"], told["missing"]) == (0, 3_000, 0)


def test_an_empty_channel_is_not_whole_and_an_absent_one_is_told(kafka: Kafka, fresh: Fresh, tmp_path: Path) -> None:
    channel = fresh("empty")
    kafka.ensure([Topic(channel)])
    assert command(channel, "--servers", kafka.servers).exit_code == 2
    found = penstock(tmp_path, "absent", "--servers", kafka.servers)
    assert found.returncode == 2
    assert found.stderr.decode().startswith("penstock: channel absent: ")
    assert "Unknown topic" in found.stderr.decode()


def test_a_channel_is_followed_until_a_signal_brings_the_verdict(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("followed")
    kafka.ensure([Topic(channel, partitions=2)])
    send(kafka, channel, numbered(1, 2))
    options = ("--servers", kafka.servers, "--follow", "--json", "--every", "100 ms", "--grace", "0s")
    with started(channel, *options) as process:
        reports = documents(process)
        assert next(report for report in reports if report["records"] == 2)["verdict"] == "whole"
        send(kafka, channel, numbered(3, 5))
        assert next(report for report in reports if report["records"] == 4)["verdict"] == "loss"
        process.send_signal(signal.SIGTERM)
        *_, last = reports
        assert (last["final"], last["gaps"]) == (True, [{"sender": "a", "epoch": 1, "first": 4, "last": 4}])
        assert process.wait(30) == 1


# --- reports as text --------------------------------------------------------------------------------------------------


def shown(sender: str, last: int, width: int) -> list[str]:
    verifier = Verifier(ManualClock())
    for seq in (last - 1, last):
        verifier.take(Origin(sender, EPOCH, seq, 0), None)
    screen = Console(file=StringIO(), width=width)
    print_parts(report_parts(verifier.end()), screen)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize("sender", ["sender", "a.rather.long.name"])
def test_names_and_numbers_are_whole_on_a_narrow_terminal(sender: str) -> None:
    told = shown(sender, 12_345, 80)
    row = next(at for at, line in enumerate(told) if str(EPOCH) in line)
    assert told[row].split()[1:] == [str(EPOCH), "2", "12344", "12345", "0", "0", "0"]
    # A long name goes on in the line below.
    assert "".join(line.split()[0] for line in told[row : row + 2] if line.strip()) == sender
    assert all(len(line) <= 80 for line in told[: row + 2])


def test_a_table_that_does_not_fit_at_all_is_wider_than_the_terminal() -> None:
    (row,) = [line.split() for line in shown("sender", 12_345, 40) if str(EPOCH) in line]
    assert row == ["sender", str(EPOCH), "2", "12344", "12345", "0", "0", "0"]
