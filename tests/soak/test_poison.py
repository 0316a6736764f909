"""10,000 records, 20 of which make a query fail in five ways: all others are counted, and it is not down for long."""

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from tests.analysis.test_poison import Analysis, analyse, checked, letters, portion
from tests.channels.traffic import send
from tests.soak.sizes import FULL, PATIENCE, POISONED, figure

from penstock import Pipeline, seen
from penstock.audit.account import Outcome
from penstock.channels.kafka import Kafka
from penstock.core.scan import scan

__all__ = ["analyse"]

pytestmark = pytest.mark.skipif(not FULL, reason="minutes; tests/analysis/test_poison.py does the same with fewer")

CHANNEL = "many_things"
KINDS: list[dict[str, Any]] = [
    {"name": "giant" * 120_000},
    {"size": 2_000_000},
    {"name": "udf"},
    {"n": 0},
    {"text": "many"},
]


def counted(many_things: DataFrame) -> DataFrame:
    """Fails with a group or a row larger than its channel takes, a UDF that raises, a division by zero, a cast."""
    return many_things.groupBy(checked("name").alias("name")).agg(
        F.sum(F.expr("100 DIV n")).alias("shares"),
        F.sum(F.expr("CAST(text AS INT)")).alias("texts"),
        F.max(F.expr("repeat('x', size)")).alias("label"),
        seen(),
    )


def test_a_query_goes_on_without_the_records_that_make_it_fail(
    kafka: Kafka, fresh: Callable[[str], str], analyse: Callable[..., Analysis]
) -> None:
    records, poison = POISONED
    app = Pipeline(fresh("pipeline"))
    schema = "id BIGINT NOT NULL, name STRING, n BIGINT, size INT, text STRING"
    app.channel(CHANNEL, schema=schema, partitions=2)
    app.query(key="name")(counted)
    app.sql_query("other", key="n", sql=f"SELECT n, count(1) AS count, seen() FROM {CHANNEL} GROUP BY n")
    analysis = analyse(app, real_time_queries=0)
    run = analysis.queries.running("other").runId
    kinds, size, sent = cycle(KINDS), 1_000, 0
    failing = longest = 0.0

    def accounted() -> bool:
        nonlocal failing, longest
        up = analysis.node("counted")["state"] == "running"
        failing = 0.0 if up else failing or time.monotonic()
        longest = max(longest, time.monotonic() - failing if failing else 0.0)
        return all(sum(analysis.outcomes(name).values()) == sent for name in ("counted", "other"))

    while sent < records:
        # As a stream brings them: a part after the other, with some of them in each.
        send(kafka, CHANNEL, portion(sent, size, islice(kinds, poison * size // records)))
        sent += size
        until = time.monotonic() + PATIENCE
        while not accounted():
            assert time.monotonic() < until, analysis.node("counted")
            time.sleep(0.1)
    assert analysis.outcomes("counted") == {Outcome.PASSED: records - poison, Outcome.REFUSED: poison}
    rows = {entry.key: json.loads(entry.value or b"") for entry in scan(kafka, "counted")}
    assert sum(row["seen"]["count"] for row in rows.values()) == records - poison
    assert len(letters(kafka, CHANNEL)) == poison
    assert (analysis.outcomes("other"), analysis.queries.running("other").runId) == ({Outcome.PASSED: records}, run)
    figure(f"{records:,} records, {poison} of which make a query fail", f"it is down for {longest:.0f} s at most")
