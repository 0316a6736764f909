"""The alarms that stand, and the doubts about the verdict."""

from collections.abc import Mapping
from typing import Any

from tests.audit.watching import Watch, balance, channel, hop, query

from penstock.audit.alarms import Alarms, Doubts
from penstock.audit.balance import ChannelBalance
from penstock.audit.hops import Hop
from penstock.audit.rules import Snapshot
from penstock.audit.settings import AuditSettings


def test_nothing_to_look_at_is_no_alarm() -> None:
    assert Alarms().look(Snapshot(0, 0.0, AuditSettings(), balance(), {})) == []


def test_an_alarm_that_lasts_keeps_its_beginning_and_tells_the_facts_of_now() -> None:
    watch = Watch()
    (first,) = watch.look(hop(missing=1))
    (later,) = watch.look(hop(missing=2))
    assert later.since == first.since
    assert "misses 2 records" in later.text


def test_an_alarm_ends_when_it_was_absent_for_ten_seconds() -> None:
    watch = Watch()
    watch.look(hop(missing=1))
    assert watch.stay(9, hop()) == ["missing"]
    assert watch.stay(1, hop()) == []


def test_an_alarm_that_comes_and_goes_is_one_alarm() -> None:
    watch = Watch()
    (first,) = watch.look(hop(missing=1))
    for _ in range(10):
        assert watch.stay(9, hop()) == ["missing"]
        assert watch.look(hop(missing=1))[0].since == first.since


def test_a_stage_in_trouble_with_two_channels_is_one_alarm_about_both() -> None:
    other = hop("query:by_country", "cities", "by_country", missing=2)
    (alarm,) = Watch().look(query(missing=1), other)
    assert "1 record of rsvps" in alarm.text
    assert "2 records of cities" in alarm.text


def test_words_that_nobody_expects_are_no_alarm() -> None:
    strange = {"x": None, "y": {"nodes": 5}, "z": {"nodes": {"query:q": "?"}}, "run": {"usage": 7}}
    description = {**strange, "w": {"at": "noon", "nodes": {"query:by_country": {"lag": "far", "latency": []}}}}
    assert Watch().names(query(), channel(latency=None), processes=description) == []


SETTINGS = AuditSettings()
AWAY = SETTINGS.away_after.total_seconds()
STALE = SETTINGS.stale_after.total_seconds()
EVERY = 2.0


def waiting_hop(taken: int, in_flight: int) -> Hop:
    return query(taken=taken, in_flight=in_flight)


class Watching:
    """Looks every two seconds, from when the auditor has watched for long enough."""

    def __init__(self, doubts: Doubts | None = None) -> None:
        self._doubts = doubts or Doubts()
        self.elapsed = AWAY

    def look(
        self,
        seconds: float = 0.0,
        parts: tuple[Hop | ChannelBalance, ...] = (),
        processes: Mapping[str, Any] | None = None,
        **told: Any,
    ) -> list[tuple[str, str]]:
        """What is doubted after so many seconds of the same."""
        until = self.elapsed + seconds
        while True:
            found_balance = balance(*parts, **told)
            snapshot = Snapshot(int(self.elapsed * 1e6), self.elapsed, SETTINGS, found_balance, processes or {})
            found: list[tuple[str, str]] = [(doubt.kind, doubt.subject) for doubt in self._doubts.look(snapshot)]
            if self.elapsed >= until:
                return found
            self.elapsed += EVERY


def spoken(at: float, **said: object) -> dict[str, Any]:
    return {"at": int(at * 1e6), **said}


def test_all_is_well() -> None:
    assert Watching().look(STALE, (waiting_hop(100, 0),)) == []


def test_an_auditor_that_has_just_begun_knows_nothing() -> None:
    snapshot = Snapshot(0, 0.0, SETTINGS, balance(), {})
    assert [(doubt.kind, doubt.subject) for doubt in Doubts().look(snapshot)] == [("audit", "audit")]


def test_an_account_that_says_nothing_new_while_records_wait() -> None:
    watching = Watching()
    assert watching.look(STALE - EVERY, (waiting_hop(100, 7),)) == []
    assert watching.look(EVERY, (waiting_hop(100, 7),)) == [("account", "query:by_country")]
    # It goes on, and is known again.
    assert watching.look(0, (waiting_hop(104, 3),)) == []


def test_an_account_of_a_stage_without_input_may_be_old() -> None:
    watching = Watching()
    assert watching.look(10 * STALE, (waiting_hop(100, 0),)) == []
    # What has just come is in flight, and no doubt.
    assert watching.look(0, (waiting_hop(100, 5),)) == []


def test_a_stage_is_not_expected_to_be_quicker_than_its_interval() -> None:
    watching = Watching(Doubts({"query:by_country": 60.0}))
    assert watching.look(110, (waiting_hop(100, 7),)) == []
    assert watching.look(10, (waiting_hop(100, 7),)) == [("account", "query:by_country")]


def test_a_process_that_reports_nothing() -> None:
    assert ("process", "analyse") in Watching().look(14, processes={"analyse": spoken(0)})


def test_a_process_that_ends_again_and_again() -> None:
    def run(deaths: int, lately: int, pid: int | None = 7) -> dict[str, Any]:
        used = {"pid": pid, "deaths": deaths, "lately": lately, "error": "OutOfMemoryError"}
        return {"run": {"usage": {"analyse": used}}}

    # An auditor that has just begun knows it, too.
    assert Watching().look(0, processes=run(0, 0)) == []
    assert Watching().look(0, processes=run(1, 1)) == []
    assert Watching().look(0, processes=run(1, 1, None)) == [("process", "analyse")]
    assert Watching().look(0, processes=run(2, 2)) == [("process", "analyse")]
    # It stays: what happened long ago counts no more.
    assert Watching().look(0, processes=run(2, 0)) == []


def test_a_process_that_was_started_again_and_has_not_reported() -> None:
    def run(reported: int | None) -> dict[str, Any]:
        usage = {"analyse": {"pid": 8, "deaths": 1, "lately": 1}}
        return {"run": {"usage": usage}, "analyse": {"pid": reported, "at": 0}}

    assert Watching().look(0, processes=run(7)) == [("process", "analyse")]
    assert Watching().look(0, processes=run(8)) == []


def test_a_query_that_has_not_started_yet() -> None:
    processes = {"analyse": {"nodes": {"query:by_country": {"state": "starting"}}}}
    assert Watching().look(0, processes=processes) == [("query", "query:by_country")]


def test_an_account_in_real_time_may_be_as_old_as_a_batch() -> None:
    nodes = {"analyse": {"nodes": {"query:by_country": {"mode": "real-time"}}}}
    watching = Watching(Doubts(batch=60))

    def accounts() -> list[str]:
        return [kind for kind, _ in watching.look(60, (waiting_hop(100, 7),), processes=nodes) if kind == "account"]

    assert accounts() == []
    assert accounts() == ["account"]


def test_records_that_wait_on_disk() -> None:
    processes = {"collect": {"nodes": {"source:rsvps": {"spooled": 12}}}}
    assert Watching().look(0, processes=processes) == [("spool", "source:rsvps")]


def test_a_query_that_does_not_run_or_whose_account_is_not_complete() -> None:
    nodes = {
        "query:a": {"state": "running", "accounting": "current"},
        "query:b": {"state": "restarting", "accounting": "current", "error": "it fails"},
        "query:c": {"state": "running", "accounting": "rebuilding"},
        "source:d": {"state": "stopped"},
    }
    found = Watching().look(0, processes={"analyse": {"nodes": nodes}})
    assert found == [("query", "query:b"), ("account", "query:c")]


def test_an_auditor_that_reads_nothing_while_entries_wait() -> None:
    parts, watching = (channel(unread=5),), Watching()
    assert watching.look(STALE - EVERY, parts, as_of=1) == []
    assert watching.look(EVERY, parts, as_of=1) == [("audit", "audit")]


def test_a_store_that_cannot_be_written() -> None:
    said: dict[str, Any] = {
        "load": {"at": 0, "nodes": {"store:redis/by_country": {"state": "waiting", "why": "Redis: MISCONF"}}}
    }
    assert ("store", "store:redis/by_country") in Watching().look(0, processes=said)
    said["load"]["nodes"] = {"store:redis/by_country": {"state": "loading"}}
    assert ("store", "store:redis/by_country") not in Watching().look(0, processes=said)
