"""Per sender, the numbers that arrived must have no gap, whatever their order."""

import random

import pytest

from penstock.audit.hops import Gap
from penstock.audit.verify import LONGEST_NAME, NAMED, Fields, Integrity, IntegrityReport, Verifier
from penstock.core.errors import Refused
from penstock.core.record import Origin
from penstock.testing import ManualClock

NOW = 1_700_000_000_000_000


def verified(*seqs: int, first: int | None = None) -> IntegrityReport:
    verifier = Verifier(ManualClock(), first)
    take(verifier, *seqs)
    return verifier.end()


def take(verifier: Verifier, *seqs: int, sender: str = "a", epoch: int = 0) -> None:
    for seq in seqs:
        verifier.take(Origin(sender, epoch, seq, 0))


def test_numbers_without_a_gap_are_whole() -> None:
    report = verified(1000, 1001, 1002)
    assert (report.verdict, report.missing, report.gaps) == (Integrity.WHOLE, 0, ())


def test_a_gap_is_a_loss_and_is_named() -> None:
    report = verified(1000, 1001, 1003)
    assert (report.verdict, report.missing, report.gaps) == (Integrity.LOSS, 1, (Gap("a", 0, 1002, 1002),))


def test_the_order_of_arrival_does_not_matter_and_is_counted() -> None:
    report = verified(1002, 1000, 1003, 1001)
    assert (report.verdict, report.out_of_order, report.doubled) == (Integrity.WHOLE, 2, 0)


def test_a_number_that_comes_twice_is_counted_and_no_loss() -> None:
    report = verified(1, 2, 2, 3, 1, 2, 3)
    assert (report.verdict, report.records, report.doubled, report.out_of_order) == (Integrity.WHOLE, 7, 4, 0)


def test_a_second_copy_does_not_fill_a_gap() -> None:
    assert verified(1, 3, 3).gaps == (Gap("a", 0, 2, 2),)


def test_numbers_may_be_negative_and_at_the_limits() -> None:
    assert verified(-2, -1, 0, 1).verdict is Integrity.WHOLE
    assert verified(-(2**63), 2**63 - 1).missing == 2**64 - 2


def test_nothing_is_not_whole() -> None:
    assert verified().verdict is Integrity.NOTHING


def test_each_sender_and_each_of_its_lives_is_counted_alone() -> None:
    verifier = Verifier(ManualClock())
    take(verifier, 1, 2, sender="a", epoch=1)
    take(verifier, 7, 9, sender="a", epoch=2)
    take(verifier, 5, sender="b")
    report = verifier.end()
    assert [(one.sender, one.epoch, one.first, one.last, one.missing) for one in report.by_sender] == [
        ("a", 1, 1, 2, 0),
        ("a", 2, 7, 9, 1),
        ("b", 0, 5, 5, 0),
    ]
    assert report.gaps == (Gap("a", 2, 8, 8),)


def test_a_lost_beginning_is_found_when_the_first_number_is_known() -> None:
    assert verified(3, 4).verdict is Integrity.WHOLE
    assert verified(3, 4, first=1).gaps == (Gap("a", 0, 1, 2),)
    assert verified(3, 1, 2, first=1).verdict is Integrity.WHOLE


def test_what_comes_from_before_the_first_number_is_counted_and_not_verified() -> None:
    report = verified(2, 4, 10, 12, first=10)
    assert (report.records, report.gaps) == (4, (Gap("a", 0, 11, 11),))
    assert verified(8, 9, 10, 11, first=10).verdict is Integrity.WHOLE
    assert verified(5, 12, first=10).gaps == (Gap("a", 0, 10, 11),)


@pytest.mark.parametrize("first", [None, -3, 0, 5, 10])
def test_it_agrees_with_a_plain_set_whatever_comes(first: int | None) -> None:
    chance = random.Random(first)
    for _ in range(300):
        verifier, seen, late, records = Verifier(ManualClock(), first), list[int](), 0, 0
        for _ in range(chance.randint(1, 40)):
            seq = seen[-1] + 1 if seen and chance.random() < 0.5 else chance.randint(-8, 25)
            late += bool(seen) and seq < max(seen) and seq not in seen
            seen.append(seq)
            take(verifier, seq)
            if chance.random() < 0.1:
                records += verifier.report().lapse.records
        records += verifier.report().lapse.records
        report = verifier.end()
        absent = set(range(min(seen) if first is None else first, max(seen) + 1)) - set(seen)
        assert {number for gap in report.gaps for number in range(gap.first, gap.last + 1)} == absent
        assert report.missing == report.by_sender[0].missing == len(absent)
        assert records == report.lapse.records == len(seen)
        assert (report.records, report.doubled) == (len(seen), len(seen) - len(set(seen)))
        assert report.out_of_order == late


def test_a_report_tells_of_the_last_lapse_of_time() -> None:
    clock = ManualClock()
    verifier = Verifier(clock)
    take(verifier, 1, 2, 5)
    clock.move(10)
    one = verifier.report()
    take(verifier, 3, 6, 9)
    clock.move(4)
    two = verifier.report()
    assert (one.lapse.seconds, one.lapse.records, one.lapse.rate) == (10, 3, 0.3)
    assert one.missing == 2
    assert (two.lapse.seconds, two.lapse.records) == (4, 3)
    assert (two.records, two.missing, two.verdict) == (6, 3, Integrity.LOSS)
    end = verifier.end()
    assert (end.final, end.lapse.seconds, end.lapse.records) == (True, 14, 6)


def test_a_report_names_the_gaps_that_are_open() -> None:
    verifier = Verifier(ManualClock())
    take(verifier, 1, 3, 10)
    assert verifier.report().gaps == (Gap("a", 0, 2, 2), Gap("a", 0, 4, 9))
    take(verifier, 20, 15, *range(4, 10))
    assert verifier.report().gaps == (Gap("a", 0, 2, 2), Gap("a", 0, 11, 14), Gap("a", 0, 16, 19))


def test_a_report_names_the_first_of_many_gaps_and_the_end_report_all() -> None:
    verifier = Verifier(ManualClock())
    take(verifier, *range(0, 200, 2))
    assert len(verifier.report().gaps) == NAMED
    assert len(verifier.end().gaps) == 99


def test_what_cannot_be_read_makes_the_verdict_uncertain_and_a_loss_stays_a_loss() -> None:
    verifier = Verifier(ManualClock())
    take(verifier, 1, 2)
    verifier.refuse("line 3", "it is not JSON")
    assert verifier.report().verdict is Integrity.UNCERTAIN
    take(verifier, 4)
    end = verifier.end()
    assert (end.verdict, end.unreadable, end.refused) == (Integrity.LOSS, 1, (("line 3", "it is not JSON"),))


def test_only_the_first_that_cannot_be_read_are_kept_and_all_are_counted() -> None:
    verifier = Verifier(ManualClock())
    for number in range(1_000):
        verifier.refuse(f"line {number}", "it is not JSON")
    end = verifier.end()
    assert (end.unreadable, len(end.refused), end.verdict) == (1_000, NAMED, Integrity.UNCERTAIN)


def test_a_doubt_makes_the_verdict_uncertain_and_a_note_does_not() -> None:
    verifier = Verifier(ManualClock())
    take(verifier, 1)
    verifier.note("by the way")
    assert verifier.report().verdict is Integrity.WHOLE
    verifier.doubt("it broke off")
    end = verifier.end()
    assert (end.verdict, end.doubts, end.notes) == (Integrity.UNCERTAIN, ("it broke off",), ("by the way",))


def test_latency_is_told_where_times_are_plausible() -> None:
    verifier = Verifier(ManualClock())
    for seq, took in enumerate([1_000, 3_000, 8_000, -500, NOW, 10**18, -(10**15)]):
        verifier.take(Origin("a", 0, seq, NOW - took), NOW)
    verifier.take(Origin("a", 0, 7, 0), NOW)
    verifier.take(Origin("a", 0, 8, NOW), None)
    assert verifier.report().lapse.latency == {"count": 4, "min": 0.0, "mean": 3.0, "max": 8.0}
    assert verifier.report().lapse.latency is None
    assert verifier.end().lapse.latency == {"count": 4, "min": 0.0, "mean": 3.0, "max": 8.0}


def test_what_comes_after_the_end_fills_gaps_and_does_nothing_else() -> None:
    verifier = Verifier(ManualClock())
    take(verifier, 1, 2, 5, 9)
    for seq in (3, 4, 4, 5, 8, 0, 10, 11):
        verifier.fill(Origin("a", 0, seq, 0))
    verifier.fill(Origin("b", 0, 1, 0))
    assert verifier.missing == 2
    end = verifier.end()
    assert (end.gaps, end.records, end.doubled, end.senders) == ((Gap("a", 0, 6, 7),), 7, 0, 1)
    assert end.by_sender[0].last == 9


def test_a_lost_beginning_can_be_filled() -> None:
    verifier = Verifier(ManualClock(), first=1)
    take(verifier, 3)
    for seq in (0, 1):
        verifier.fill(Origin("a", 0, seq, 0))
    assert verifier.end().gaps == (Gap("a", 0, 2, 2),)


def test_a_sender_whose_name_has_no_end_is_refused_before_it_is_kept() -> None:
    verifier = Verifier(ManualClock())
    with pytest.raises(Refused, match="longer than 1,000 characters"):
        take(verifier, 1, sender="x" * (LONGEST_NAME + 1))
    take(verifier, 1, sender="x" * LONGEST_NAME)
    assert verifier.end().senders == 1


def test_json_tells_all_of_it() -> None:
    clock = ManualClock(NOW)
    verifier = Verifier(clock)
    take(verifier, 1, 3)
    verifier.refuse("line 3", "it is not JSON")
    clock.move(2)
    lapse = {"seconds": 2.0, "records": 2, "latency": None, "rate": 1.0}
    told = {
        "final": False,
        "at": NOW + 2_000_000,
        "verdict": "loss",
        "lapse": lapse,
        "senders": 1,
        "records": 2,
        "missing": 1,
        "doubled": 0,
        "out_of_order": 0,
        "unreadable": 1,
        "gaps": [{"sender": "a", "epoch": 0, "first": 2, "last": 2}],
    }
    assert verifier.report().to_json() == told
    count = {"sender": "a", "epoch": 0, "records": 2, "first": 1, "last": 3, "missing": 1, "doubled": 0}
    assert verifier.end().to_json() == {
        **told,
        "final": True,
        "by_sender": [{**count, "out_of_order": 0}],
        "refused": [{"place": "line 3", "reason": "it is not JSON"}],
        "doubts": [],
        "notes": [],
    }


def reason(payload: bytes, fields: Fields | None = None) -> str:
    with pytest.raises(Refused) as refused:
        (fields or Fields()).read(payload)
    return refused.value.reason


def test_an_update_is_read_from_its_fields() -> None:
    assert Fields().read(b'{"seq": 1000, "sender": "sender1", "time": 0}\r') == Origin("sender1", 0, 1000, 0)
    assert Fields().read(b'{"seq": -1, "sender": "a", "epoch": 3}') == Origin("a", 3, -1, 0)


def test_fields_may_have_other_names_and_lie_deeper() -> None:
    fields = Fields("feed.seq", "feed.sender", "feed.epoch", "at")
    payload = b'{"feed": {"seq": 5, "sender": "a", "epoch": 7}, "at": 9, "seq": 1}'
    assert fields.read(payload) == Origin("a", 7, 5, 9)
    assert reason(b'{"feed": [5]}', fields) == 'there is no "feed.seq"'


def test_empty_names_mean_one_sender_without_lives_and_times() -> None:
    assert Fields("n", "", "", "").read(b'{"n": 1, "": 2, "epoch": 3}') == Origin("", 0, 1, 0)


def test_a_sender_may_be_a_number() -> None:
    assert Fields().read(b'{"seq": 1, "sender": 7}').sender == "7"


@pytest.mark.parametrize("time", [b'"2024-01-01"', b"1.5", b"null", b"true", b"{}"])
def test_a_time_that_is_none_does_no_harm(time: bytes) -> None:
    assert Fields().read(b'{"seq": 1, "sender": "a", "time": %s}' % time).time == 0


def test_the_limits_of_64_bits_are_numbers() -> None:
    for seq in (-(2**63), 2**63 - 1):
        assert Fields().read(b'{"seq": %d, "sender": "a"}' % seq).seq == seq


@pytest.mark.parametrize("seq", [2**63, -(2**63) - 1, 2**64, 10**30, -(10**30)])
def test_a_number_beyond_64_bits_is_refused(seq: int) -> None:
    assert reason(b'{"seq": %d, "sender": "a"}' % seq) == '"seq" is not a whole number of 64 bits'


@pytest.mark.parametrize("seq", [b'"1000"', b"1.0", b"true", b"[1]", b"{}"])
def test_what_is_no_number_is_refused_with_the_reason(seq: bytes) -> None:
    assert reason(b'{"seq": %s, "sender": "a"}' % seq) == '"seq" is not a whole number of 64 bits'


def test_a_number_that_is_null_is_absent() -> None:
    assert reason(b'{"seq": null, "sender": "a"}') == 'there is no "seq"'


def test_an_epoch_that_is_there_must_be_a_number() -> None:
    assert reason(b'{"seq": 1, "sender": "a", "epoch": "x"}') == '"epoch" is not a whole number of 64 bits'


def test_a_sender_must_have_a_name() -> None:
    assert reason(b'{"seq": 1}') == 'there is no "sender"'
    assert reason(b'{"seq": 1, "sender": true}') == '"sender" is not a name'


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"seq": NaN}',
        b'{"seq": 1e400}',
        b'{"seq": 1, "sender": "\xff"}',
        b'{"seq": 1, "sender": "\xc0\xaf"}',
        b'{"seq": 1, "sender": "\\ud800"}',
        b'{"seq": 1, "sender": "a\x00"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_what_is_not_json_is_refused(payload: bytes) -> None:
    assert reason(payload).startswith("it is not JSON: ")


def test_json_that_is_no_object_is_refused() -> None:
    for payload in (b"1000", b"[]", b'"seq"', b"null"):
        assert reason(payload) == "it is JSON, but not an object"
