"""Join two streams by equal columns and near event times."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.analysis.frames import DELETED, MARK
from penstock.analysis.plans import watermarked
from penstock.core.clock import duration
from penstock.core.errors import Misconfigured

_SEMI = "semi"
_HOWS = ("inner", "left", "right", "full", _SEMI)
_RESERVED = ("event_time", "origin", "seen")


def interval_join(
    *, key: str | Sequence[str], within: str | tuple[str, str], how: str = "inner", **sides: DataFrame
) -> DataFrame:
    """Join two streams: `interval_join(impression=…, click=…, key="ad_id", within="1 hour")`.

    A record of the second stream matches one of the first if the columns `key` are equal and its event time is at most
    `within` after that of the first. With a pair (before, after), it may also be at most `before` earlier.

    The result has the columns `key`; for each side, under its name, a struct of its other columns and `event_time`, or
    null without a match; `event_time` and `origin` of the first side, or of the second if the first is null; and
    `seen`, whose count is 2 for a match and 1 without, so that a match is the newer version. how="semi" returns the
    records of the first stream that have a match.

    A record without a match is written when the watermark excludes a match. Misconfigured without a watermark: Spark
    would have to keep every record forever.
    """
    keys = (key,) if isinstance(key, str) else tuple(key)
    location = f"interval_join({', '.join(f'{name}=…' for name in sides)})"
    _check(location, keys, how, sides)
    (first, left), (second, right) = sides.items()
    bounds = _bounds(location, within)
    if how == _SEMI:
        own = {key: key for key in keys}
        return left.join(_side(right, "_right", keys), _near("event_time", own, bounds), "left_semi")
    near = _near("_left_time", {key: f"_left_{key}" for key in keys}, bounds)
    paired = _side(left, "_left", keys).join(_side(right, "_right", keys), near, how)
    return paired.select(
        *(_either(f"_left_{key}", f"_right_{key}", how).alias(key) for key in keys),
        F.col("_left_row").alias(first),
        F.col("_right_row").alias(second),
        _either("_left_time", "_right_time", how).alias("event_time"),
        _either("_left_origin", "_right_origin", how).alias("origin"),
        _seen().alias("seen"),
    )


def _side(frame: DataFrame, name: str, keys: Sequence[str]) -> DataFrame:
    """The columns of a side for the join, with unique names."""
    row = [F.col(f"`{column}`") for column in frame.columns if column not in (*keys, *_RESERVED)]
    return frame.select(
        *(F.col(f"`{key}`").alias(f"{name}_{key}") for key in keys),
        F.col("event_time").alias(f"{name}_time"),
        F.struct(*row, "event_time").alias(f"{name}_row"),
        F.col("origin").alias(f"{name}_origin"),
        F.expr(MARK).alias(f"{name}_mark"),
    )


def _near(time: str, keys: Mapping[str, str], bounds: tuple[Column, Column]) -> Column:
    """The join condition. `time` and `keys` are the column names of the left side."""
    before, after = bounds
    near = (F.col("_right_time") >= F.col(time) - before) & (F.col("_right_time") <= F.col(time) + after)
    for key, own in keys.items():
        near = near & (F.col(f"`{own}`") == F.col(f"`_right_{key}`"))
    return near


def _either(left: str, right: str, how: str) -> Column:
    """The column of the side that is always present, which keeps its watermark; with "full", of either side."""
    if how == "full":
        return F.coalesce(F.col(f"`{left}`"), F.col(f"`{right}`"))
    return F.col(f"`{right if how == 'right' else left}`")


def _seen() -> Column:
    both = F.col("_left_row").isNotNull() & F.col("_right_row").isNotNull()
    marks = [F.coalesce(F.col(f"{side}_mark"), F.lit(0)) for side in ("_left", "_right")]
    return F.struct(
        F.when(both, F.lit(2)).otherwise(F.lit(1)).cast("bigint").alias("count"),
        F.greatest("_left_origin.time", "_right_origin.time").alias("newest"),
        F.greatest("_left_origin.appended", "_right_origin.appended").alias("appended"),
        marks[0].bitwiseXOR(marks[1]).alias("mark"),
    )


def _bounds(location: str, within: str | tuple[str, str]) -> tuple[Column, Column]:
    try:
        before, after = ("0 seconds", within) if isinstance(within, str) else within
        return _interval(duration(before)), _interval(duration(after))
    except ValueError as error:
        fix = 'write within="1 hour", or within=("5 minutes", "1 hour") for before and after'
        raise Misconfigured(location, f"within is {within!r}: {error}", fix) from error


def _interval(span: timedelta) -> Column:
    # A literal: Spark derives from it how long it keeps a record.
    return F.expr(f"INTERVAL '{span.total_seconds():.6f}' SECOND")


def _check(location: str, keys: Sequence[str], how: str, sides: dict[str, DataFrame]) -> None:
    if len(sides) != 2:
        fix = "give each of two a name: interval_join(impression=impressions, click=clicks, …)"
        raise Misconfigured(location, f"it joins {len(sides)} streams", fix)
    if how not in _HOWS:
        raise Misconfigured(location, f'how is "{how}"', f"the choices are {', '.join(_HOWS)}")
    if not keys:
        raise Misconfigured(location, "key names no column", "name those that are equal on both sides")
    for name, frame in sides.items():
        if name in (*keys, *_RESERVED):
            raise Misconfigured(location, f'"{name}" is a column of the result already', "rename this side")
        if absent := [column for column in (*keys, "event_time", "origin") if column not in frame.columns]:
            has = ", ".join(frame.columns)
            raise Misconfigured(
                location,
                f"{name} has no column {' and '.join(absent)}",
                f"it has {has}; give both sides the same names",
            )
        if DELETED in frame.columns:
            raise Misconfigured(
                location,
                f"{name} is a table, whose rows change and may have no time",
                "join tables by tables.join or tables.foreign_key_join, a stream with one by tables.lookup",
            )
        if frame.isStreaming and not watermarked(frame.schema["event_time"]):
            raise Misconfigured(
                location,
                "it has no watermark, so all its records would have to be kept forever",
                'add to the query: watermark="10 minutes"',
            )
