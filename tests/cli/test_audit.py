import asyncio
import json
import random
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import typer
from confluent_kafka import Producer
from tests.cli.standing import standing
from tests.damaging import Damage, deleted, emptied, overwritten, truncated
from tests.run.test_spools import leave
from typer.testing import CliRunner, Result

from penstock.audit.auditor import Auditor
from penstock.audit.findings import Kind, Watched
from penstock.audit.judge import Discrepancy, Doubt, Report
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.cli.audit import audit
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.pipeline.config import Config
from penstock.testing import ManualClock, MemoryChannels

NOTES = "penstock.test.heartbeats"
Fresh = Callable[[str], str]


def audited(folder: Path, *seqs: int, blind: bool = False, clock: Clock | None = None) -> None:
    channels = MemoryChannels()
    for seq in seqs:
        channels.append("rsvps", b"{}", None, Origin("a", 1, seq, 0).headers())
    if blind:
        channels.append(NOTES, json.dumps({"kind": "blind", "source": "feed", "since": 0, "until": 5_000_000}).encode())
    ledger = Ledger(Config.read(folder).ledger)
    auditor = Auditor(channels, ledger, [Watched("rsvps", Kind.SOURCE)], NOTES, clock)
    while auditor.step(0):
        pass
    auditor.close()
    ledger.report(Report((clock or SystemClock()).now(), closed=True))
    ledger.close()


def sent(kafka: Kafka, channel: str, notes: str, *seqs: int) -> None:
    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, [Record(b"{}", Origin("a", 1, seq, 0)) for seq in seqs])

    kafka.ensure([Topic(channel), Topic(notes)])
    asyncio.run(send())


def read_all(
    folder: Path, kafka: Kafka, channel: str, notes: str, clock: Clock | None = None, *, closed: bool = False
) -> None:
    """An auditor reads the channel to its end, and reports."""
    with closing(Ledger(Config.read(folder).ledger)) as ledger:
        auditor = Auditor(kafka, ledger, [Watched(channel, Kind.SOURCE)], notes, clock)
        while sum(ledger.unread({channel: kafka.bounds(channel)}).values()):
            auditor.step(1)
        auditor.close()
        ledger.report(Report(SystemClock().now(), closed=closed))


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


def test_without_a_ledger_it_exits_with_2_and_tells_the_fix(tmp_path: Path) -> None:
    result = command(tmp_path)
    assert isinstance(result.exception, Misconfigured)
    assert "start the pipeline" in result.exception.fix
    assert not result.stdout


def test_what_a_running_audit_has_not_read_is_in_flight(tmp_path: Path, kafka: Kafka, fresh: Fresh) -> None:
    channel, notes = fresh("rsvps"), fresh("notes")
    sent(kafka, channel, notes, 1, 2, 3)
    read_all(tmp_path, kafka, channel, notes)
    sent(kafka, channel, notes, 4, 5)
    with standing(tmp_path, kafka.servers):
        result = command(tmp_path, "--wait", "0")
        strict = command(tmp_path, "--wait", "0", "--strict", "--json")
        waited = json.loads(command(tmp_path, "--wait", "0.1", "--json").stdout)
    assert result.exit_code == 0
    assert strict.exit_code == 1
    (source,) = json.loads(strict.stdout)["channels"]
    assert (source["unread"], source["in_flight"]) == (2, 2)
    # Nobody reads it: after a while that is a doubt.
    assert (waited["verdict"], [doubt["kind"] for doubt in waited["doubts"]]) == ("not known", ["audit"])


def test_it_waits_until_a_running_audit_has_read_what_was_there(tmp_path: Path, kafka: Kafka, fresh: Fresh) -> None:
    channel, notes = fresh("rsvps"), fresh("notes")
    sent(kafka, channel, notes, 1, 2, 3)
    ledger, stop = Ledger(Config.read(tmp_path).ledger), threading.Event()
    watched = [Watched(channel, Kind.SOURCE)]
    ledger.watch(watched)
    ledger.report(Report(SystemClock().now()))
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
    read_all(tmp_path, kafka, channel, notes, ManualClock(1_700_000_000_000_000), closed=True)
    assert "as of 2023" in command(tmp_path).stdout
    with standing(tmp_path, kafka.servers):
        assert "Whole: nothing is missing." in command(tmp_path).stdout


def test_records_behind_an_open_transaction_are_not_known(tmp_path: Path, kafka: Kafka, fresh: Fresh) -> None:
    channel, notes = fresh("rsvps"), fresh("notes")
    sent(kafka, channel, notes, 1, 2, 3)
    read_all(tmp_path, kafka, channel, notes, closed=True)
    other = Producer({"bootstrap.servers": kafka.servers, "transactional.id": channel})
    other.init_transactions(30)
    with standing(tmp_path, kafka.servers):
        assert command(tmp_path, "--wait", "0.5").exit_code == 0
        other.begin_transaction()
        other.produce(channel, b"open", partition=0)
        other.flush(30)
        sent(kafka, channel, notes, 4)  # Acknowledged, but no reader gets it.
        result = command(tmp_path, "--wait", "0.5", "--json")
        other.abort_transaction(30)
    told = json.loads(result.stdout)
    assert (result.exit_code, told["verdict"]) == (3, "not known")
    assert [(doubt["kind"], doubt["subject"]) for doubt in told["doubts"]] == [("channel", channel)]


def test_when_the_channels_do_not_answer_the_verdict_is_not_known(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    # A Redis that is not there says so at once; a client of Kafka would wait for it.
    with standing(tmp_path, "127.0.0.1:1", "redis://127.0.0.1:1/0"):
        result = command(tmp_path, "--json")
    assert result.exit_code == 3
    assert [(doubt["kind"], doubt["subject"]) for doubt in json.loads(result.stdout)["doubts"]] == [
        ("channel", "Redis at 127.0.0.1:1")
    ]


def doubts(folder: Path) -> list[str]:
    """The kinds of what is doubted; the command has to say the same by its exit code."""
    result = command(folder, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == (3 if told["doubts"] else 0)
    assert told["verdict"] == ("not known" if told["doubts"] else "whole")
    return [doubt["kind"] for doubt in told["doubts"]]


def reported(folder: Path, report: Report) -> None:
    with closing(Ledger(Config.read(folder).ledger)) as ledger:
        ledger.report(report)


def test_an_auditor_that_was_killed_leaves_a_doubt(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    assert doubts(tmp_path) == []
    reported(tmp_path, Report(SystemClock().now() - 3_600_000_000))
    assert doubts(tmp_path) == ["audit"]


def test_a_run_that_was_killed_leaves_a_doubt_at_once(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    reported(tmp_path, Report(SystemClock().now()))
    assert doubts(tmp_path) == []
    with standing(tmp_path, "127.0.0.1:1"):
        pass  # Its note stays behind, as after kill -9.
    assert doubts(tmp_path) == ["audit"]


def test_what_the_auditor_doubts_is_doubted_here(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    reported(tmp_path, Report(SystemClock().now(), True, (), (Doubt("process", "analyse", "it is down"),)))
    assert doubts(tmp_path) == ["process"]


def test_a_finding_of_the_auditor_exits_with_1(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    finding = Discrepancy("changed", "store:redis/by_country", 1, "a row was changed", ("nl",))
    reported(tmp_path, Report(SystemClock().now(), True, (finding,)))
    result = command(tmp_path, "--json")
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (1, "missing")


def test_records_in_a_spool_are_doubted_while_nothing_runs(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    leave(tmp_path, "rsvps", "rsvps")
    assert doubts(tmp_path) == ["spool"]


def test_a_spool_that_cannot_be_read_is_doubted_with_its_file(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2)
    leave(tmp_path, "rsvps", "rsvps")
    (file,) = (Config.read(tmp_path).state / "spool").rglob("*.db")
    emptied(file, random.Random(1))
    (doubt,) = json.loads(command(tmp_path, "--json").stdout)["doubts"]
    assert doubt["kind"] == "spool"
    assert str(file) in doubt["text"]


@pytest.mark.parametrize("damage", [truncated, overwritten, emptied, deleted])
def test_a_damaged_ledger_is_not_known_and_named(tmp_path: Path, damage: Damage) -> None:
    audited(tmp_path, *range(2_000))
    ledger = Config.read(tmp_path).ledger
    damage(ledger, random.Random(1))
    result = command(tmp_path, "--json")
    assert result.exit_code == 3
    told = json.loads(result.stdout)
    assert told["verdict"] == "not known"
    assert [(doubt["kind"], doubt["subject"]) for doubt in told["doubts"]] == [("ledger", str(ledger))]
    # For people, too: never that nothing was counted yet.
    assert str(ledger) in command(tmp_path).stdout.replace("\n", "")
