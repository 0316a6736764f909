"""Ads: every click has its impression, once, and some time after it."""

from collections import Counter
from statistics import median
from typing import Any

import orjson
import pytest
from ads import ADS, VISITORS, Ads

START = 1_700_000_000_000_000
SENDERS = 4
FIELDS = ["type", "impression", "ad", "campaign", "visitor", "at"]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """A quarter of an hour of four sites, ten records a second of each."""
    ads = Ads(seed=7)
    return [
        orjson.loads(ads.document(n % SENDERS, n // SENDERS + 1, START + n // SENDERS * 100_000))
        for n in range(SENDERS * 9_000)
    ]


def test_a_document_is_an_impression_or_a_click(found: list[dict[str, Any]]) -> None:
    for document in found:
        if document["type"] == "click":
            assert list(document) == FIELDS
        else:
            assert list(document) == [*FIELDS, "cost"]
            assert 0 < document["cost"] < 0.1
        assert 1 <= int(document["ad"][1:]) <= ADS
        assert 0 <= int(document["visitor"][1:]) < VISITORS


def test_every_click_is_on_an_impression_that_came_before_and_no_impression_is_clicked_twice(
    found: list[dict[str, Any]],
) -> None:
    shown: dict[str, dict[str, Any]] = {}
    clicked = set()
    for document in found:
        if document["type"] == "impression":
            assert document["impression"] not in shown
            shown[document["impression"]] = document
        else:
            assert document["impression"] not in clicked
            clicked.add(document["impression"])
            impression = shown[document["impression"]]
            assert impression["at"] < document["at"]
            assert all(impression[field] == document[field] for field in ("ad", "campaign", "visitor"))
    assert 0.03 < len(clicked) / len(shown) < 0.15


def test_most_clicks_come_within_seconds_and_some_after_minutes(found: list[dict[str, Any]]) -> None:
    shown = {document["impression"]: document["at"] for document in found if document["type"] == "impression"}
    lags = [
        (document["at"] - shown[document["impression"]]) / 1_000 for document in found if document["type"] == "click"
    ]
    assert 2 < median(lags) < 10
    assert max(lags) > 60
    assert 0.02 < sum(lag > 60 for lag in lags) / len(lags) < 0.15


def test_few_ads_are_shown_often_and_some_are_liked_better(found: list[dict[str, Any]]) -> None:
    shown = Counter(document["ad"] for document in found if document["type"] == "impression")
    clicks = Counter(document["ad"] for document in found if document["type"] == "click")
    assert shown.most_common(1)[0][1] > 5 * shown.most_common()[-1][1]
    rates = sorted(clicks[ad] / times for ad, times in shown.items())
    assert rates[-4] > 3 * rates[3]
