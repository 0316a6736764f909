"""The demo's queries as what they are: functions of frames."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
import vl_convert
from pyspark.sql import DataFrame, SparkSession

from penstock.demo.pipeline import app
from penstock.pipeline.description import PageSpec
from penstock.simulate.rsvps import Rsvps
from penstock.testing.frames import answer, frame, rows

DEMO = app.describe()
NOON = int(datetime(2026, 1, 2, 12, tzinfo=UTC).timestamp())
START = f"unix_seconds(window.start) - {NOON}"

Given = Callable[..., DataFrame]


@pytest.fixture
def given(spark: SparkSession) -> Given:
    """The channel of the demo with these answers; each dict tells what is special about one."""

    def make(*answers: Mapping[str, Any]) -> DataFrame:
        return frame(spark, DEMO.channels["rsvps"], *(rsvp(**told) for told in answers))

    return make


def rsvp(
    response: str = "yes",
    guests: int = 0,
    at: float = 0,
    member: int = 1,
    country: str = "nl",
    city: str = "Utrecht",
    topics: tuple[str, ...] = ("Python",),
    venue: int | None = None,
) -> dict[str, Any]:
    """An answer, `at` seconds after noon."""
    return {
        "rsvp_id": 1,
        "response": response,
        "guests": guests,
        "mtime": int((NOON + at) * 1000),
        "member": {"member_id": member, "member_name": "Ada"},
        "event": {"event_id": "e", "event_name": "An evening", "time": (NOON + 86400) * 1000},
        "group": {
            "group_id": 7,
            "group_name": "A group",
            "group_city": city,
            "group_country": country,
            "group_lat": 52.1,
            "group_lon": 5.1,
            "group_topics": [{"urlkey": topic.lower(), "topic_name": topic} for topic in topics],
        },
        "venue": venue and {"venue_id": venue, "venue_name": f"Hall {venue}", "lat": 52.0, "lon": 5.0},
    }


def test_a_yes_counts_with_its_guests_in_its_country_and_window(given: Given) -> None:
    rsvps = given({"guests": 2}, {}, {"at": 10}, {"country": "de", "at": 9.999}, {"response": "no", "guests": 5})
    assert rows(answer(app, "people_by_country", rsvps), START, "country", "people", "seen.count") == [
        (0, "de", 1, 1),
        (0, "nl", 4, 2),
        (10, "nl", 1, 1),
    ]


def test_each_topic_of_a_yes_trends_in_every_window_of_its_minute(given: Given) -> None:
    rsvps = given({"topics": ("Python", "Spark")}, {"topics": ("Python",)}, {"response": "no"}, {"topics": ()})
    found = rows(answer(app, "trending_topics", rsvps), START, "topic", "yes")
    assert found == [(start, *row) for start in range(-50, 1, 10) for row in (("Python", 2), ("Spark", 1))]


def test_yes_and_no_are_counted_per_city(given: Given) -> None:
    rsvps = given({}, {}, {"response": "no"}, {"city": "Bonn", "response": "no"})
    assert rows(answer(app, "answers_by_city", rsvps), "city", "response", "answers", "seen.count") == [
        ("Bonn", "no", 1, 1),
        ("Utrecht", "no", 1, 1),
        ("Utrecht", "yes", 2, 2),
    ]


def test_a_member_who_answers_twice_is_one_member(given: Given) -> None:
    rsvps = given({"member": 1}, {"member": 1, "response": "no"}, {"member": 2}, {"member": 1, "at": 60})
    assert rows(answer(app, "distinct_members", rsvps), START, "members", "seen.count") == [(0, 2, 3), (60, 1, 1)]


def test_a_busy_venue_counts_the_people_who_come(given: Given) -> None:
    crowd = [{"venue": 3, "guests": 7}, {"venue": 3}]
    rsvps = given(*crowd, {"venue": 4, "response": "no", "guests": 9}, {"venue": 5}, {"venue": None, "guests": 9})
    assert rows(answer(app, "busy_venues", rsvps), START, "venue_id", "name", "lat", "lon", "people", "seen.count") == [
        (0, 3, "Hall 3", 52.0, 5.0, 9, 2)
    ]


def test_what_the_simulated_feed_sends_fits_the_channel(spark: SparkSession) -> None:
    world = Rsvps(seed=7)
    sent = [orjson.loads(world(sender, 1, NOON * 1_000_000)) for sender in range(50)]
    assert frame(spark, DEMO.channels["rsvps"], *sent).count() == 50


@pytest.mark.parametrize("page", DEMO.pages, ids=lambda page: page.channel)
def test_its_charts_can_be_drawn(page: PageSpec) -> None:
    spec = page.spec()
    assert spec is not None
    assert vl_convert.vegalite_to_vega(dict(spec))["marks"]
