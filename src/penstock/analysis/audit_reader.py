"""The audit's reduction by Spark: the same findings as `reduced`, from entries of Kafka channels without payloads.

Kafka is read once. A window over each sender's entries in a partition finds numbers that came after a higher one. Then
one hash aggregation with two groupings makes the rows for the driver: numbers are sent as blocks of 64 bits, and become
runs.
"""

import json
import re
from collections import defaultdict, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.frames import SPARK_ERRORS, ResultWriters, description, genuine
from penstock.audit.findings import (
    FORGED_NAMED,
    IN_CHANNEL,
    Findings,
    ForgedRow,
    Kind,
    Numbering,
    Span,
    key_hash,
    key_text,
)
from penstock.audit.writers import WriterTokens
from penstock.core.contracts import Offsets
from penstock.core.errors import Unaccounted, Unavailable
from penstock.core.metrics import HIGHEST, STEP, Sketch
from penstock.core.runs import Runs

_EARLIEST = -2
_LONGEST = int(HIGHEST * 1_000)
_LIMIT = 2**62
"""Limit of a duration in microseconds: a wrong time must not overflow 64 bits in a difference or a sum."""


@dataclass(frozen=True)
class SparkAuditReader:
    """Reads entries of channels for the audit, with Spark."""

    spark: SparkSession
    servers: str
    kafka: Mapping[str, str] = field(default_factory=dict)
    """Settings of Spark's Kafka client, such as those for security."""
    small: int = 20_000
    """Up to so many entries, one task is cheaper than several with a shuffle."""

    def reduce(
        self,
        start: Mapping[str, Offsets],
        end: Mapping[str, Offsets],
        kinds: Mapping[str, Kind],
        writers: WriterTokens | None = None,
    ) -> Findings:
        """The findings of the entries from `start` (or the beginning of a partition) up to `end`.

        Raises Unaccounted when Kafka no longer holds some entries, Unavailable when Kafka or Spark does not answer. One
        call at a time. Each call costs a third of a second: read short ranges in Python instead.
        """
        found = Findings(start, end)
        ranges = _ranges(start, end)
        if not ranges:
            return found
        try:
            rows = _rows(self._reduced(ranges, kinds, writers or WriterTokens()))
        except SPARK_ERRORS as error:
            raise _explained(error, ranges) from error
        _take(found, rows)
        return found

    def _reduced(self, ranges: "_Ranges", kinds: Mapping[str, Kind], writers: WriterTokens) -> DataFrame:
        entries = self._entries(ranges)
        if sum(until - max(since, 0) for since, until in ranges.values()) <= self.small:
            entries = entries.coalesce(1)
        results, dead = ([name for name, one in kinds.items() if one is kind] for kind in (Kind.RESULT, Kind.DEAD))
        judged = entries.withColumns(
            {
                "result": F.col("topic").isin(results),
                "late": F.col("topic").isin(dead) & F.expr(_IN_CHANNEL),
                "forged": _forged(results, writers),
            }
        )
        for columns in (_FIELDS, _IDENTITY, _ORDERED):
            judged = judged.withColumns({name: F.expr(text) for name, text in columns.items()})
        judged.createOrReplaceTempView(_VIEW)
        return self._session.sql(_GROUPED)

    def _entries(self, ranges: "_Ranges") -> DataFrame:
        since: dict[str, dict[str, int]] = {}
        until: dict[str, dict[str, int]] = {}
        for (channel, partition), (first, end) in ranges.items():
            since.setdefault(channel, {})[str(partition)] = first
            until.setdefault(channel, {})[str(partition)] = end
        reader = self._session.read.format("kafka").options(
            **{
                "kafka.bootstrap.servers": self.servers,
                "assign": json.dumps({channel: list(map(int, offsets)) for channel, offsets in since.items()}),
                "startingOffsets": json.dumps(since),
                "endingOffsets": json.dumps(until),
                "includeHeaders": "true",
                "failOnDataLoss": "true",
                "kafka.isolation.level": "read_committed",
                "kafka.fetch.max.wait.ms": "10",
                # With a new group id, each batch would connect again. Nothing is committed under this id.
                "kafka.group.id": "penstock-audit",
                **{f"kafka.{name}": value for name, value in self.kafka.items()},
            }
        )
        return reader.load()

    @cached_property
    def _session(self) -> SparkSession:
        own = self.spark.newSession()
        # With data source V2, an entry costs a third less. The plan needs no adaptive execution.
        own.conf.set("spark.sql.sources.useV1SourceList", "")
        own.conf.set("spark.sql.adaptive.enabled", "false")
        return own


_Ranges = Mapping[tuple[str, int], tuple[int, int]]
"""Per channel and partition: from where, and up to where."""

_VIEW = "penstock_audit"


def _first(name: str) -> str:
    return f"get(headers.value, CAST(array_position(headers.key, '{name}') AS INT) - 1)"


def _number(name: str, only: str) -> str:
    text = f"CAST({_first(name)} AS STRING)"
    number = f"try_cast({text} AS BIGINT)"
    # Only the canonical spelling of a number is accepted.
    return f"CASE WHEN {only} AND CAST({number} AS STRING) = {text} THEN {number} END"


def _once(name: str) -> str:
    return f"size(array_remove(headers.key, '{name}')) = size(headers.key) - 1"


# The last header: a record may have had a header of this name before.
_REASON = "get(filter(reverse(headers), h -> h.key = 'reason'), 0).value"
_IN_CHANNEL = " OR ".join(
    f"coalesce(startswith({_REASON}, CAST('{tokens}' AS BINARY)), false)" for tokens in IN_CHANNEL
)


def _forged(results: Iterable[str], writers: WriterTokens) -> Column:
    """Whether no known writer of a result has written a row; the inverse of `WriterTokens.genuine`."""
    forged = F.lit(False)
    for channel in results:
        if tokens := writers.tokens(channel):
            known = ResultWriters([token.decode() for token in tokens], writers.first(channel))
            forged = F.when(F.col("topic") == channel, ~genuine(known)).otherwise(forged)
    return forged


_FIELDS = {
    "at": "unix_micros(timestamp)",
    "sender": f"CAST(coalesce({_first('sender')}, X'') AS STRING)",
    **{name: _number(name, "NOT late") for name in ("epoch", "seq", "time")},
    **{name: _number(name, "result") for name in ("version", "appended")},
    "once": " AND ".join(map(_once, ("sender", "epoch", "seq", "time"))),
    "redriven": "coalesce(array_contains(headers.key, 'redriven'), false)",
}
"""Columns, each by its SQL over the columns before."""

_WHOLE = "once AND is_valid_utf8(sender) AND epoch IS NOT NULL AND seq IS NOT NULL AND time IS NOT NULL"


def _since(time: str) -> str:
    """The duration from a timestamp to the arrival, limited to 64 bits."""
    return f"CASE WHEN {time} IS NOT NULL THEN at - greatest(least({time}, at + {_LIMIT}), at - {_LIMIT}) END"


_IDENTITY = {
    "key": "CASE WHEN version IS NOT NULL OR forged THEN key END",
    **{name: f"CASE WHEN {_WHOLE} THEN {name} END" for name in ("sender", "epoch", "seq")},
    "redriven": f"{_WHOLE} AND redriven",
    "delay": _since("time"),
    "step": _since("appended"),
}


def _bucket(duration: str) -> str:
    # A duration of 0 and a missing one have no bucket: their counts differ.
    ms = f"least({duration}, {_LONGEST}) / 1000D"
    return f"CASE WHEN {duration} > 0 THEN CAST(ceil(ln({ms}) / {STEP!r}D) AS INT) END"


_ORDERED = {
    "before": "max(seq) OVER (PARTITION BY topic, partition, sender, epoch, redriven ORDER BY offset"
    " ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)",
    "block": "shiftright(seq, 6)",
    "bit": "shiftleft(1L, CAST(seq & 63 AS INT))",
    "minute": "(at - pmod(at, 60000000)) div 60000000",
    "delay_bucket": _bucket("delay"),
    "step_bucket": _bucket("step"),
}


def _measured(duration: str) -> str:
    # A sum of large numbers would overflow 64 bits: its upper and lower halves do not.
    return (
        f"count({duration}) AS {duration}s, count_if({duration} <= -1000) AS {duration}_skewed,"
        f" min({duration}) AS {duration}_least, max({duration}) AS {duration}_most,"
        f" sum(shiftright({duration}, 32)) AS {duration}_upper, sum({duration} & 4294967295) AS {duration}_lower"
    )


_GROUPED = f"""
SELECT topic, grouping(minute) = 0 AS timed, forged, count(1) AS records,
    minute, delay_bucket, step_bucket, count_if(seq IS NULL AND NOT result AND NOT late) AS unknown,
    {_measured("delay")}, {_measured("step")},
    partition, sender, epoch, redriven, block, bit_or(bit) AS bits, max(at) AS newest,
    bit_or(CASE WHEN seq < before THEN bit ELSE 0 END) AS late,
    max(CASE WHEN before IS NULL THEN seq END) AS first, max(seq) AS highest,
    key, max(version) AS version, max(offset) AS last
FROM {_VIEW}
GROUP BY GROUPING SETS (
    (topic, forged, minute, delay_bucket, step_bucket),
    (topic, forged, partition, sender, epoch, redriven, block, key))
"""


def _ranges(start: Mapping[str, Offsets], end: Mapping[str, Offsets]) -> _Ranges:
    found = {}
    for channel, ends in end.items():
        for partition, until in ends.items():
            # As the binder's reader: offset 0 means the current beginning of the log.
            since = start.get(channel, {}).get(partition) or _EARLIEST
            if until > max(since, 0):
                found[channel, partition] = (since, until)
    return found


def _explained(error: Exception, ranges: _Ranges) -> Exception:
    text = str(error)
    if lost := re.search(r"OffsetOutOfRangeException: .* out of range for partition (\S+)-(\d+)", text):
        channel, partition = lost[1], int(lost[2])
        since, _ = ranges.get((channel, partition), (_EARLIEST, 0))
        why = (
            f"partition {partition} is to be read from {max(since, 0)}, and does not hold that: its retention was "
            "quicker than the audit, or it is another topic; to begin anew, remove the ledger"
        )
        return Unaccounted(channel, (), why)
    cause = re.search(r"Caused by: [\w.]+: (.+)", text)
    return Unavailable("the audit by Spark", cause[1] if cause else description(error))


def _rows(reduced: DataFrame) -> Iterator[Any]:
    """The rows of either grouping, as tuples with the names of the columns of `_GROUPED`.

    By time, they are the counts of a channel; otherwise those of a sender or a key.
    """
    table = reduced.toArrow()
    row = namedtuple("row", table.column_names)  # type: ignore[misc]  # the names are those of the SQL
    return map(row._make, zip(*(column.to_pylist() for column in table.columns), strict=True))


def _sketch(bucket: int | None, count: int, skewed: int, span: "_Span") -> Sketch:
    """The durations of a row, which are in one bucket."""
    counted = {"zeros": count, "skewed": skewed, "buckets": {}, "sum": 0, "min": 0 if count else None, "max": 0}
    if bucket is not None:
        least, most, total = span
        counted |= {"zeros": 0, "skewed": 0, "buckets": {bucket: count}, "sum": min(total, count * _LONGEST) / 1_000}
        counted |= {"min": min(least, _LONGEST) / 1_000, "max": min(most, _LONGEST) / 1_000}
    return Sketch.from_json(counted)


def _take(found: Findings, rows: Iterator[Any]) -> None:
    delays: defaultdict[str, Sketch] = defaultdict(Sketch)
    steps: defaultdict[str, Sketch] = defaultdict(Sketch)
    seen: defaultdict[Numbering, _Blocks] = defaultdict(lambda: defaultdict(int))
    late: defaultdict[Numbering, _Blocks] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        if row.forged:
            if row.timed:
                found.forged[row.topic] += row.records
            elif len(found.forged_rows) < FORGED_NAMED:
                found.forged_rows.append(ForgedRow(row.topic, row.partition, row.last, key_text(row.key), row.version))
            continue
        delay = row.delay_least, row.delay_most, _sum(row.delay_upper, row.delay_lower)
        if row.timed:
            _count(found, row)
            delays[row.topic].merge(_sketch(row.delay_bucket, row.delays, row.delay_skewed, delay))
            step = row.step_least, row.step_most, _sum(row.step_upper, row.step_lower)
            steps[row.topic].merge(_sketch(row.step_bucket, row.steps, row.step_skewed, step))
            continue
        if row.key is not None:
            versions, key = found.rows.setdefault(row.topic, {}), key_hash(row.key)
            versions[key] = max(row.version, versions.get(key, row.version))
        if row.sender is not None:
            numbering = row.topic, row.sender, row.epoch
            found.numbered[numbering] += row.records
            seen[numbering][row.block] |= row.bits
            if row.redriven:
                found.redriven[numbering] += row.records
                continue
            _follow(found, row, delay)
            if row.late:
                late[numbering][row.block] |= row.late
    found.runs = {numbering: Runs(_pieces(blocks)) for numbering, blocks in seen.items()}
    found.disorder = {numbering: Runs(_pieces(blocks)) for numbering, blocks in late.items()}
    found.latencies = {channel: sketch for channel, sketch in delays.items() if sketch.count}
    found.steps = {channel: sketch for channel, sketch in steps.items() if sketch.count}


def _count(found: Findings, row: Any) -> None:
    found.records[row.topic] += row.records
    found.minutes[row.topic, row.minute] += row.records
    if row.unknown:
        found.without_identity[row.topic] += row.unknown


def _follow(found: Findings, row: Any, delay: "_Span") -> None:
    """Add the durations of these records, and the last number of the sender in the partition."""
    numbering, (least, most, total) = (row.topic, row.sender, row.epoch), delay
    span = Span(row.delays, least, total, most, row.newest)
    if numbering in found.spans:
        found.spans[numbering].merge(span)
    else:
        found.spans[numbering] = span
    location = (row.topic, row.partition, row.sender, row.epoch)
    first, highest = found.tails.get(location, (row.highest, row.highest))
    found.tails[location] = (first if row.first is None else row.first, max(highest, row.highest))


def _sum(upper: int | None, lower: int | None) -> int:
    return ((upper or 0) << 32) + (lower or 0)


_Span = tuple[int, int, int]
"""The least, the greatest and the total of durations."""
_Blocks = dict[int, int]
"""Numbers as bits, 64 to a block."""


def _pieces(blocks: _Blocks) -> Iterator[tuple[int, int]]:
    """The runs of set bits, block by block."""
    for block, signed in sorted(blocks.items()):
        at, bits = block * 64, signed & (2**64 - 1)
        while bits:
            zeros = (bits & -bits).bit_length() - 1
            bits >>= zeros
            ones = (~bits & (bits + 1)).bit_length() - 1
            yield at + zeros, at + zeros + ones - 1
            bits >>= ones
            at += zeros + ones
