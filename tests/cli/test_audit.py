import json
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from penstock.audit.auditor import Auditor
from penstock.audit.findings import Kind, Watched
from penstock.audit.ledger import Ledger
from penstock.cli.audit import LEDGER, audit
from penstock.record import Origin
from penstock.testing.channels import MemoryChannels

NOTES = "penstock.test.heartbeats"


def audited(folder: Path, *seqs: int, blind: bool = False) -> None:
    channels = MemoryChannels()
    for seq in seqs:
        channels.append("rsvps", b"{}", None, Origin("a", 1, seq, 0).headers())
    if blind:
        channels.append(NOTES, json.dumps({"kind": "blind", "source": "feed", "since": 0, "until": 5_000_000}).encode())
    ledger = Ledger(folder / LEDGER)
    auditor = Auditor(channels, ledger, [Watched("rsvps", Kind.SOURCE)], NOTES)
    while auditor.step(0):
        pass
    auditor.close()
    ledger.close()


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


def test_an_unknown_time_is_shown_and_fails_only_the_strict(tmp_path: Path) -> None:
    audited(tmp_path, 1, 2, blind=True)
    assert command(tmp_path).exit_code == 0
    assert "unknown" in command(tmp_path).stdout
    assert command(tmp_path, "--strict").exit_code == 1


def test_without_a_ledger_it_exits_with_2_and_tells_the_way_out(tmp_path: Path) -> None:
    result = command(tmp_path)
    assert result.exit_code == 2
    assert "there is no ledger; start the pipeline once" in result.stderr
