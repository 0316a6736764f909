"""A query as a batch over the log: its rows, as live ones are written, and the records that marks stand for."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.compare import Row, key_of, put
from penstock.analysis.conserving import by_arrival
from penstock.analysis.engine import Engine, Offsets
from penstock.analysis.frames import MARK, encoded, typed, words
from penstock.analysis.query import Query
from penstock.analysis.state.keyed import waits
from penstock.core.contracts import Positions
from penstock.core.errors import Misconfigured, Unavailable

Until = Mapping[str, Positions]
"""Per channel, the offsets up to which it is read."""


class Found(NamedTuple):
    """A record that the log holds, and how often."""

    sender: str
    epoch: int
    seq: int
    copies: int


def recomputed(
    engine: Engine,
    query: Query,
    until: Until,
    since: Until | None = None,
    without: Mapping[str, Offsets] | None = None,
) -> dict[bytes, Row]:
    """The rows that the live result has to be equal to, once it has covered these offsets from those on.

    `without`: the offsets of what it has dropped as late.
    """
    table: dict[bytes, Row] = {}
    with _explained():
        life = note_of(engine.checkpoint(query.name)).life
        for row in encoded(engine.recompute(query, until, since, without), query, life).toLocalIterator():
            headers = [(header["key"], header["value"]) for header in row["headers"]]
            value = None if row["value"] is None else bytes(row["value"])
            put(table, key_of(bytes(row["key"])), Row.of(value, headers))
    return table


def require_repeatable(engine: Engine, query: Query) -> None:
    """Refuse a query whose rows a batch cannot find again."""
    result = engine.over_nothing(query)
    if by_arrival(result):
        raise Misconfigured(
            f"query {query.name}",
            "it looks up what a table held when each record came, which the log does not tell",
            "recompute the queries that make the table and the stream",
        )
    if waits(result):
        problem = "its timers give rows, and there are no timers in a batch over the log"
        raise Misconfigured(f"query {query.name}", problem, "test what they do: penstock.testing.keyed")


def comes_when_final(engine: Engine, query: Query) -> bool:
    """Whether a row is written once, when nothing can change it any more: until then it is rightly absent."""
    with _explained():
        return not engine.updates(query)


def kept(engine: Engine, channel: str, until: Positions, since: Positions | None = None) -> int:
    """How many records the log still holds up to these offsets, from those on."""
    with _explained():
        return engine.batch(channel, until, since).count()


def named(engine: Engine, query: Query, marks: Collection[int], until: Until) -> dict[int, Found]:
    """The records that these marks stand for, of those that the log holds."""
    found: dict[int, Found] = {}
    if not marks:
        return found
    with _explained():
        for channel in query.inputs:
            records = typed(engine.batch(channel, until.get(channel)), engine.shapes[channel])
            hits = records.select("origin", F.expr(MARK).alias("mark")).where(F.col("mark").isin(*marks))
            columns = ("origin.sender", "origin.epoch", "origin.seq", "mark")
            for row in hits.groupBy(*columns).count().collect():
                found[row["mark"]] = Found(row["sender"], row["epoch"], row["seq"], row["count"])
    return found


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise Unavailable("the batch over the log", words(error) or type(error).__name__) from None
