"""What the delivery tier makes of the pages of a pipeline."""

from typing import Any

import pytest

from penstock.core.errors import Misconfigured
from penstock.pipeline.pipeline import Pipeline
from penstock.run.deliver import chart_of


def page(**options: Any) -> Any:
    app = Pipeline("app")
    app.source("ws://host/path", into="rsvps")
    app.sql_query("by_city", key="city", sql="SELECT city FROM rsvps")
    app.page("by_city", **options)
    return chart_of(app.describe().pages[0])


def test_a_page_without_a_chart_is_a_table() -> None:
    assert (page().feed, page().spec) == ("by_city", None)


def test_a_chart_is_a_specification_over_the_rows_or_makes_one() -> None:
    spec = {"data": {"name": "rows"}, "mark": "bar"}
    assert page(chart={"mark": "bar"}).spec == spec
    assert page(chart=lambda: {"mark": "bar"}).spec == spec


def test_anything_else_is_refused() -> None:
    with pytest.raises(Misconfigured) as error:
        page(chart="bar")
    assert error.value.location == "page by_city"
