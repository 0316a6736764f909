from collections import Counter
from typing import Any

import orjson

from penstock.simulate.rsvps import Rsvps

START = 1_700_000_000_000_000


def documents(seed: int, count: int, start: int = START, rate: int = 200) -> list[dict[str, Any]]:
    rsvps = Rsvps(seed)
    return [orjson.loads(rsvps(n % 20, n // 20 + 1, start + n * 1_000_000 // rate)) for n in range(count)]


def topics(some: list[dict[str, Any]]) -> Counter[str]:
    return Counter(topic["topic_name"] for rsvp in some for topic in rsvp["group"]["group_topics"])


def test_the_same_seed_makes_the_same_documents() -> None:
    assert documents(7, 50) == documents(7, 50)


def test_another_seed_makes_others() -> None:
    assert Rsvps(7)(3, 1, START) != Rsvps(8)(3, 1, START)


def test_any_past_document_can_be_made_again_alone() -> None:
    walked = Rsvps(7)
    for n in range(1, 100):
        walked(0, n, START)
    assert walked(5, 42, START) == Rsvps(7)(5, 42, START)


def test_a_document_has_the_shape_of_an_rsvp() -> None:
    rsvp = documents(7, 1)[0]
    assert list(rsvp) == ["rsvp_id", "response", "guests", "mtime", "visibility", "venue", "member", "event", "group"]
    assert set(rsvp["venue"]) == {"venue_id", "venue_name", "lat", "lon"}
    assert set(rsvp["member"]) == {"member_id", "member_name"}
    assert set(rsvp["event"]) == {"event_id", "event_name", "time"}
    assert set(rsvp["group"]) == {
        "group_id", "group_name", "group_city", "group_country", "group_lat", "group_lon", "group_topics",
    }  # fmt: skip
    assert set(rsvp["group"]["group_topics"][0]) == {"urlkey", "topic_name"}


def test_its_own_time_is_the_time_of_the_rsvp_and_its_event_lies_ahead() -> None:
    for n, rsvp in enumerate(documents(7, 200)):
        assert rsvp["mtime"] == (START + n * 5_000) // 1_000
        assert 0 < rsvp["event"]["time"] - rsvp["mtime"] < 12 * 24 * 3_600_000


def test_the_spread_is_realistic() -> None:
    found = documents(7, 20_000)
    assert len({rsvp["rsvp_id"] for rsvp in found}) == len(found)
    countries = Counter(rsvp["group"]["group_country"] for rsvp in found)
    assert len(countries) >= 20
    assert countries.most_common(1)[0][0] == "us"
    assert 40 <= len({rsvp["group"]["group_city"] for rsvp in found}) <= 60
    assert 0.70 < sum(rsvp["response"] == "yes" for rsvp in found) / len(found) < 0.80
    assert sum(rsvp["guests"] == 0 for rsvp in found) > len(found) / 2
    assert all(2 <= len(rsvp["group"]["group_topics"]) <= 5 for rsvp in found)
    assert 1_000 < len({rsvp["member"]["member_id"] for rsvp in found}) < 10_000
    assert any(not rsvp["group"]["group_city"].isascii() for rsvp in found)
    for rsvp in found:
        assert abs(rsvp["venue"]["lat"] - rsvp["group"]["group_lat"]) < 0.2
        assert abs(rsvp["venue"]["lon"] - rsvp["group"]["group_lon"]) < 0.2


def test_a_document_has_some_hundred_bytes() -> None:
    rsvps = Rsvps(7)
    sizes = [len(rsvps(0, n, START)) for n in range(500)]
    assert all(500 < size < 950 for size in sizes)


def test_what_is_trending_moves() -> None:
    def trending(minute: int) -> set[str]:
        return {name for name, _ in topics(documents(7, 4_000, START + minute * 60_000_000)).most_common(8)}

    assert len({frozenset(trending(minute)) for minute in range(0, 20, 4)}) >= 3
