"""Run a query as a batch over the log, and compare its rows with those of a copy."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import orjson
from pyspark.sql import functions as F

from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.engine import Engine, OffsetRanges
from penstock.analysis.frames import MARK, encoded, spark_errors, typed
from penstock.analysis.operators.keyed import waits
from penstock.analysis.plans import by_arrival
from penstock.analysis.query import Query
from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured
from penstock.core.record import generation_and_count

_BATCH = "the batch over the log"
_TOLERANCE = 1e-9
"""Sums of floats depend on the order of addition, which differs between a batch and a stream."""


@dataclass(frozen=True, slots=True)
class Row:
    """A result row in a channel; without a value it is deleted."""

    value: bytes | None
    version: int | None = None
    mark: int | None = None
    """The checksum of its records: the exclusive or of their hashes."""
    time: Micros | None = None
    """When its newest record was appended, or sent."""
    rivals: tuple[bytes | None, ...] = ()
    """Other rows of the same key, when their order is unknown."""

    @classmethod
    def of(cls, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> "Row":
        fields = dict(headers)
        version, mark, time, appended = (_whole(fields.get(name)) for name in ("version", "mark", "time", "appended"))
        return cls(value, version, mark, time if appended is None else appended)


Table = Mapping[bytes, Row]


def bare(table: Table) -> dict[bytes, Row]:
    """The rows without version, checksum and `seen`, which a compacted log cannot reproduce."""
    return {key: Row(_without_seen(row.value), time=row.time) for key, row in table.items()}


def _without_seen(value: bytes | None) -> bytes | None:
    document = read(value)
    if not isinstance(document, dict):
        return value
    return orjson.dumps({name: inner for name, inner in document.items() if name != "seen"})


def key_of(text: bytes) -> bytes:
    """The canonical spelling of a key."""
    try:
        return orjson.dumps(orjson.loads(text))
    except orjson.JSONDecodeError:
        return text


def put(table: dict[bytes, Row], key: bytes, row: Row) -> None:
    """Add a row of a batch: the higher version wins; without versions, both are valid."""
    held = table.get(key)
    if held is None or (row.version is not None and held.version is not None and row.version > held.version):
        table[key] = row
    elif row.version is None and held.version is None and row.value != held.value:
        table[key] = Row(held.value, None, None, held.time, (*held.rivals, row.value))


class Verdict(StrEnum):
    EXACT = "exact"
    """It equals the row of the batch."""
    BOUNDED = "bounded"
    """It is between the rows of two batches: it contains records that are not committed yet."""
    PERISHED = "perished"
    """It is gone, after its retention."""
    WAITING = "waiting"
    """It is expected soon."""
    EARLIER = "earlier"
    """It was written by an earlier generation of its query, and has not changed since."""
    UNKNOWN = "unknown"
    """It may contain records from a removed part of the log."""
    DIFFERENT = "different"


class How(StrEnum):
    MISSING = "is missing"
    UNEXPECTED = "is not due"
    FEWER = "lacks records"
    EXCEEDS = "holds more records"
    OTHERS = "holds other records"
    VALUES = "has other values"


@dataclass(frozen=True, slots=True)
class Difference:
    key: bytes
    how: How
    held: Row | None
    recomputed: Row | None
    columns: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """For each column that differs: the held and the recomputed value."""

    @property
    def short(self) -> int:
        """How many records are missing in the held row, by the versions."""
        if self.how is How.OTHERS:
            return 1
        due, held = ((row and row.version) or 0 for row in (self.recomputed, self.held))
        # A row of an earlier generation contains no record of this one.
        return max(0, min(due - held, generation_and_count(due)[1]))

    @property
    def mark(self) -> int | None:
        """The hash of the single record by which the rows differ; None when it is unknown, or not a single one."""
        held, due = self.held, self.recomputed
        if due is None or due.version is None or due.mark is None:
            return None
        if held is None:
            return due.mark if generation_and_count(due.version)[1] == 1 else None
        if held.version is None or held.mark is None or abs(held.version - due.version) != 1:
            return None
        return held.mark ^ due.mark


@dataclass(frozen=True)
class Expected:
    """The expected rows: `least` from the committed records, `most` from all records of the log."""

    least: Table
    most: Table
    truncated: bool = False
    """The beginning of the log was removed: rows may correctly contain more records."""


Excuse = Callable[[bytes, Row | None, Row | None], Verdict | None]
"""Given a key, the held and the recomputed row: why they may differ; None when they must be equal."""


@dataclass(frozen=True)
class Comparison:
    counts: Counter[Verdict]
    differences: tuple[Difference, ...]


def compare(held: Table, expected: Expected, excuse: Excuse = lambda *_: None) -> Comparison:
    """Compare each held or expected row. A correctly deleted row does not count."""
    counts: Counter[Verdict] = Counter()
    differences: list[Difference] = []
    for key in sorted(held.keys() | expected.least.keys()):
        row, least, most = held.get(key), expected.least.get(key), expected.most.get(key)
        verdict = _verdict(row, least, most, expected.truncated)
        if verdict is Verdict.EXACT and not _there(row):
            continue
        nearest = _nearest(row, least, most)
        if verdict is Verdict.DIFFERENT:
            verdict = excuse(key, row, nearest) or verdict
        counts[verdict] += 1
        if verdict is Verdict.DIFFERENT:
            differences.append(_difference(key, row, nearest))
    return Comparison(counts, tuple(differences))


def _verdict(held: Row | None, least: Row | None, most: Row | None, truncated: bool) -> Verdict:
    if held is None:
        # A deletion leaves nothing, later not even its version.
        if not _there(least):
            return Verdict.EXACT
        return Verdict.BOUNDED if most is not None and most.value is None else Verdict.DIFFERENT
    if held.value is None and most is None:
        return Verdict.EXACT
    for due in (least, most):
        if due is not None and _equal(held, due):
            return Verdict.BOUNDED if due.rivals else Verdict.EXACT
    if truncated and (most is None or held.version is None or held.version > (most.version or 0)):
        return Verdict.UNKNOWN
    if most is None:
        return Verdict.DIFFERENT
    if held.version is None or most.version is None:
        moving = held.version is most.version is None and (least is None or not _equal(least, most))
        return Verdict.BOUNDED if moving else Verdict.DIFFERENT
    within = ((least and least.version) or 0) < held.version < most.version
    return Verdict.BOUNDED if within else Verdict.DIFFERENT


def _there(row: Row | None) -> bool:
    return row is not None and row.value is not None


def _nearest(held: Row | None, least: Row | None, most: Row | None) -> Row | None:
    """The batch's row that a held row is compared with."""
    if least is None or (most and held and (held.version or 0) >= (most.version or 0)):
        return most
    return least


def _equal(held: Row, due: Row) -> bool:
    if held.version != due.version:
        return False
    if held.mark is not None and due.mark is not None and held.mark != due.mark:
        return False
    return any(held.value == value or equal(read(held.value), read(value)) for value in (due.value, *due.rivals))


def equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; floats approximately."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=_TOLERANCE)
    return type(one) is type(other) and bool(one == other)


def _difference(key: bytes, held: Row | None, due: Row | None) -> Difference:
    if held is None or due is None or (held.value is None) is not (due.value is None):
        return Difference(key, How.UNEXPECTED if _there(held) else How.MISSING, held, due)
    one, other = _columns(held.value), _columns(due.value)
    names = dict.fromkeys((*other, *one))
    columns = {
        name: (one.get(name), other.get(name))
        for name in names
        if name not in one or name not in other or not equal(one[name], other[name])
    }
    return Difference(key, _how(held, due), held, due, columns)


def _how(held: Row, due: Row) -> How:
    if held.version is not None and due.version is not None and held.version != due.version:
        return How.FEWER if held.version < due.version else How.EXCEEDS
    if held.mark is not None and due.mark is not None and held.mark != due.mark:
        return How.OTHERS
    return How.VALUES


def _columns(value: bytes | None) -> dict[str, Any]:
    document = read(value)
    if document is None:
        return {}
    return document if isinstance(document, dict) else {"value": document}


def read(text: bytes | None) -> Any:
    """Parse a key or a row for people: text when it is not JSON, None when it is deleted."""
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode(errors="replace")


def _whole(value: bytes | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


Until = Mapping[str, Offsets]
"""Per channel, the end offsets."""


class Found(NamedTuple):
    """A record in the log, and its number of copies."""

    sender: str
    epoch: int
    seq: int
    copies: int


def recomputed(
    engine: Engine,
    query: Query,
    until: Until,
    since: Until | None = None,
    without: Mapping[str, OffsetRanges] | None = None,
) -> dict[bytes, Row]:
    """The rows that the live result must equal after it has read the offsets from `since` to `until`.

    `without`: the offsets of records that it has dropped as late.
    """
    table: dict[bytes, Row] = {}
    with spark_errors(_BATCH):
        generation = note_of(engine.checkpoint(query.name)).generation
        for row in encoded(engine.recompute(query, until, since, without), query, generation).toLocalIterator():
            headers = [(header["key"], header["value"]) for header in row["headers"]]
            value = None if row["value"] is None else bytes(row["value"])
            put(table, key_of(bytes(row["key"])), Row.of(value, headers))
    return table


def require_repeatable(engine: Engine, query: Query) -> None:
    """Raise Misconfigured for a query whose rows a batch cannot reproduce."""
    result = engine.over_nothing(query)
    if by_arrival(result):
        raise Misconfigured(
            f"query {query.name}",
            "it uses lookup(): the log does not hold when the records of the table arrived",
            "recompute the queries whose results it reads",
        )
    if waits(result):
        problem = "it has timers, which do not run in a batch over the log"
        raise Misconfigured(f"query {query.name}", problem, "test them with penstock.testing.keyed")


def comes_when_final(engine: Engine, query: Query) -> bool:
    """Whether a row is written once, when it is final: before, it is correctly absent."""
    with spark_errors(_BATCH):
        return not engine.updates(query)


def kept(engine: Engine, channel: str, until: Offsets, since: Offsets | None = None) -> int:
    """How many records the log still holds from `since` up to `until`."""
    with spark_errors(_BATCH):
        return engine.batch(channel, until, since).count()


def named(engine: Engine, query: Query, marks: Collection[int], until: Until) -> dict[int, Found]:
    """The records of the log with these hashes."""
    found: dict[int, Found] = {}
    if not marks:
        return found
    with spark_errors(_BATCH):
        for channel in query.inputs:
            records = typed(engine.batch(channel, until.get(channel)), engine.shapes[channel])
            hits = records.select("origin", F.expr(MARK).alias("mark")).where(F.col("mark").isin(*marks))
            columns = ("origin.sender", "origin.epoch", "origin.seq", "mark")
            for row in hits.groupBy(*columns).count().collect():
                found[row["mark"]] = Found(row["sender"], row["epoch"], row["seq"], row["count"])
    return found
