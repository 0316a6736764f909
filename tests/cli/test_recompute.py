"""What a person reads of a comparison, and how it is asked for."""

from collections import Counter
from pathlib import Path

import pytest

from penstock.analysis.replay import Difference, Found, How, Row, Verdict
from penstock.cli.recompute import recompute, report_lines
from penstock.cli.standard import print_result
from penstock.core.errors import Misconfigured
from penstock.operate.recompute import Gone, Judged, Report

FEWER = Difference(
    b'["nl"]', How.FEWER, Row(b'{"n":2}', 2, 0b001), Row(b'{"n":3}', 3, 0b101), {"n": (2, 3), "é": ("ö", None)}
)
MISSING = Difference(b'["de"]', How.MISSING, None, Row(b'{"n":1}', 1))


def report(*judged: Judged, gone: tuple[Gone, ...] = (), late: int = 0) -> Report:
    until = {"rsvps": {0: 10, 1: 20}}
    return Report("q", "t", until, {"rsvps": {0: 10, 1: 25}}, gone, judged, {0b100: Found("kiosk 7", 1, 4100, 1)}, late)


def judged(holder: str, *differences: Difference, late: bool = False, **counts: int) -> Judged:
    return Judged(holder, Counter({Verdict(name): times for name, times in counts.items()}), differences, late)


def printed(found: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_result(False, None, report_lines(found))
    return capsys.readouterr().out.splitlines()


def test_what_was_compared_is_told_for_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(judged("channel:t", exact=1_200, bounded=3), judged("feed:t"))
    assert printed(found, capsys) == [
        "q has read rsvps up to 0:10, 1:20; 5 later offsets are not committed yet",
        "channel:t: 1,200 exactly equal, 3 within bounds",
        "feed:t: no rows",
        "Equal: every compared row is the same as the recomputed one.",
    ]
    assert found.code == 0


def test_a_row_that_differs_is_printed_once_for_all_who_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(judged("channel:t", FEWER, MISSING, different=2), judged("feed:t", FEWER, different=1))
    assert printed(found, capsys)[3:] == [
        "",
        '["nl"] lacks records in channel:t, feed:t: lacks kiosk 7/1: 4100',
        "    n: held 2, recomputed 3",
        '    é: held "ö", recomputed null',
        "",
        '["de"] is missing in channel:t',
        '    recomputed {"n":1}',
        "",
        "2 rows differ from the recomputed result.",
    ]
    assert found.code == 1


def test_only_the_first_rows_that_differ_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    many = [Difference(b'["%d"]' % n, How.MISSING, None, Row(b"{}", 1)) for n in range(60)]
    lines = printed(report(judged("channel:t", *many, different=60)), capsys)
    assert "and 10 more rows; --json lists all" in lines
    assert lines[-1] == "60 rows differ from the recomputed result."


def test_what_may_have_come_too_late_cannot_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(judged("channel:t", FEWER, late=True, different=1), late=4)
    assert printed(found, capsys)[-1].startswith("Unknown: 1 row differs")
    assert found.code == 2


def test_the_part_of_the_log_that_is_gone_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(report(judged("channel:t", unknown=9), gone=(Gone("rsvps", 1, 0, 4_099),)), capsys)
    assert "rsvps: retention removed offsets 0–4,099 of partition 1" in lines
    assert lines[-1].startswith("Unknown: every row ")
    assert report(judged("channel:t", unknown=9)).code == 2


def test_a_row_that_is_no_json_can_be_told_as_json() -> None:
    odd = Difference(b"\xff", How.UNEXPECTED, Row(b"{"), None)
    [told] = report(judged("channel:t", odd)).to_json()["holders"][0]["differences"]
    assert (told["key"], told["held"], told["recomputed"]) == ("�", "{", None)


def test_where_nothing_runs_the_fix_is_told(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text('from penstock import Pipeline\napp = Pipeline("app")\n')
    with pytest.raises(Misconfigured, match="nothing runs here; start a pipeline"):
        recompute(tmp_path, None, tmp_path / "app.py", "q", False)
