import io
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from penstock.audit.account import Outcome
from penstock.audit.balance import Balance, ChannelBalance, SenderBalance
from penstock.audit.findings import Kind
from penstock.audit.hops import Gap, Hop
from penstock.audit.report import NAMED, parts
from penstock.cli.standard import print_parts

LATENCY = {"count": 3.0, "min": 1.0, "mean": 2.0, "p50": 2.04, "p95": 3.0, "p99": 1234.5, "max": 1300.0}
RSVPS = ChannelBalance(
    channel="rsvps",
    kind=Kind.SOURCE,
    senders=20,
    records=1_234_570,
    distinct=1_234_567,
    duplicates=3,
    missing=0,
    claimed=1_234_567,
    in_flight=0,
    refused=7,
    unknown_seconds=0,
    without_identity=0,
    gaps=(),
    latency=LATENCY,
)
BY_COUNTRY = replace(RSVPS, channel="by_country", kind=Kind.RESULT, senders=0, distinct=0, duplicates=0, latency=None)


AT = int(datetime(2026, 3, 1, 0, 0, 30, tzinfo=UTC).timestamp()) * 1_000_000


def shown(*channels: ChannelBalance, terminal: bool = False, age: float | None = None, senders: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=120, force_terminal=terminal, highlight=False, color_system="standard" if terminal else None
    )
    hops = tuple(
        Hop(
            f"source:{one.channel}", "", one.channel, one.claimed, one.records, one.in_flight, one.missing,
            {Outcome.PASSED: one.distinct, Outcome.REFUSED: one.refused}, one.gaps,
        )
        for one in channels
        if one.kind is Kind.SOURCE
    )  # fmt: skip
    print_parts(parts(Balance(AT, None if age is None else AT - int(age * 1e6), channels, hops), senders), console)
    return file.getvalue()


def test_a_whole_balance_says_so_last() -> None:
    text = shown(RSVPS, BY_COUNTRY)
    assert text.rstrip().splitlines()[-1] == "Whole: nothing is missing."
    assert "1,234,567" in text
    assert "1,234.5" in text


def test_columns_are_aligned() -> None:
    header, _, one, two, *_ = [
        line for line in shown(RSVPS, replace(RSVPS, channel="sales")).splitlines() if line.strip()
    ]
    end = header.index("passed") + len("passed")
    assert one[:end].endswith("1,234,567")
    assert two[:end].endswith("1,234,567")


def test_outcomes_that_nothing_had_have_no_column() -> None:
    text = shown(RSVPS)
    assert "refused" in text
    assert "filtered" not in text
    assert "shed" not in text


def test_missing_ranges_are_named() -> None:
    text = shown(replace(RSVPS, missing=4, gaps=(Gap("kiosk 7", 2, 5, 5), Gap("kiosk 8", 1, 10, 12))))
    assert "source rsvps misses kiosk 7/2: 5: not seen in any channel\n" in text
    assert "source rsvps misses kiosk 8/1: 10–12 (3 records): not seen in any channel\n" in text
    assert "Not whole: 4 records are missing." in text


def test_of_many_ranges_the_first_are_named_and_the_rest_are_counted() -> None:
    gaps = tuple(Gap("a", 1, 2 * n, 2 * n) for n in range(NAMED + 5))
    text = shown(replace(RSVPS, missing=len(gaps), gaps=gaps))
    assert text.count("rsvps misses") == NAMED
    assert "and 5 more ranges" in text


def test_what_is_unknown_gets_a_sentence() -> None:
    text = shown(replace(RSVPS, unknown_seconds=83.25))
    assert "rsvps: for 0:01:23.250000 (h:mm:ss) the source" in " ".join(text.split())
    assert "Whole where it is known: nothing is missing." in text


def test_what_has_no_identity_gets_a_sentence() -> None:
    assert "rsvps: 3 entries have no identity" in shown(replace(RSVPS, without_identity=3))


def test_what_is_in_flight_is_said() -> None:
    assert "Whole: nothing is missing; up to 12 records are in flight." in shown(replace(RSVPS, in_flight=12))


def test_no_record_at_all_is_said_so() -> None:
    empty = replace(RSVPS, records=0, distinct=0, duplicates=0, claimed=0)
    assert "no record has come yet" in shown(empty)


def test_there_are_colours_on_a_terminal_only() -> None:
    assert "\x1b" in shown(RSVPS, terminal=True)
    assert "\x1b" not in shown(RSVPS)


def test_a_name_cannot_colour_the_screen_or_break_a_line() -> None:
    evil = replace(RSVPS, missing=1, gaps=(Gap("a\x1b[31m\n[bold]b", 1, 1, 1),))
    text = shown(evil)
    assert "\x1b" not in text
    assert "rsvps misses a\\x1b[31m\\n[bold]b/1: 1: not seen in any channel\n" in text


@pytest.mark.parametrize(
    ("age", "when"),
    [
        (None, ""),
        (0, ""),
        (4.9, ""),
        (20, ", as of 00:00:10 UTC"),
        (60, ", as of 2026-02-28 23:59:30 UTC"),
    ],
)
def test_an_old_verdict_says_when_it_was_true(age: float | None, when: str) -> None:
    assert f"Whole: nothing is missing{when}.\n" in shown(RSVPS, age=age)
    assert f"12 records are in flight{when}.\n" in shown(replace(RSVPS, in_flight=12), age=age)
    assert f"Not whole: 4 records are missing{when}.\n" in shown(replace(RSVPS, missing=4), age=age)


def test_what_is_not_read_yet_gets_a_sentence() -> None:
    text = shown(replace(RSVPS, unread=1_200, in_flight=1_200))
    assert "rsvps: 1,200 records are not read yet; they count as in flight.\n" in text
    assert "not read yet" not in shown(RSVPS)


def test_senders_are_shown_when_asked_for_and_those_with_findings_first() -> None:
    senders = (
        SenderBalance(
            "kiosk 1",
            1,
            1,
            5,
            records=5,
            distinct=5,
            duplicates=0,
            missing=0,
            reordered=2,
            latency={"count": 5, "min": -1.0, "mean": 2.5, "max": 1.8e9},
        ),
        SenderBalance("kiosk 2", 1, 1000, 2000, records=1_002, distinct=1_001, duplicates=1, missing=0),
        SenderBalance("kiosk 3\x1b", 2, None, None, records=0, distinct=0, duplicates=0, missing=3),
    )
    channel = replace(RSVPS, by_sender=senders)
    lines = [" ".join(line.split()) for line in shown(channel, senders=True).splitlines() if "kiosk" in line]
    assert lines == [
        "rsvps kiosk 2 1 1000 2000 1,002 0 1 0",
        "rsvps kiosk 3\\x1b 2 0 3 0 0",
        "rsvps kiosk 1 1 1 5 5 0 0 2 -1.0 2.5 500 h",
    ]
    assert "kiosk" not in shown(channel)
