import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import typer
from tests.cli.standing import standing
from typer.testing import CliRunner, Result

from penstock.audit.auditor import Auditor
from penstock.audit.findings import Kind, Watched
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.cli.audit import audit
from penstock.clock import Clock, SystemClock
from penstock.contracts import Topic
from penstock.pipeline.wiring import Wiring
from penstock.record import Origin, Record
from penstock.testing.channels import MemoryChannels
from penstock.testing.clock import ManualClock

NOTES = "penstock.test.heartbeats"
Fresh = Callable[[str], str]


def audited(folder: Path, *seqs: int, blind: bool = False, clock: Clock | None = None) -> None:
    channels = MemoryChannels()
    for seq in seqs:
        channels.append("rsvps", b"{}", None, Origin("a", 1, seq, 0).headers())
    if blind:
        channels.append(NOTES, json.dumps({"kind": "blind", "source": "feed", "since": 0, "until": 5_000_000}).encode())
    ledger = Ledger(Wiring.read(folder).ledger)
    auditor = Auditor(channels, ledger, [Watched("rsvps", Kind.SOURCE)], NOTES, clock)
    while auditor.step(0):
        pass
    auditor.close()
    ledger.close()


def sent(kafka: Kafka, channel: str, notes: str, *seqs: int) -> None:
    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, [Record(b"{}", Origin("a", 1, seq, 0)) for seq in seqs])

    kafka.ensure([Topic(channel), Topic(notes)])
    asyncio.run(send())


def command(folder: Path, *options: str) -> Result:
    app = typer.Typer()
    app.command()(audit)
    return CliRunner().invoke(app, ["--folder", str(folder), *options])


def test_a_whole_balance_exits_with_0(tmp_path: Path) -> None:
    audited(tmp_path, 1000, 1001, 1002)
    result = command(tmp_path)
    assert result.exit_code == 0
    assert "Whole: nothing is missing." in result.stdout


def test_something_missing_exits_with_1_and_is_named(tmp_path: Path) -> None:
    audited(tmp_path, 1000, 1001, 1003)
    result = command(tmp_path, "--grace", "0")
    assert result.exit_code == 1
    assert "rsvps misses a/1: 1002" in result.stdout


def test_a_gap_that_has_just_opened_is_in_flight(tmp_path: Path) -> None:
    audited(tmp_path, 1000, 1001, 1003)
    assert command(tmp_path).exit_code == 0
    assert command(tmp_path, "--strict").exit_code == 1


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2, 4)
    result = command(tmp_path, "--json", "--grace", "0")
    told = json.loads(result.stdout)
    assert told["whole"] is False
    assert told["channels"][0]["gaps"] == [{"sender": "a", "epoch": 1, "first": 3, "last": 3}]


def test_every_sender_is_shown_when_asked_for(tmp_path: Path) -> None:
    audited(tmp_path, 1000, 1001, 1001)
    (line,) = [line.split() for line in command(tmp_path, "--senders").stdout.splitlines() if " a " in line]
    assert line[:9] == ["rsvps", "a", "1", "1000", "1001", "3", "0", "1", "0"]


def test_an_unknown_time_is_shown_and_fails_only_the_strict(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2, blind=True)
    assert command(tmp_path).exit_code == 0
    assert "unknown" in command(tmp_path).stdout
    assert command(tmp_path, "--strict").exit_code == 1


def test_a_ledger_that_nobody_keeps_tells_its_age(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2, clock=ManualClock(1_700_000_000_000_000))
    assert "Whole: nothing is missing, as of 2023-11-14 22:13:20 UTC." in command(tmp_path).stdout
    assert json.loads(command(tmp_path, "--json").stdout)["as_of"] == 1_700_000_000_000_000


def test_without_a_ledger_it_exits_with_2_and_tells_the_way_out(tmp_path: Path) -> None:
    called = [sys.executable, "-m", "penstock", "audit", "--folder", str(tmp_path)]
    result = subprocess.run(called, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("penstock: ")
    assert "there is no ledger; start the pipeline once" in result.stderr
    assert not result.stdout


def test_what_a_running_audit_has_not_read_is_told_and_fails_the_strict(
    tmp_path: Path, kafka: Kafka, fresh: Fresh
) -> None:
    channel = fresh("rsvps")
    sent(kafka, channel, fresh("notes"), 1, 2, 3)
    with closing(Ledger(Wiring.read(tmp_path).ledger)) as ledger:
        ledger.watch([Watched(channel, Kind.SOURCE)])
    with standing(tmp_path, kafka.servers):
        result = command(tmp_path, "--wait", "0")
        strict = command(tmp_path, "--wait", "0", "--strict", "--json")
    assert result.exit_code == 0
    assert f"{channel}: 3 records are not read yet" in result.stdout
    assert "3 records are in flight" in result.stdout
    assert strict.exit_code == 1
    (source,) = json.loads(strict.stdout)["channels"]
    assert (source["unread"], source["in_flight"]) == (3, 3)


def test_it_waits_until_a_running_audit_has_read_what_was_there(tmp_path: Path, kafka: Kafka, fresh: Fresh) -> None:
    channel, notes = fresh("rsvps"), fresh("notes")
    sent(kafka, channel, notes, 1, 2, 3)
    ledger, stop = Ledger(Wiring.read(tmp_path).ledger), threading.Event()
    watched = [Watched(channel, Kind.SOURCE)]
    ledger.watch(watched)
    auditing = threading.Thread(target=Auditor(kafka, ledger, watched, notes).run, args=(stop,))
    called = SystemClock().now()
    with standing(tmp_path, kafka.servers):
        auditing.start()
        result = command(tmp_path, "--strict", "--json", "--wait", "60")
        stop.set()
        auditing.join()
    ledger.close()
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["as_of"] >= called
    assert (told["channels"][0]["distinct"], told["channels"][0]["unread"]) == (3, 0)


def test_what_was_read_long_ago_is_no_old_news_while_the_channel_holds_no_more(
    tmp_path: Path, kafka: Kafka, fresh: Fresh
) -> None:
    channel, notes = fresh("rsvps"), fresh("notes")
    sent(kafka, channel, notes, 1, 2, 3)
    with closing(Ledger(Wiring.read(tmp_path).ledger)) as ledger:
        auditor = Auditor(kafka, ledger, [Watched(channel, Kind.SOURCE)], notes, ManualClock(1_700_000_000_000_000))
        while sum(ledger.unread({channel: kafka.bounds(channel)}).values()):
            auditor.step(1)
        auditor.close()
    assert "as of 2023" in command(tmp_path).stdout
    with standing(tmp_path, kafka.servers):
        assert "Whole: nothing is missing." in command(tmp_path).stdout


def test_when_the_channels_do_not_answer_the_ledger_does_and_the_strict_fails(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    # A Redis that is not there says so at once; a client of Kafka would wait for it.
    with standing(tmp_path, "127.0.0.1:1", "redis://127.0.0.1:1/0"):
        result, strict = command(tmp_path), command(tmp_path, "--strict")
    assert "Whole: nothing is missing." in result.stdout
    assert "Redis at 127.0.0.1:1 is unavailable" in result.stderr
    assert (result.exit_code, strict.exit_code) == (0, 1)
