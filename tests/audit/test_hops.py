"""From what a stage says and what the ledger counted to the balance of a hop."""

from dataclasses import replace

import pytest
from tests.audit.watching import channel

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.balance import source_hop
from penstock.audit.content import ChannelCounts, Content, Numbered, Run
from penstock.audit.findings import Kind, Watched
from penstock.audit.hops import Gap, Hop, begun_late, hops, paths, without_account
from penstock.core.record import GENERATIONS

RSVPS = channel(records=100, only_dead=2, in_flight=3, missing=1, gaps=(Gap("a", 1, 7, 7),))
OUTCOMES = {Outcome.PASSED: 60, Outcome.FILTERED: 25, Outcome.LATE: 3, Outcome.DUPLICATE: 1, Outcome.REFUSED: 1}
QUERY = Account(
    "query:by_country",
    "life",
    0,
    {"rsvps": Share({0: 0}, {0: 90}, 90, OUTCOMES)},
    step=1,
    wrote={"by_country": {0: 40}},
    conserved=True,
)


def content(*accounts: Account, folded: int = 60, records: int = 100, until: int = 100, read: int = 50) -> Content:
    return Content(
        channels={
            "rsvps": Watched("rsvps", Kind.SOURCE, ("source:rsvps",)),
            "by_country": Watched("by_country", Kind.RESULT, ("query:by_country",)),
        },
        counts={"rsvps": ChannelCounts(records), "by_country": ChannelCounts(read)},
        numbered={},
        runs={},
        claims={},
        blinds=[],
        latencies={},
        since={"rsvps": {0: 0}, "by_country": {0: 0}},
        until={"rsvps": {0: until}, "by_country": {0: read}},
        folded={"by_country": folded},
        accounts={account.stage: account for account in accounts},
    )


def of(found: Content, stage: str = "query:by_country") -> Hop:
    (hop,) = (hop for hop in (source_hop(found, RSVPS), *hops(found)) if hop.stage == stage)
    return hop


@pytest.mark.parametrize("stage", ["source:rsvps", "query:by_country"])
def test_each_hop_adds_up(stage: str) -> None:
    hop = of(content(QUERY), stage)
    assert hop.due == sum(hop.outcomes.values()) + hop.in_flight + hop.missing


def test_what_the_channel_holds_and_the_stage_has_not_read_is_in_flight() -> None:
    hop = of(content(QUERY))
    assert (hop.due, hop.taken, hop.in_flight, hop.missing) == (100, 90, 10, 0)
    assert (hop.reads, hop.writes) == ("rsvps", "by_country")


def test_a_record_that_the_stage_passed_by_is_missing() -> None:
    share = replace(QUERY.shares["rsvps"], taken=89, outcomes={**OUTCOMES, Outcome.PASSED: 59})
    hop = of(content(replace(QUERY, shares={"rsvps": share}), folded=59))
    assert (hop.taken, hop.in_flight, hop.missing) == (89, 10, 1)


def test_a_record_that_is_in_no_row_of_the_result_is_missing() -> None:
    hop = of(content(QUERY, folded=58))
    assert (hop.missing, hop.outcomes[Outcome.PASSED]) == (2, 58)
    assert hop.due == sum(hop.outcomes.values()) + hop.in_flight + hop.missing


def test_rows_that_the_ledger_has_not_read_are_waited_for() -> None:
    assert of(content(QUERY, folded=10, read=39)).missing == 0


def test_a_query_that_does_not_count_its_records_is_not_accused() -> None:
    hop = of(content(replace(QUERY, conserved=False), folded=0))
    assert hop.missing == 0
    assert "not checked" in hop.note


def test_records_in_rows_of_a_batch_that_has_not_ended_have_passed() -> None:
    """A batch in real time lasts a minute; the balance is live all the same."""
    hop = of(content(QUERY, folded=65))
    assert (hop.due, hop.taken, hop.in_flight, hop.missing) == (100, 95, 5, 0)
    assert hop.outcomes[Outcome.PASSED] == 65


def test_the_rows_of_a_first_batch_that_has_not_ended_have_passed() -> None:
    started = replace(QUERY, step=0, wrote={}, shares={"rsvps": Share({0: 0}, {0: 0}, 0)})
    hop = of(content(started, folded=65))
    assert (hop.due, hop.taken, hop.in_flight, hop.outcomes[Outcome.PASSED]) == (100, 65, 35, 65)
    unknown = of(content(replace(started, conserved=False), folded=65))
    assert (unknown.in_flight, unknown.note) == (100, "")


def test_rows_cannot_hold_more_than_is_in_flight() -> None:
    hop = of(content(QUERY, folded=1_000))
    assert (hop.due, hop.in_flight, hop.outcomes[Outcome.PASSED]) == (100, 0, 70)


def test_a_stage_without_an_account_has_a_line_and_is_a_doubt() -> None:
    found = replace(content(), stages={"source:rsvps": (), "query:by_country": ("rsvps",)})
    hop = of(found)
    assert (hop.due, hop.taken, hop.in_flight, hop.writes) == (100, 0, 100, "by_country")
    (doubt,) = without_account(found)
    assert (doubt.kind, doubt.subject) == ("account", "query:by_country")
    assert not list(without_account(replace(found, accounts={QUERY.stage: QUERY})))


def test_a_stage_without_an_account_and_without_records_is_no_doubt() -> None:
    empty = replace(content(records=0, until=0), stages={"query:by_country": ("rsvps",)})
    assert not list(without_account(empty))


LATER = replace(QUERY, shares={"rsvps": Share({0: 40}, {0: 90}, 50, {Outcome.PASSED: 50})})


def test_an_account_that_begins_after_its_channel_is_found() -> None:
    (found,) = begun_late(content(LATER), {"rsvps": {0: 0}})
    assert (found.kind, found.stage, found.count) == ("unexplained", "query:by_country", 40)


def test_a_later_beginning_that_is_explained_is_no_finding() -> None:
    """What the channel did not hold any more cannot be read; and a query may be declared to begin later."""
    assert not list(begun_late(content(LATER), {"rsvps": {0: 40}}))
    assert not list(begun_late(content(replace(LATER, start_declared=True)), {"rsvps": {0: 0}}))
    assert not list(begun_late(content(QUERY), {"rsvps": {0: 0}}))


def test_a_stage_that_took_more_than_there_is_has_a_surplus() -> None:
    share = replace(QUERY.shares["rsvps"], taken=101, until={0: 100}, outcomes={Outcome.PASSED: 101})
    assert of(content(replace(QUERY, shares={"rsvps": share}), folded=101)).surplus == 1


def test_a_result_of_single_records_is_counted_by_their_numbers() -> None:
    runs = {("by_country", "a", 1): [Run(1, 40, 0), Run(42, 60, 0)], ("rsvps", "a", 1): [Run(1, 100, 0)]}
    numbered = {("rsvps", "a", 1): Numbered(100)}
    found = replace(content(QUERY), folded={}, runs=runs, numbered=numbered)
    assert of(found).missing == 1
    twice = replace(found, numbered={("rsvps", "a", 1): Numbered(101)})
    assert "holds some records twice" in of(twice).note
    nameless = replace(found, counts={**found.counts, "rsvps": ChannelCounts(100, without_identity=1)})
    assert "have no number" in of(nameless).note


def test_rows_that_were_outdated_before_they_were_counted_prove_nothing() -> None:
    """A ledger that was lost finds a compacted channel: 50 offsets, 20 rows."""
    found = content(QUERY, folded=20)
    hop = of(replace(found, counts={**found.counts, "by_country": ChannelCounts(20)}))
    assert hop.missing == 0
    assert "before the ledger" in hop.note


def test_a_query_that_began_anew_is_not_accused() -> None:
    hop = of(replace(content(QUERY, folded=20), reborn={"query:by_country"}))
    assert hop.missing == 0
    assert "earlier generation" in hop.note


def test_in_a_later_life_only_its_own_rows_count() -> None:
    """Rows tell their life: what was written before is not mixed up with it."""
    later = replace(QUERY, generation="another", number=2)
    whole = replace(content(later, folded=2 * GENERATIONS + 60), reborn={"query:by_country"})
    assert (of(whole).missing, of(whole).note) == (0, "")
    assert of(replace(whole, folded={"by_country": 2 * GENERATIONS + 58})).missing == 2
    # Nothing of this life is there yet, and it should be.
    assert of(replace(whole, folded={"by_country": GENERATIONS + 60})).missing == 60
    beyond = of(replace(whole, folded={"by_country": 3 * GENERATIONS + 60}))
    assert (beyond.missing, beyond.note.endswith(": not checked")) == (0, True)


def test_a_feed_that_reads_a_compacted_result_misses_nothing() -> None:
    feed = Account("feed:by_country", "x", 0, {"by_country": Share({0: 0}, {0: 50}, 12, {Outcome.PASSED: 12})})
    hop = of(content(QUERY, feed), "feed:by_country")
    assert (hop.due, hop.in_flight, hop.missing) == (12, 0, 0)
    assert hop.note.startswith("38 rows ")


def test_offsets_that_are_no_records_are_not_missed() -> None:
    """Ten markers of transactions lie among the offsets; the stage has read them all and taken 85."""
    share = replace(QUERY.shares["rsvps"], taken=85, outcomes={**OUTCOMES, Outcome.PASSED: 55})
    assert of(content(replace(QUERY, shares={"rsvps": share}), folded=55, records=90)).missing == 0


def test_offsets_at_the_end_that_are_no_records_are_not_in_flight() -> None:
    """An aborted transaction lies at the end: no reader ever gets beyond it."""
    hop = of(content(QUERY, records=90))
    assert (hop.in_flight, hop.missing) == (0, 0)


def test_where_both_have_read_the_same_markers_hide_nothing() -> None:
    share = Share({0: 0}, {0: 100}, 89, {**OUTCOMES, Outcome.PASSED: 59})
    assert of(content(replace(QUERY, shares={"rsvps": share}), folded=59, records=90)).missing == 1


def test_offsets_beyond_the_ledger_are_not_missed() -> None:
    """A query covers the aborted transaction at the end, which the ledger never reads; a loss before it is seen."""
    taken = Share({0: 0}, {0: 95}, 90, OUTCOMES)
    assert of(content(replace(QUERY, shares={"rsvps": taken}), records=90, until=90)).missing == 0
    assert of(content(replace(QUERY, shares={"rsvps": taken}), records=91, until=91)).missing == 1


def test_a_stage_that_took_more_than_there_is_says_so() -> None:
    share = replace(QUERY.shares["rsvps"], taken=95)
    assert of(content(replace(QUERY, shares={"rsvps": share}))).note.startswith("it reports 5 ")


def test_what_a_source_drops_is_among_its_outcomes() -> None:
    dropped = Account("source:rsvps", "x", 0, {"rsvps": Share({}, {}, 4, {Outcome.DUPLICATE: 4})})
    hop = of(content(QUERY, dropped), "source:rsvps")
    assert hop.outcomes[Outcome.DUPLICATE] == 4
    assert hop.due == 100 + 2 + 4 + 3 + 1


def test_end_to_end_the_outcomes_of_both_hops_add_up() -> None:
    (path,) = paths([source_hop(content(QUERY), RSVPS), *hops(content(QUERY))])
    assert path.stage == "source:rsvps → query:by_country"
    assert path.due == sum(path.outcomes.values()) + path.in_flight + path.missing
    assert path.due == of(content(QUERY), "source:rsvps").due
    assert (path.outcomes[Outcome.REFUSED], path.in_flight, path.missing) == (3, 13, 1)


def test_late_records_are_named_under_their_channel() -> None:
    late = replace(QUERY.shares["rsvps"], late={"kiosk": {"2": [(5, 6)]}})
    joined = replace(QUERY, shares={"rsvps": late, "clicks": Share({0: 0}, {0: 4}, 4, {Outcome.PASSED: 4})})
    found = {hop.reads: hop.late for hop in hops(content(joined))}
    assert found == {"rsvps": (Gap("kiosk", 2, 5, 6),), "clicks": ()}


def test_a_gap_is_told_as_people_read_it() -> None:
    assert Gap("a", 1, 1002, 1002).numbers == "1002"
    assert Gap("a", 1, 1004, 2999).numbers == "1004–2999 (1,996 records)"
