"""The charts of the demo, with Altair. Their data are the rows of a feed, flattened: `window_start`."""

import json
from importlib.resources import files
from itertools import groupby, pairwise
from typing import Any

import altair as alt

ROWS = alt.NamedData("rows")


def people_by_country() -> Any:
    """The last three minutes, a bar per window; the seven largest countries have their own colours."""
    return (
        alt.Chart(ROWS)
        .transform_calculate(start="toNumber(toDate(datum.window_start))")
        .transform_joinaggregate(newest="max(start)")
        .transform_filter("datum.start > datum.newest - 180000")
        .transform_joinaggregate(total="sum(people)", groupby=["country"])
        .transform_window(rank="dense_rank()", sort=[alt.SortField("total", order="descending")])
        .transform_calculate(
            where="datum.rank <= 7 ? upper(datum.country) : 'others'", at="utcFormat(datum.start, '%H:%M:%S')"
        )
        .mark_bar()
        .encode(
            x=alt.X("at:O", title=None, axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("sum(people):Q", title="people"),
            color=alt.Color("where:N", title=None, sort=alt.EncodingSortField("rank", op="min")),
            tooltip=["where:N", "sum(people):Q", "at:O"],
        )
    )


def trending_topics() -> Any:
    """The ten topics with most yes answers in the newest complete window."""
    return (
        alt.Chart(ROWS)
        .transform_joinaggregate(newest="max(window_start)")
        .transform_calculate(age="(toNumber(toDate(datum.newest)) - toNumber(toDate(datum.window_start))) / 1000")
        .transform_filter("datum.age == 50")
        .transform_window(rank="row_number()", sort=[alt.SortField("yes", order="descending")])
        .transform_filter("datum.rank <= 10")
        .mark_bar()
        .encode(
            x=alt.X("yes:Q", title="yes answers"),
            y=alt.Y("topic:N", sort="-x", title=None),
            tooltip=["topic:N", "yes:Q"],
        )
    )


def busy_venues() -> Any:
    """A map of the world with a circle for each venue."""
    earth = alt.Chart(alt.sphere()).mark_geoshape(fill="transparent", stroke="#8886")
    land = alt.Chart(alt.NamedData("land")).mark_geoshape(fill="#8883", stroke="#8884", strokeWidth=0.5)
    grid = alt.Chart(alt.graticule(step=[30, 30])).mark_geoshape(fill="transparent", stroke="#8884", strokeWidth=0.5)
    venues = (
        alt.Chart(ROWS)
        .mark_circle(opacity=0.6)
        .encode(
            longitude="lon:Q",
            latitude="lat:Q",
            size=alt.Size("people:Q", legend=None, scale=alt.Scale(range=[8, 220])),
            tooltip=["name:N", "people:Q"],
        )
    )
    chart = alt.layer(earth, grid, land, venues).project("naturalEarth1").to_dict()
    # Added here: Altair's validation of so many coordinates takes seconds.
    return {**chart, "datasets": {"land": [_land()]}}


def _land() -> dict[str, Any]:
    """The outlines of all countries, from the package geopip, as one GeoJSON feature.

    Coordinates are rounded to a tenth of a degree, and islands that become too small are omitted.
    """
    countries = json.loads((files("geopip") / "globe.geo.json").read_bytes())["features"]
    outlines = []
    for shape in (country["geometry"] for country in countries):
        for polygon in shape["coordinates"] if shape["type"] == "MultiPolygon" else [shape["coordinates"]]:
            outline = [point for point, _ in groupby([round(x, 1), round(y, 1)] for x, y in polygon[0])]
            # Twice the area, positive if clockwise: Vega fills the area to the right of an outline.
            area = sum((x2 - x1) * (y2 + y1) for (x1, y1), (x2, y2) in pairwise(outline))
            if abs(area) > 0.2:
                outlines.append([outline if area > 0 else outline[::-1]])
    return {"type": "Feature", "geometry": {"type": "MultiPolygon", "coordinates": outlines}}


def answers_by_city() -> Any:
    """The twelve cities with most answers, yes and no."""
    return (
        alt.Chart(ROWS)
        .transform_joinaggregate(all="sum(answers)", groupby=["city"])
        .transform_window(rank="dense_rank()", sort=[alt.SortField("all", order="descending")])
        .transform_filter("datum.rank <= 12")
        .mark_bar()
        .encode(
            x=alt.X("answers:Q", title="answers"),
            y=alt.Y("city:N", sort="-x", title=None),
            color=alt.Color("response:N", title=None, sort=["yes", "no"]),
            tooltip=["city:N", "response:N", "answers:Q"],
        )
    )


def distinct_members() -> Any:
    return (
        alt.Chart(ROWS)
        .mark_area(line=True, point=True, opacity=0.3)
        .encode(
            x=alt.X("window_start:T", title=None, axis=alt.Axis(format="%H:%M")),
            y=alt.Y("members:Q", title="members"),
            tooltip=["members:Q", alt.Tooltip("window_start:T", format="%H:%M")],
        )
    )
