"""What the alarms look at."""

from typing import Any

import pytest

from penstock.audit.settings import AuditSettings
from penstock.audit.sight import Sight, mappings, number, senders


def sight(balance: dict[str, Any] | None = None, processes: dict[str, Any] | None = None) -> Sight:
    return Sight(0, 0.0, AuditSettings(), balance or {}, processes or {})


def test_the_nodes_of_all_processes_are_seen_together() -> None:
    words = {"load": {"nodes": {"store:redis/a": {"count": 1}}}, "audit": {"nodes": {"channel:a": {"count": 2}}}}
    assert sight(processes=words).nodes == {"store:redis/a": {"count": 1}, "channel:a": {"count": 2}}


@pytest.mark.parametrize("word", [None, [], "x", {}, {"nodes": None}, {"nodes": []}, {"nodes": {"a": 1}}])
def test_a_word_of_another_kind_tells_of_no_node(word: object) -> None:
    assert sight(processes={"load": word}).nodes == {}


def test_the_newest_record_of_a_channel_is_that_of_its_senders_or_of_its_last_minute() -> None:
    lives = [{"sender": "a", "newest": 61_000_000}, {"sender": "b", "newest": None}]
    channel = {"channel": "rsvps", "by_sender": lives}
    assert sight({"channels": [channel]}).newest("rsvps") == 61_000_000
    assert sight({"channels": [channel], "minutes": {"rsvps": [[1, 5], [2, 9]]}}).newest("rsvps") == 120_000_000
    assert sight({"channels": [{"channel": "rsvps"}]}).newest("rsvps") == 0


def test_all_senders_are_better_than_the_worst() -> None:
    assert list(senders({"by_sender": [{"sender": "a"}], "worst": []})) == [{"sender": "a"}]
    assert list(senders({"worst": [{"sender": "b"}]})) == [{"sender": "b"}]
    assert list(senders({})) == []


@pytest.mark.parametrize("value", [None, "5", True, [], {}])
def test_what_is_no_number_was_not_told(value: object) -> None:
    assert number(value) is None


def test_what_is_no_list_of_mappings_was_not_told() -> None:
    assert list(mappings("text")) == []
    assert list(mappings([1, {"a": 1}, None])) == [{"a": 1}]
