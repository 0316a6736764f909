"""The verdict is never better than what is known."""

import json
from datetime import timedelta

from penstock.audit.judge import Discrepancy, Doubt, Report, Verdict, unique, verdict_of

ROW = Discrepancy("changed", "store:redis/by_country", 1, "a row is not what its channel says", ("nl",))
DOUBT = Doubt("process", "analyse", "the process analyse has reported nothing for 20 s")


def test_whole_is_what_has_neither_a_finding_nor_a_doubt() -> None:
    assert verdict_of(0, (), ()) is Verdict.WHOLE
    assert verdict_of(0, (), (DOUBT,)) is Verdict.NOT_KNOWN


def test_what_is_missing_outweighs_what_is_not_known() -> None:
    assert verdict_of(1, (), (DOUBT,)) is Verdict.MISSING
    assert verdict_of(0, (ROW,), (DOUBT,)) is Verdict.MISSING


def test_a_report_survives_its_file() -> None:
    report = Report(7, False, (ROW,), (DOUBT,))
    assert Report.of(json.loads(json.dumps(report.to_json()))) == report


def test_an_auditor_that_stopped_in_order_is_not_silent() -> None:
    limit = timedelta(microseconds=9)
    assert Report(0).silent(10, limit)
    assert not Report(0).silent(9, limit)
    assert not Report(0, closed=True).silent(10, limit)


def test_a_subject_is_doubted_once_for_each_reason() -> None:
    assert unique([DOUBT, DOUBT, Doubt("spool", "rsvps", "12 records wait")]) == (
        DOUBT,
        Doubt("spool", "rsvps", "12 records wait"),
    )
