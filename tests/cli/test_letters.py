import pytest

from penstock.cli.letters import letter_lines, redrive_lines
from penstock.core.contracts import Entry
from penstock.core.record import Headers, Origin
from penstock.pipeline.letters import Letter
from penstock.pipeline.redrive import Outcome, Verdict


def shown(value: bytes | None, headers: Headers = (), appended: int = 0, key: bytes | None = None) -> list[str]:
    return list(letter_lines(Letter.of(Entry("rsvps.dead", 0, 17, appended, key, value, headers))))


@pytest.mark.parametrize(
    ("micros", "told"),
    [
        (-1_000, "at no told time"),
        (0, "at no told time"),
        (253_402_300_799_000_000, "9999-12-31 23:59:59"),
        (2**63 - 1, "9223372036854775807 µs"),
    ],
)
def test_any_time_can_be_told(micros: int, told: str) -> None:
    lines = shown(b"", Origin("a", 1, 1, micros).headers(), micros)
    assert lines[2].startswith(f"refused:  {told}")
    assert told in lines[4]


def test_an_empty_value_has_no_lines() -> None:
    assert shown(b"")[-1] == "value:    0 bytes"


def test_what_was_cut_at_intake_is_told() -> None:
    assert "value:    70,000 bytes, of which 3 were kept" in shown(b"abc", [("size", b"70000")])


def test_a_letter_that_came_back_says_so() -> None:
    assert "redriven: once, and refused again" in shown(b"", [("redriven", b"1")])


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
        "and 1,010 more; --json names them all",
        "rsvps: 1 sent, 1,060 skipped: 1,060 came back",
    ]


def test_every_kind_of_skipping_has_its_words() -> None:
    *_, last = redrive_lines("rsvps", True, [Outcome("rsvps.dead:0:1", None, verdict, "why") for verdict in Verdict])
    assert last == (
        "rsvps: 1 would be sent, "
        "6 skipped: 1 redriven before, 1 came back, 1 too late for a query, "
        "1 excluded by a query that fails with it, 1 kept only in part, "
        "1 not taken by the channel"
    )
