"""What each hop gives of what is asked for."""

import pytest

from penstock.collect.http import HttpSource
from penstock.collect.websocket import WebSocketSource
from penstock.core.contracts import Guarantee
from penstock.core.errors import Misconfigured
from penstock.pipeline.pipeline import Pipeline
from penstock.plan.plan import HopGuarantee, of_page, of_query, of_source, of_store

RESUMED = WebSocketSource("ws://feed", "rsvps")
DEAF = WebSocketSource("ws://feed", "rsvps", numbered=None)
REPEATED = HttpSource("listen+http://127.0.0.1:8700/in", "rsvps")
EXACTLY, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE


@pytest.mark.parametrize(
    ("given", "guarantee", "weaker"),
    [
        (of_source(RESUMED, EXACTLY), "exactly once", False),
        (of_source(DEAF, EXACTLY), "best effort", True),
        (of_source(DEAF, LEAST), "best effort", True),
        (of_source(RESUMED, MOST), "at most once", False),
        (of_source(DEAF, MOST), "at most once", False),
        (of_source(REPEATED, MOST), "at least once", True),
        (of_query(True, False, EXACTLY), "exactly once", False),
        (of_query(True, False, MOST), "exactly once", False),
        (of_query(False, False, EXACTLY), "at least once", True),
        (of_query(False, False, LEAST), "at least once", False),
        (of_query(False, True, MOST), "at most once", False),
        (of_query(False, False, MOST), "at least once", True),
        (of_query(True, False, EXACTLY, keyed=True), "exactly once", False),
        (of_query(True, False, EXACTLY, keyed=True, unnumbered="no number tells"), "at least once", True),
        (of_query(True, False, LEAST, keyed=True, unnumbered="no number tells"), "at least once", False),
        (of_store(MOST), "exactly once", False),
        (of_page(LEAST), "exactly once", False),
    ],
)
def test_what_is_weaker_than_asked_for_has_a_fix(given: HopGuarantee, guarantee: str, weaker: bool) -> None:
    assert (given.guarantee, given.weaker) == (guarantee, weaker)
    assert given.why
    assert bool(given.fix) or not weaker


def test_a_pipeline_asks_for_one_of_three() -> None:
    app = Pipeline("rsvps", delivery="at most once")
    app.channel("rsvps")
    app.sql_query("all", key="value", sql="SELECT value FROM rsvps")
    assert app.describe().delivery is MOST
    assert [query.once for query in app.describe().queries] == [True]
    assert Pipeline("rsvps").describe().delivery is EXACTLY
    with pytest.raises(Misconfigured, match='delivery is "twice"; the choices are exactly once, at least once'):
        Pipeline("rsvps", delivery="twice")  # type: ignore[arg-type]
