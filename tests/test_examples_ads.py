"""The example of ads and clicks, as far as it needs no pipeline that runs."""

import random
from itertools import islice

from pyspark.sql import SparkSession
from tests.test_examples import loaded

from penstock.testing.frames import BEGIN, answer, frame, rows


def test_an_ad_that_was_shown_is_clicked_within_a_minute_or_not(spark: SparkSession) -> None:
    app = loaded("ads/pipeline.py").app
    channels = app.describe().channels
    at = BEGIN // 1_000
    shown = [{"impression": f"i{n}", "ad": ad, "at": at + n} for n, ad in enumerate(("a1", "a4", "a5"))]
    clicks = [{"impression": "i0", "at": at + 2_500}, {"impression": "i1", "at": at + 60_002}]
    frames = frame(spark, channels["impressions"], *shown), frame(spark, channels["clicks"], *clicks)
    found = answer(app, "outcomes", *frames)
    assert rows(found, "impression", "ad", "campaign", "clicked", "lag", "earned", "seen.count") == [
        ("i0", "a1", "shoes", True, 2_500, 0.2, 2),
        ("i1", "a4", "bikes", False, None, None, 1),
        ("i2", "a5", "unknown", False, None, None, 1),
    ]


def test_visitors_click_on_what_they_saw_and_later() -> None:
    visits = list(islice(loaded("ads/visitors.py").visits(random.Random(3), 7), 2_000))
    seen = {visit["impression"]: at for at, channel, visit in visits if channel == "impressions"}
    lags = [at - seen[visit["impression"]] for at, channel, visit in visits if channel == "clicks"]
    assert 0.2 < len(lags) / len(visits) < 0.3
    assert min(lags) > 0
    assert max(lags) > 60
    assert [at for at, *_ in visits] == sorted(at for at, *_ in visits)
