"""Senders that are silent or slow."""

from typing import Any

from tests.audit.rules.watching import SECOND, Watch, channel, hop, sender

from penstock.audit.rules.base import Alarm


def sending(watch: Watch, seconds: int, *quiet: dict[str, Any], key: str = "by_sender") -> list[Alarm]:
    """A channel that receives a record of `loud` each second, and others that do not send."""
    found: list[Alarm] = []
    for _ in range(seconds):
        loud = sender("loud", watch.now + SECOND, (watch.now // SECOND) % 100_000)
        found = watch.look(hop(), channel(**{key: [loud, *quiet]}))
    return found


def test_a_sender_that_stops_while_others_send_is_silent() -> None:
    watch = Watch()
    stopped = sender("kiosk 7", watch.now)
    assert sending(watch, 60, stopped) == []
    (alarm,) = sending(watch, 15, stopped)
    assert (alarm.name, alarm.stage, alarm.since) == ("silent", "source:rsvps", stopped["newest"])
    assert alarm.text == 'rsvps receives nothing from kiosk 7 for 75 s: see "penstock audit --senders".'


def test_a_silent_sender_that_sends_again_is_not_silent() -> None:
    watch = Watch()
    assert sending(watch, 100, sender("kiosk 7", watch.now)) != []
    assert sending(watch, 20, sender("kiosk 7", watch.now + 20 * SECOND, 101)) == []


def test_the_worst_senders_are_enough_to_find_a_silent_one() -> None:
    watch = Watch()
    assert [alarm.name for alarm in sending(watch, 100, sender("kiosk 7", watch.now), key="worst")] == ["silent"]


def test_the_minutes_of_a_channel_tell_that_it_still_receives() -> None:
    watch = Watch()
    stopped, names = sender("kiosk 7", watch.now), list[str]()
    for _ in range(180):
        minutes = {"rsvps": [[watch.now // (60 * SECOND), 5]]}
        names = watch.names(hop(), channel(worst=[stopped]), minutes=minutes)
    assert names == ["silent"]


def test_when_the_whole_channel_is_silent_no_sender_is() -> None:
    watch = Watch()
    parts = hop(), channel(by_sender=[sender("a", watch.now), sender("b", watch.now - 30 * SECOND)])
    assert watch.stay(300, *parts) == []


def test_a_silent_sender_is_told_while_its_channel_receives() -> None:
    watch = Watch()
    stopped = sender("kiosk 7", watch.now)
    assert sending(watch, 100, stopped) != []
    rest = hop(), channel(by_sender=[sender("loud", watch.now), stopped])
    assert watch.stay(60, *rest) == ["silent"]
    assert watch.stay(20, *rest) == []


def test_a_sender_that_began_a_new_life_is_not_silent() -> None:
    watch = Watch()
    before = watch.now
    for _ in range(200):
        generations = [sender("a", before), sender("a", watch.now, epoch=2)]
        assert watch.names(hop(), channel(by_sender=generations)) == []


def test_a_sender_of_few_records_has_no_habit_to_break() -> None:
    watch = Watch()
    assert sending(watch, 200, sender("once", watch.now, records=9)) == []


def test_a_sender_that_sends_rarely_may_be_quiet_for_longer() -> None:
    watch = Watch()
    for minute in range(5):
        assert sending(watch, 40, sender("rare", watch.now, 100 + minute)) == []
    last = sender("rare", watch.now, 105)
    assert sending(watch, 150, last) == []
    assert [alarm.name for alarm in sending(watch, 150, last)] == ["silent"]


def test_a_sender_that_left_long_ago_is_not_silent() -> None:
    watch = Watch()
    assert sending(watch, 100, sender("gone", watch.now - 86_400 * SECOND)) == []


def test_an_audit_that_is_behind_takes_nobody_for_silent() -> None:
    watch = Watch()
    for step in range(200):
        then = watch.now - (3_600 - 10 * step) * SECOND
        generations = [sender(name, then, 100 + step) for name in "ab"]
        assert watch.names(hop(), channel(by_sender=generations)) == []


def test_twenty_silent_senders_are_named_and_the_rest_is_counted() -> None:
    watch = Watch()
    (alarm,) = sending(watch, 100, *(sender(f"s{number:03}", watch.now) for number in range(120)))
    assert "s019 for" in alarm.text
    assert "s020" not in alarm.text
    assert "and 100 more" in alarm.text


def late(name: str, count: int, mean: float) -> dict[str, Any]:
    return sender(name, 0, latency={"count": count, "min": 0.0, "mean": mean, "max": mean})


def test_a_sender_that_is_slow_lately_is_named() -> None:
    watch = Watch()
    fast = {"latency": {"p50": 2.0, "p99": 9.0}}
    watch.look(hop(), channel(by_sender=[late("a", 100, 2.0), late("b", 100, 2.0)], **fast))
    (alarm,) = watch.look(hop(), channel(by_sender=[late("a", 200, 2.0), late("b", 200, 4_001.0)], **fast))
    assert (alarm.name, alarm.stage) == ("slow-sender", "source:rsvps")
    assert "b (8.0 s)" in alarm.text
    after = hop(), channel(by_sender=[late("a", 300, 2.0), late("b", 200, 4_001.0)], **fast)
    assert watch.stay(400, *after) == []


def test_a_mean_that_is_rounded_makes_nobody_slow() -> None:
    watch = Watch()
    fast = {"latency": {"p50": 2.0}}
    watch.look(hop(), channel(by_sender=[late("a", 100_000_000, 2.0)], **fast))
    assert watch.names(hop(), channel(by_sender=[late("a", 100_000_003, 2.001)], **fast)) == []


def test_nobody_is_slow_where_all_are() -> None:
    watch = Watch()
    slow = {"latency": {"p50": 7_000.0, "p99": 20_000.0}}
    watch.look(hop(), channel(by_sender=[late("a", 1, 8_000.0)], **slow))
    assert watch.names(hop(), channel(by_sender=[late("a", 100, 8_000.0)], **slow)) == []
