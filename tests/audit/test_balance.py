import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from penstock.audit.balance import BRIEF, ChannelBalance, Jump, SenderBalance, balance
from penstock.audit.content import ChannelCounts, Content, Numbered, Run
from penstock.audit.findings import Kind, Numbering, Watched
from penstock.audit.hops import Gap
from penstock.audit.judge import Verdict
from penstock.core.metrics import Sketch
from penstock.core.record import LARGEST_JUMP, OutageInterval

SECOND = 1_000_000
NOW = 1_000 * SECOND
LONG_AGO = NOW - 60 * SECOND
JUST_NOW = NOW - SECOND
KINDS = {"rsvps": Kind.SOURCE, "rsvps.dead": Kind.DEAD, "by_country": Kind.RESULT}


def content(
    runs: Mapping[Numbering, Sequence[tuple[int, int]]],
    claims: Mapping[tuple[str, int], Sequence[tuple[int, int]]] | None = None,
    blinds: Sequence[OutageInterval] = (),
    doubled: int = 0,
    noticed: int = LONG_AGO,
    nameless: int = 0,
    told: str = "",
    channels: Mapping[str, Kind] | None = None,
) -> Content:
    numbered = {key: sum(last - first + 1 for first, last in some) + doubled for key, some in runs.items()}
    names = {channel for channel, _, _ in runs}
    return Content(
        channels={name: Watched(name, kind) for name, kind in (channels or KINDS).items()},
        counts={
            name: ChannelCounts(sum(count for key, count in numbered.items() if key[0] == name) + nameless, nameless)
            for name in names
        },
        numbered={key: Numbered(count) for key, count in numbered.items()},
        runs={key: [Run(first, last, noticed) for first, last in some] for key, some in runs.items()},
        claims={(told, *who): some for who, some in (claims or {}).items()},
        blinds=[(told, blind) for blind in blinds],
        latencies={},
        as_of=JUST_NOW,
    )


def of(found: Content) -> ChannelBalance:
    return balance(found, NOW).channels[0]


def test_what_starts_at_1000_is_whole_from_1000_on() -> None:
    rsvps = of(content({("rsvps", "a", 1): [(1000, 1002)]}))
    assert (rsvps.claimed, rsvps.distinct, rsvps.missing) == (3, 3, 0)


def test_a_gap_is_named() -> None:
    found = balance(content({("rsvps", "a", 1): [(1000, 1001), (1003, 1003)]}), NOW)
    assert not found.whole
    assert found.channels[0].gaps == (Gap("a", 1, 1002, 1002),)
    assert [(hop.stage, hop.missing, hop.gaps) for hop in found.hops] == [
        ("source:rsvps", 1, (Gap("a", 1, 1002, 1002),))
    ]


def test_each_life_of_a_sender_has_its_own_numbers() -> None:
    rsvps = of(content({("rsvps", "a", 1): [(1, 5)], ("rsvps", "a", 2): [(1, 3)], ("rsvps", "b", 1): [(100, 101)]}))
    assert (rsvps.senders, rsvps.distinct, rsvps.missing) == (2, 10, 0)


def test_duplicates_are_counted_and_harm_nobody() -> None:
    found = balance(content({("rsvps", "a", 1): [(1, 5)]}, doubled=2), NOW)
    assert found.whole
    assert (found.channels[0].records, found.channels[0].distinct, found.channels[0].duplicates) == (7, 5, 2)


def test_a_lost_tail_contradicts_the_claim_of_its_sender() -> None:
    rsvps = of(content({("rsvps", "a", 1): [(1, 5)]}, {("a", 1): [(8, LONG_AGO)]}))
    assert rsvps.gaps == (Gap("a", 1, 6, 8),)
    assert (rsvps.claimed, rsvps.distinct, rsvps.missing, rsvps.in_flight) == (8, 5, 3, 0)


def test_a_tail_that_was_just_claimed_is_in_flight() -> None:
    found = balance(content({("rsvps", "a", 1): [(1, 5)]}, {("a", 1): [(8, JUST_NOW)]}), NOW)
    assert found.whole
    assert not found.settled
    assert found.channels[0].in_flight == 3


def test_a_tail_is_split_where_its_claims_are_settled() -> None:
    """A sender that goes on claiming does not hide that its older numbers never came."""
    rsvps = of(content({("rsvps", "a", 1): [(1, 5)]}, {("a", 1): [(3, LONG_AGO), (6, LONG_AGO), (9, JUST_NOW)]}))
    assert rsvps.gaps == (Gap("a", 1, 6, 6),)
    assert (rsvps.missing, rsvps.in_flight, rsvps.claimed) == (1, 3, 9)


def test_a_gap_that_has_just_opened_may_still_close() -> None:
    found = content({("rsvps", "a", 1): [(1, 5), (7, 9)]}, noticed=JUST_NOW)
    assert balance(found, NOW).channels[0].in_flight == 1
    assert balance(found, NOW, grace=0).channels[0].missing == 1


def test_a_claim_of_less_than_what_came_is_old_news() -> None:
    rsvps = of(content({("rsvps", "a", 1): [(1, 5)]}, {("a", 1): [(3, LONG_AGO)]}))
    assert (rsvps.claimed, rsvps.missing) == (5, 0)


def test_a_sender_that_claims_and_is_never_seen_owes_what_followed_its_first_word() -> None:
    rsvps = of(content({("rsvps", "a", 1): [(1, 5)]}, {("b", 1): [(100, LONG_AGO), (103, LONG_AGO)]}))
    assert rsvps.gaps == (Gap("b", 1, 101, 103),)
    assert rsvps.senders == 2


def test_claims_belong_to_the_channel_where_the_sender_was_seen() -> None:
    channels = {"rsvps": Kind.SOURCE, "sales": Kind.SOURCE}
    runs = {("rsvps", "a", 1): [(1, 5)], ("sales", "b", 1): [(1, 5)]}
    found = balance(
        content(runs, {("b", 1): [(7, LONG_AGO)], ("b", 2): [(3, LONG_AGO), (4, LONG_AGO)]}, channels=channels), NOW
    )
    rsvps, sales = found.channels
    assert rsvps.missing == 0
    assert sales.gaps == (Gap("b", 1, 6, 7), Gap("b", 2, 4, 4))


def test_claims_and_blind_times_belong_to_the_channel_that_they_tell() -> None:
    channels = {"rsvps": Kind.SOURCE, "sales": Kind.SOURCE}
    runs = {("rsvps", "a", 1): [(1, 5)], ("sales", "a", 1): [(1, 5)]}
    blinds = [OutageInterval("a", 0, SECOND)]
    found = content(runs, {("a", 1): [(7, LONG_AGO)]}, blinds, channels=channels, told="sales")
    rsvps, sales = balance(found, NOW).channels
    assert (rsvps.missing, rsvps.unknown_seconds) == (0, 0)
    assert (sales.missing, sales.unknown_seconds) == (2, 1)


def test_a_record_that_is_only_in_the_dead_letters_is_not_missing() -> None:
    """One that is too large never enters the channel, and is refused all the same."""
    runs = {("rsvps", "a", 1): [(1, 4), (7, 9)], ("rsvps.dead", "a", 1): [(2, 2), (5, 6), (10, 10)]}
    found = balance(content(runs, {("a", 1): [(10, LONG_AGO)]}), NOW)
    rsvps = found.channels[0]
    assert found.whole
    assert (rsvps.claimed, rsvps.distinct, rsvps.refused, rsvps.records) == (10, 10, 4, 7)


def test_dead_letters_are_refused_records_and_have_no_gaps() -> None:
    found = balance(content({("rsvps", "a", 1): [(1, 50)], ("rsvps.dead", "a", 1): [(3, 3), (40, 41)]}), NOW)
    rsvps, dead, _ = found.channels
    assert found.whole
    assert rsvps.refused == 3
    assert (dead.distinct, dead.missing) == (3, 0)


def test_a_dead_letter_without_identity_is_a_refused_record() -> None:
    found = content({("rsvps", "a", 1): [(1, 5)], ("rsvps.dead", "a", 1): [(3, 3)]}, nameless=2)
    assert of(found).refused == 3
    assert of(found).without_identity == 2


def test_a_blind_time_is_unknown_and_not_missing() -> None:
    blinds = [
        OutageInterval("feed", 0, 3 * SECOND),
        OutageInterval("feed", 2 * SECOND, 5 * SECOND),
        OutageInterval("feed", 9 * SECOND, 10 * SECOND),
    ]
    found = balance(content({("rsvps", "a", 1): [(1, 5)]}, blinds=blinds), NOW)
    assert found.whole
    assert found.unknown_seconds == 6


def test_nothing_counted_is_whole() -> None:
    found = balance(content({}), NOW)
    assert found.whole
    assert [channel.claimed for channel in found.channels] == [0, 0, 0]


def test_the_homes_add_up_in_json() -> None:
    whole = content({("rsvps", "a", 1): [(1, 5), (8, 9)]}, {("a", 1): [(9, LONG_AGO), (12, JUST_NOW)]}, doubled=1)
    sketch = Sketch()
    sketch.add(10)
    found = balance(
        Content(**{**{name: getattr(whole, name) for name in whole.__slots__}, "latencies": {"rsvps": sketch}}), NOW
    )
    told = json.loads(json.dumps(found.to_json()))
    assert told["whole"] is False
    assert (told["at"], told["as_of"]) == (NOW, JUST_NOW)
    rsvps = told["channels"][0]
    assert rsvps["claimed"] == rsvps["distinct"] + rsvps["missing"] + rsvps["in_flight"] == 12
    assert rsvps["records"] == rsvps["distinct"] + rsvps["duplicates"] + rsvps["without_identity"]
    assert rsvps["gaps"] == [{"sender": "a", "epoch": 1, "first": 6, "last": 7}]
    (sender,) = rsvps["by_sender"]
    assert {name: sender[name] for name in ("sender", "epoch", "first", "last", "records", "missing")} == {
        "sender": "a", "epoch": 1, "first": 1, "last": 9, "records": 8, "missing": 2
    }  # fmt: skip
    (hop,) = told["hops"]
    assert hop["due"] == sum(hop["outcomes"].values()) + hop["in_flight"] + hop["missing"]
    assert (rsvps["gap_count"], rsvps["unread"]) == (1, 0)
    assert "by_sender" not in told["channels"][1]
    assert rsvps["kind"] == "source"
    assert set(rsvps["latency"]) == {"count", "min", "mean", "p50", "p95", "p99", "max"}


def test_every_sender_has_a_balance_of_its_own() -> None:
    runs = {
        ("rsvps", "a", 1): [(1, 5)],
        ("rsvps", "a", 2): [(1, 3), (7, 9)],
        ("rsvps.dead", "a", 2): [(3, 4)],
        ("rsvps.dead", "b", 1): [(2, 2)],
    }
    rsvps = of(content(runs, {("c", 1): [(100, LONG_AGO), (103, LONG_AGO)]}, doubled=2))
    assert rsvps.by_sender == (
        SenderBalance("a", 1, 1, 5, records=7, distinct=5, duplicates=2, missing=0),
        SenderBalance("a", 2, 1, 9, records=8, distinct=7, duplicates=2, missing=2),
        SenderBalance("b", 1, 2, 2, records=0, distinct=1, duplicates=0, missing=0),
        SenderBalance("c", 1, None, None, records=0, distinct=0, duplicates=0, missing=3),
    )
    for name in ("distinct", "duplicates", "missing"):
        assert sum(getattr(one, name) for one in rsvps.by_sender) == getattr(rsvps, name)


def test_in_brief_it_fits_into_a_message() -> None:
    runs = {("rsvps", f"kiosk {n}", 1): [(i, i) for i in range(0, 100, 2)] for n in range(500)}
    found = balance(content(runs), NOW)
    told = found.to_json(brief=True)
    assert len(json.dumps(told)) < 50_000
    rsvps = told["channels"][0]
    assert "by_sender" not in rsvps
    assert (len(rsvps["gaps"]), rsvps["gap_count"], rsvps["missing"]) == (BRIEF, 500 * 49, 500 * 49)
    full = found.to_json()["channels"][0]
    assert rsvps["gaps"] == full["gaps"][:BRIEF]
    assert (len(full["gaps"]), len(full["by_sender"]), full["gap_count"]) == (500 * 49, 500, 500 * 49)


def test_what_is_not_read_yet_is_in_flight_and_counted_once() -> None:
    found = content({("rsvps", "a", 1): [(1, 5)]}, {("a", 1): [(8, JUST_NOW)]})
    for unread, in_flight in ((0, 3), (2, 3), (7, 7)):
        balanced = balance(found, NOW, unread={"rsvps": unread})
        rsvps = balanced.channels[0]
        assert (rsvps.unread, rsvps.in_flight, rsvps.claimed) == (unread, in_flight, 5 + in_flight)
        assert balanced.whole
        assert not balanced.settled


def test_what_was_noticed_before_all_was_read_is_in_flight() -> None:
    """An auditor that catches up has read the claim of 1,000, and half of the records."""
    found = replace(
        content({("rsvps", "a", 1): [(1, 200), (300, 500)]}, {("a", 1): [(1_000, LONG_AGO)]}),
        drained=LONG_AGO - SECOND,
    )
    rsvps = of(found)
    assert (rsvps.missing, rsvps.in_flight) == (0, 599)
    assert of(replace(found, drained=LONG_AGO)).missing == 599


HUGE = 2**62


def test_a_number_that_somebody_made_up_is_a_finding_and_no_missing_records() -> None:
    found = balance(content({("rsvps", "a", 1): [(1, 40), (HUGE, HUGE)]}), NOW)
    rsvps = found.channels[0]
    assert (rsvps.distinct, rsvps.missing, rsvps.in_flight, rsvps.claimed) == (41, 0, 0, 41)
    assert rsvps.jumps == (Jump("a", 1, 40, HUGE),)
    assert found.verdict is Verdict.MISSING
    (finding,) = found.discrepancies
    assert (finding.kind, finding.stage, finding.count) == ("unexplained", "channel:rsvps", 1)
    assert finding.examples == (f"a 1 from 40 to {HUGE}",)
    json.loads(json.dumps(found.to_json()))


def test_the_first_number_may_be_any() -> None:
    found = balance(content({("rsvps", "a", 1): [(HUGE, HUGE + 1)], ("rsvps", "b", 1): [(-5, -5)]}), NOW)
    assert (found.missing, found.verdict) == (0, Verdict.WHOLE)


def test_a_jump_just_arrived_may_still_be_filled() -> None:
    found = balance(content({("rsvps", "a", 1): [(1, 40), (HUGE, HUGE)]}, noticed=JUST_NOW), NOW)
    assert (found.channels[0].jumps, found.channels[0].in_flight, found.verdict) == ((), 0, Verdict.WHOLE)


@pytest.mark.parametrize(("after", "missing"), [(LARGEST_JUMP + 2, LARGEST_JUMP), (LARGEST_JUMP + 3, 0)])
def test_up_to_the_limit_what_lies_between_is_missing(after: int, missing: int) -> None:
    found = balance(content({("rsvps", "a", 1): [(1, 1), (after, after)]}), NOW)
    assert found.channels[0].missing == missing
    assert bool(found.channels[0].jumps) is not bool(missing)
    assert found.verdict is Verdict.MISSING


def test_gaps_and_tails_before_a_jump_are_found_all_the_same() -> None:
    runs = {("rsvps", "a", 1): [(1, 40), (42, 50), (HUGE, HUGE)]}
    claims = {("a", 1): [(49, LONG_AGO), (53, LONG_AGO), (HUGE + 2, LONG_AGO)]}
    rsvps = of(content(runs, claims))
    assert rsvps.gaps == (Gap("a", 1, 41, 41), Gap("a", 1, 51, 53), Gap("a", 1, HUGE + 1, HUGE + 2))
    assert rsvps.jumps == (Jump("a", 1, 50, HUGE),)


@pytest.mark.parametrize("seen", [[(1, 40)], []])
def test_a_claim_that_somebody_made_up_is_a_finding_and_no_missing_records(seen: list[tuple[int, int]]) -> None:
    runs = {("rsvps", "a", 1): seen} if seen else {}
    found = balance(content(runs, {("a", 1): [(40, LONG_AGO), (41, LONG_AGO), (HUGE, LONG_AGO)]}), NOW)
    rsvps = found.channels[0]
    assert rsvps.gaps == (Gap("a", 1, 41, 41),)
    assert rsvps.jumps == (Jump("a", 1, 40, HUGE),)


def test_numbers_at_both_ends_of_64_bits_are_no_trouble() -> None:
    low, high = -(2**63), 2**63 - 1
    found = balance(content({("rsvps", "a", 1): [(low, low), (high, high)]}, {("a", 1): [(high, LONG_AGO)]}), NOW)
    assert found.channels[0].jumps == (Jump("a", 1, low, high),)
    assert found.missing == 0
