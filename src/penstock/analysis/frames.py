"""Decode the records of a channel to the frame that a query reads, and encode its result.

A record that does not fit has a reason. The same expression is used everywhere: queries read the records without a
reason, the dead letters get the others.
"""

import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, IntegralType, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from penstock.analysis import validation
from penstock.analysis.query import NUMBER, PAYLOAD, Query, Shape
from penstock.analysis.validation import Objection, because
from penstock.audit.writers import HEADER
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import GENERATIONS

ARROW_SETTING = "spark.sql.execution.pythonUDF.arrow.enabled"
SPARK_ERRORS = (PySparkException, Py4JJavaError)


def in_columns(build: Callable[..., Any], spark: SparkSession) -> None:
    """Run the Python functions of a query's module on Arrow, unless Spark's settings disable it.

    Also those made with useArrow=False: Spark does not store this argument.
    """
    plain = [one for one in _udfs_of(build) if one.evalType == PythonEvalType.SQL_BATCHED_UDF]
    if plain and spark.conf.get(ARROW_SETTING) == "true":
        for one in plain:
            one.evalType = PythonEvalType.SQL_ARROW_BATCHED_UDF
            one._judf_placeholder = None


def _udfs_of(build: Callable[..., Any]) -> Iterator[UserDefinedFunction]:
    """The UDFs among the globals of the query's module, and in its closure."""
    values = list(getattr(build, "__globals__", {}).values())
    for cell in getattr(build, "__closure__", None) or ():
        with suppress(ValueError):  # An empty cell.
            values.append(cell.cell_contents)
    for value in values:
        # F.udf() returns a function that wraps the UDF.
        if isinstance(found := getattr(value, "_unwrapped", None), UserDefinedFunction):
            yield found


RAW = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
"""The columns of Spark's Kafka source."""

ADDED = ("origin", "event_time")
"""The columns of every typed frame beside those of its payload."""

KEY, DELETED = "_key", "_deleted"
"""Further columns of a typed frame of a table: the key of the row as text, and whether it is deleted."""

MARK = "xxhash64(origin.sender, origin.epoch, origin.seq)"
"""The hash of a record in the checksum (`mark`) of a row."""

_SEEN = (
    f"struct(count(1) AS count, max(origin.time) AS newest, max(origin.appended) AS appended, bit_xor({MARK}) AS mark)"
)
_RESERVED, _PASSED, _NEWEST = "taken", "passed", "newest"
_FITS, _WANTED = "_fits", "_wanted"
ACCEPTED = f"{_FITS} AND {_WANTED}"
"""Whether the query reads a validated record."""
ONCE = "_once"
"""The column that is equal in two copies of a record."""
EXACT = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreNullFields": "false",
}
"""JSON options that keep microseconds and nulls."""
_ORIGIN_HEADERS, _ORIGIN = "_told", ("sender", "epoch", "seq", "time")


def seen() -> Column:
    """The number of records in a result row, and the time of the newest: its version, which the audit checks.

    The row's headers also hold when the newest record was appended, and a checksum of all records, by which the audit
    finds a missing one.
    """
    return F.expr(_SEEN).alias("seen")


def seen_payload() -> Column:
    """The fields of `seen` that are in a row's payload; the others are in its headers."""
    return F.struct("seen.count", "seen.newest")


def schema_of(shape: Shape) -> StructType:
    """The columns of the payload; Misconfigured when the DDL is invalid."""
    try:
        schema = columns_of(shape.ddl or "value STRING")
    except PySparkException as error:
        fix = "types are those of Spark: STRING, BIGINT, DOUBLE, BOOLEAN, TIMESTAMP, ARRAY<…>, STRUCT<name: …>"
        raise Misconfigured(
            f"channel {shape.channel}", f"its schema cannot be read: {description(error)}", fix
        ) from None
    for name in (*ADDED, validation.CORRUPT, *((KEY, DELETED) if shape.table else ())):
        if name in schema.names:
            raise Misconfigured(
                f"channel {shape.channel}", f'"{name}" is a column that Penstock adds', "name the field otherwise"
            )
    return schema


def typed(raw: DataFrame, shape: Shape) -> DataFrame:
    """The records that fit, as a query reads them: the payload's columns, `origin` and `event_time`."""
    return parsed(raw, shape).where(fits(shape)).select(*_seen_of(shape))


def validated(raw: DataFrame, shape: Shape, query: Query) -> DataFrame:
    """All records of a channel, with columns for whether each fits and matches where=, and for deduplication."""
    if shape.table and query.where is not None:
        problem = f"its where= would hide changes and deletions of rows of the table {shape.channel}"
        raise Misconfigured(f"query {query.name}", problem, "say it inside: tables.where(…)")
    frame = parsed(raw, shape).select(*_seen_of(shape), fits(shape).alias(_FITS), _once(shape).alias(ONCE))
    # The condition is evaluated only for records that fit.
    try:
        condition = _condition(frame, query)
        return frame.withColumn(_WANTED, F.coalesce(F.when(F.col(_FITS), condition), F.lit(False)))
    except PySparkException:
        # Evaluated alone, the error is clearer.
        wanted(frame, query)
        raise


def wanted(frame: DataFrame, query: Query) -> DataFrame:
    """The rows of a typed frame that match the query's where=."""
    try:
        return frame.where(_condition(frame, query))
    except PySparkException as error:
        raise Misconfigured(f"query {query.name}, where=", description(error)) from None


def _condition(frame: DataFrame, query: Query) -> Column:
    if query.where is None:
        return F.lit(True)
    if isinstance(query.where, str):
        return F.expr(query.where)
    made = _called(query.where, query.name, [frame])
    if not isinstance(made, Column):
        raise Misconfigured(f"query {query.name}", f"its where= gives {type(made).__name__}", "give a Column")
    return made


def outcome_counts() -> list[Column]:
    fits, wanted = F.col(_FITS), F.col(_WANTED)
    return [
        F.count(F.lit(1)).alias("taken"),
        F.count_if(~fits).alias("refused"),
        F.count_if(fits & ~wanted).alias("filtered"),
    ]


def _newest() -> Column:
    """The newest event time of records that fit, in microseconds since 1970."""
    return F.max(F.when(F.col(_FITS), F.unix_micros("event_time"))).alias(_NEWEST)


def newest_event(observed: Mapping[str, Any]) -> int | None:
    """The newest event time of a batch, in microseconds since 1970; None without records."""
    found = [row[_NEWEST] for name, row in observed.items() if name.endswith(f" {_RESERVED}") and _NEWEST in row]
    return max((newest for newest in found if newest is not None), default=None)


def as_read(frame: DataFrame) -> DataFrame:
    """Validated records with the columns that the query reads."""
    return frame.drop(_FITS, _WANTED, ONCE)


def query_input(raw: DataFrame, shape: Shape, query: Query, gated: bool) -> DataFrame:
    """The records of a channel that a query reads: those that fit, match where=, and are neither late nor duplicates.

    Spark reports the counts with each batch, see `counts`.
    """
    observed = validated(raw, shape, query).observe(f"{shape.channel} {_RESERVED}", *outcome_counts(), _newest())
    frame = observed.where(ACCEPTED)
    if query.max_lateness is not None:
        frame = frame.withWatermark("event_time", f"{query.max_lateness.total_seconds()} seconds")
    if gated:
        if shape.table:
            problem = f"rows of the table {shape.channel} may have no time, and would stay in the state forever"
            raise Misconfigured(f"query {query.name}", problem, "leave out its watermark=, or unique= of the channel")
        # Here Spark drops late records one by one. An aggregation would drop rows, and count rows.
        frame = frame.dropDuplicates([ONCE, "event_time"])
        frame = frame.observe(f"{shape.channel} {_PASSED}", F.count(F.lit(1)).alias("passed"))
    return as_read(frame)


def boundaries(query: Query, gated: bool) -> list[str]:
    """The names of the observations between the input and the query's own plan, one for each input."""
    return [f"{name} {_PASSED if gated else _RESERVED}" for name in query.inputs]


def is_boundary(name: str) -> bool:
    """Whether an observation is one of a channel, and not one of the query itself."""
    return name.endswith((f" {_RESERVED}", f" {_PASSED}"))


def counts(observed: Mapping[str, Any], channel: str) -> dict[str, int] | None:
    """The counts taken, refused, filtered and passed of a batch; None when Spark reported nothing."""
    before, after = observed.get(f"{channel} {_RESERVED}"), observed.get(f"{channel} {_PASSED}")
    if before is None:
        return None
    counted = {name: value for name, value in before.asDict().items() if name != _NEWEST}
    passed = counted["taken"] - counted["refused"] - counted["filtered"] if after is None else after["passed"]
    return {**counted, "passed": passed}


@dataclass(frozen=True)
class ResultWriters:
    """The writers of a result channel, as a query that reads the channel knows them when it starts."""

    tokens: Collection[str]
    """The tokens that were announced."""
    first: Offsets
    """Where the rows begin that must carry a token."""
    prefix: str = ""
    """Tokens of this process begin with it. They are accepted, also when they are announced later."""


def genuine(writers: ResultWriters) -> Column:
    """Whether a writer of a result has written a raw row, or the row is older than tokens."""
    token = header_value(HEADER)
    announced = token.isin(*writers.tokens)
    if writers.prefix:
        announced = announced | token.startswith(writers.prefix)
    return F.when(token.isNull(), F.col("offset") < by_partition(writers.first)).otherwise(announced)


def header_value(name: str) -> Column:
    """The value of the first header of a name, as text."""
    return F.expr(f"get(filter(headers, h -> h.key = '{name}'), 0)")["value"].cast("string")


def by_partition(offsets: Offsets) -> Column:
    """The offset of a row's partition; 0 for a partition that is not named."""
    found = F.lit(0).cast("bigint")
    for partition, offset in offsets.items():
        found = F.when(F.col("partition") == partition, F.lit(offset)).otherwise(found)
    return found


def _once(shape: Shape) -> Column:
    """The value that two copies of a record share; a record without a number is unique."""
    location = F.concat_ws(":", F.col("topic"), F.col("partition"), F.col("offset"))
    if shape.unique is None:
        return location
    if shape.unique == PAYLOAD:
        return F.coalesce(F.sha2("value", 256), location)
    if shape.unique != NUMBER:
        return F.coalesce(F.col(f"doc.`{shape.unique}`").cast("string"), location)
    number = F.concat_ws("/", F.col("origin.sender"), F.col("origin.epoch"), F.col("origin.seq"))
    return F.when(F.col("origin.seq").isNull(), location).otherwise(number)


def _seen_of(shape: Shape) -> list[Column]:
    added = [F.col(name) for name in ADDED]
    if shape.table:
        added += [_key().alias(KEY), F.col("value").isNull().alias(DELETED)]
    return [*validation.payload(schema_of(shape)), *added]


def _key() -> Column:
    """The key of a row as text. Keys of results are JSON arrays; an array with one value becomes that value."""
    text = F.col("key").cast("string")
    alone = F.get(F.from_json(text, "array<string>"), F.lit(0))
    single = F.size(F.from_json(text, "array<string>")) == 1
    # A key must not be null: `[null]` stays as it is.
    return F.coalesce(F.when(text.startswith("[") & single, alone), text)


def fits(shape: Shape) -> Column:
    """Whether a parsed record fits its channel."""
    found = F.lit(True)
    for objection, _ in reversed(_objections(shape)):
        found = F.when(objection, F.lit(False)).otherwise(found)
    return found


def dead_letters(raw: DataFrame, shape: Shape) -> DataFrame:
    """The records that do not fit, unchanged, with the reason and the place as headers."""
    location = F.concat_ws(":", F.col("topic"), F.col("partition"), F.col("offset"))
    added = F.array(_header("reason", F.col("reason")), _header("place", location))
    headers = F.concat(F.coalesce(F.col("headers"), F.array().cast("array<struct<key:string,value:binary>>")), added)
    refused = (
        parsed(raw, shape)
        .withColumn("reason", validation.first_reason(_objections(shape)))
        .where(F.col("reason").isNotNull())
    )
    return refused.select("key", "value", headers.alias("headers"))


def parsed(raw: DataFrame, shape: Shape) -> DataFrame:
    """Add the columns `doc` (the payload), `origin` and `event_time` to raw records."""
    schema = schema_of(shape)
    doc = F.struct(F.col("value").cast("string").alias("value"))
    if shape.ddl is not None:
        doc = validation.parsed(schema, shape.json)
    # The optimizer takes this expression for nondeterministic and computes it once. Otherwise it would copy the parsing
    # into every expression that uses its result.
    frame = raw.withColumn(_ORIGIN_HEADERS, _origin_headers()).withColumn("origin", _origin()).drop(_ORIGIN_HEADERS)
    frame = frame.withColumn("doc", F.when(F.spark_partition_id() >= 0, doc))
    if shape.event_time is None:
        return frame.withColumn("event_time", F.timestamp_micros("origin.time"))
    try:
        return frame.withColumn("event_time", _over_doc(shape.event_time, schema))
    except PySparkException as error:
        problem = (
            f"its event time ({shape.event_time}) cannot be computed: {description(error).partition(' Did you')[0]}"
        )
        fix = f"use its columns: {', '.join(schema.names)}"
        raise Misconfigured(f"channel {shape.channel}", problem, fix) from None


def _objections(shape: Shape) -> list[Objection]:
    """The conditions that refuse a record, in order, with their reasons."""
    schema = schema_of(shape)
    there = F.col("value").isNotNull()
    found = [because(~there, "the value is null")]
    if shape.table:
        # A record of a table without a value deletes a row: it needs a key.
        found = [because(F.col("key").isNull(), "it has no key, and its channel is a table")]
    if shape.ddl is not None:
        found += [(there & wrong, why) for wrong, why in validation.objections(F.col("doc"), schema, shape.json)]
    without = "it has no origin, and the channel declares no event time"
    if shape.event_time is not None:
        without = f"its event time ({shape.event_time}) is null"
    if not shape.table:
        # Rows of a table are identified by their key; many have no time, deletions never have.
        found.append(because(F.col("event_time").isNull(), without))
    # Records without a time of arrival (0 or -1) are not checked.
    counted = F.col("timestamp") > F.timestamp_seconds(F.lit(0))
    latest = F.col("timestamp") + F.make_dt_interval(secs=F.lit(shape.ahead.total_seconds()))
    found.append(because(counted & (F.col("event_time") > latest), "its event time lies in the future"))
    return found


def built(query: Query, frames: Sequence[DataFrame], tables: Mapping[str, DataFrame] | None = None) -> DataFrame:
    """Apply the query to its inputs and static tables."""
    if not isinstance(query.build, str):
        in_columns(query.build, frames[0].sparkSession)
        # The parameters of tables and channels may be in any order: frames are passed by name.
        named = {**dict(zip(query.inputs, frames, strict=True)), **tables} if tables else {}
        result = _called(query.build, query.name, () if named else frames, named)
        if not isinstance(result, DataFrame):
            raise Misconfigured(f"query {query.name}", f"it returns {type(result).__name__}", "return a DataFrame")
        return result
    spelled = Spelled.out(query.build, lambda names: f"{_counted(names)} AS seen")
    try:
        with _VIEWS:
            for name, frame in (*zip(query.inputs, frames, strict=True), *(tables or {}).items()):
                frame.createOrReplaceTempView(f"`{name}`")
            return frames[0].sparkSession.sql(spelled.text)
    except PySparkException as error:
        message = description(error)
        raise Misconfigured(_location_in(query, spelled.location(str(error))), message, _advice(message)) from None


_SEEN_CALL = re.compile(
    r"""(?P<skip>--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)"""
    r"""|(?<![\w.])seen\(\s*(?P<of>\w+(?:\s*,\s*\w+)*)?\s*\)(?:\s+AS\s+seen\b)?""",
    re.IGNORECASE | re.DOTALL,
)
_POSITION = re.compile(r"\bline (\d+),? pos (\d+)")


@dataclass(frozen=True)
class Spelled:
    """The expanded SQL, and the mapping of its positions to the user's SQL."""

    own: str
    text: str
    put: tuple[tuple[slice, slice], ...] = ()
    """The expansions: the slice in Spark's text, and the slice in the user's text."""

    @classmethod
    def out(cls, own: str, counted: Callable[[tuple[str, ...]], str]) -> "Spelled":
        """`counted` returns the expansion of `seen(…)` for its arguments."""
        text, done, put = "", 0, []
        for match in _SEEN_CALL.finditer(own):
            if match["skip"]:
                continue
            text += own[done : match.start()]
            meaning = counted(tuple(re.findall(r"\w+", match["of"] or "")))
            put.append((slice(len(text), len(text) + len(meaning)), slice(*match.span())))
            text, done = text + meaning, match.end()
        return cls(own, text + own[done:], tuple(put))

    def location(self, message: str) -> tuple[int, int] | None:
        """The line and column in the user's text, from 1, of an error of Spark; None without a position."""
        if (found := _POSITION.search(message)) is None:
            return None
        line, column = int(found[1]), int(found[2])
        index = sum(len(one) + 1 for one in self.text.split("\n")[: line - 1]) + column
        before = self.own[: self._own(index)]
        return before.count("\n") + 1, len(before) - before.rfind("\n")

    def _own(self, index: int) -> int:
        """The index in the user's text of an index in Spark's text."""
        for there, here in reversed(self.put):
            if index >= there.stop:
                return int(index - there.stop + here.stop)
            if index >= there.start:
                return int(here.start)
        return index


# A view name is reused for many frames: no other thread may replace the view in between.
_VIEWS = Lock()


def _counted(names: tuple[str, ...]) -> str:
    """The SQL of `seen()`: an aggregate of records; with several names, of the records in a row of their join."""
    if len(names) < 2:
        return _SEEN.replace("origin.", f"{names[0]}.origin.") if names else _SEEN
    each = [f"{name}.origin" for name in names]
    count = " + ".join(f"cast({origin} IS NOT NULL AS BIGINT)" for origin in each)
    mark = " ^ ".join(f"if({o} IS NULL, 0L, {MARK.replace('origin', o)})" for o in each)
    newest, appended = (f"greatest({', '.join(f'{o}.{field}' for o in each)})" for field in ("time", "appended"))
    return f"struct({count} AS count, {newest} AS newest, {appended} AS appended, {mark} AS mark)"


def _location_in(query: Query, position: tuple[int, int] | None) -> str:
    if query.file is not None:
        return f"{query.file}{f':{position[0]}' if position else ''}, query {query.name}"
    return f"query {query.name}" + (f", line {position[0]}, column {position[1]}" if position else "")


def _called(
    build: Callable[..., Any], query: str, arguments: Sequence[Any], named: Mapping[str, Any] | None = None
) -> Any:
    """Call the user's code; errors become Misconfigured with file and line."""
    try:
        return build(*arguments, **(named or {}))
    except Misconfigured:
        raise
    except PySparkException as error:
        # Read now: after the session has ended, Spark cannot describe the error.
        message = description(error)
        raise Misconfigured(line_in(build, error, f"query {query}"), message, _advice(message)) from None
    except Exception as error:
        raise Misconfigured(line_in(build, error, f"query {query}"), f"{type(error).__name__}: {error}") from error


def line_in(function: Any, error: Exception, location: str) -> str:
    """A location with the file and line of the user's function in which an error was raised, if it was there."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f"{Path(str(own)).name}:{lines[-1]}, {location}" if lines else location


_ADVICE = {
    "Unable to parse '": 'write a duration such as "10 seconds" or "5 minutes"',
    "must be executed with writeStream": "return a DataFrame, and leave out show(), count(), collect() and write",
    'first parameter requires the ("(TIMESTAMP': "use event_time, or make a timestamp of it: timestamp_millis(…)",
}
"""The fix for an error of Spark, by a part of its text."""


def _advice(message: str) -> str:
    return next((advice for part, advice in _ADVICE.items() if part in message), "")


def description(error: Exception) -> str:
    """The sentence of a Spark error, without class names and advice."""
    text = re.split(r"\n|SQLSTATE|To bypass|Please ensure|\.;", str(error).strip())[0]
    text = re.sub(r"^.*?\[[A-Z_.]+\]\s*", "", text)
    # Internal columns are not suggested.
    text = re.sub(r"(?<=[\[ ])`_\w+`(, |(?=\]))", "", text)
    text = re.sub(r"Streaming real-time mode has the following limitation:\s*", "", text)
    return re.sub(r"\b(?:[a-z0-9]+\.)+([A-Z]\w*?)(?:Exec)?\b", r"\1", text).strip().rstrip(".")


@contextmanager
def spark_errors(service: str) -> Iterator[None]:
    """Convert errors of Spark to Unavailable."""
    try:
        yield
    except SPARK_ERRORS as error:
        raise Unavailable(service, description(error) or type(error).__name__) from None


def encoded(result: DataFrame, query: Query, generation: int = 0, writer: str = "") -> DataFrame:
    """Encode a result as records: the key as a JSON array, the row as a JSON object, its identity as headers.

    A row with `seen.deleted` has no value. `generation` counts the checkpoints that the query has had. `writer` is the
    token of its rows, see `audit.writers`.
    """
    columns = result.columns
    if absent := [name for name in query.key if name not in columns]:
        raise Misconfigured(
            f"query {query.name}",
            f"its key has {' and '.join(absent)}, and its result only {', '.join(columns)}",
            "name columns of the result",
        )
    headers = [_header("query", F.lit(query.name))]
    if writer:
        headers.append(_header(HEADER, F.lit(writer)))
    if "seen" in columns:
        fields = {"version": "count", "time": "newest", "appended": "appended", "mark": "mark"}
        # A query over a result may pass on its `seen`, which has fewer fields.
        names = getattr(result.schema["seen"].dataType, "names", ())
        counted = {name: F.col(f"seen.{field}") for name, field in fields.items() if field in names}
        if generation and "version" in counted:
            counted["version"] = counted["version"] + F.lit(generation * GENERATIONS)
        headers += [_header(name, value) for name, value in counted.items()]
    elif "origin" in columns:
        # In the order of a sender's headers: the next query reads them by index.
        whose = ("sender", "epoch", "seq", "time", "appended")
        headers = [*(_header(name, F.col(f"origin.{name}")) for name in whose), *headers]
    row = [seen_payload().alias(name) if name == "seen" else F.col(f"`{name}`") for name in columns if name != "origin"]
    value = F.to_json(F.struct(*row), {"ignoreNullFields": "false"}).cast("binary")
    if "seen" in columns and "deleted" in names:
        value = F.when(~F.col("seen.deleted"), value)
    return result.select(
        _json_array({name: result.schema[name].dataType for name in query.key}).cast("binary").alias("key"),
        value.alias("value"),
        F.array(*headers).alias("headers"),
    )


def _origin_headers() -> Column:
    """The headers of an origin: by index, as Penstock's senders write them; otherwise by name."""
    in_location = " AND ".join(f"get(headers, {at}).key = '{name}'" for at, name in enumerate(_ORIGIN))
    found = ", ".join(f"get(filter(headers, h -> h.key = '{name}'), 0)" for name in _ORIGIN)
    return F.expr(f"CASE WHEN {in_location} THEN headers ELSE array({found}) END")


def _origin() -> Column:
    """One SQL text: each PySpark function call is several messages to the JVM, and every query needs this."""
    header = {name: f"CAST(get({_ORIGIN_HEADERS}, {at}).value AS STRING)" for at, name in enumerate(_ORIGIN)}
    number = {name: f"try_cast({header[name]} AS BIGINT)" for name in _ORIGIN}
    # Only the canonical spelling of a number is accepted, as everywhere.
    exact = ", ".join(
        f"'{name}', CASE WHEN CAST({number[name]} AS STRING) = {header[name]} THEN {number[name]} END"
        for name in ("epoch", "seq", "time")
    )
    return F.expr(
        f"named_struct('sender', {header['sender']}, {exact},"
        " 'appended', unix_micros(timestamp), 'partition', partition, 'offset', offset)"
    )


def _over_doc(event_time: str, schema: StructType) -> Column:
    """The expression of the event time, with references to the payload's columns."""
    expression = re.sub(
        r"(?<![\w.`'])([A-Za-z_]\w*)(?=[\s,.)+*/-]|$)",
        lambda match: f"doc.`{match[1]}`" if match[1] in schema.names else match[1],
        event_time,
    )
    # If the expression fails, there is no event time. Spark has no general TRY, but try_add covers its operands.
    return F.expr(f"try_add(try_cast({expression} AS TIMESTAMP), INTERVAL '0' SECOND)")


def _header(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def _json_array(columns: Mapping[str, DataType]) -> Column:
    parts = [_json(F.col(f"`{name}`"), kind) for name, kind in columns.items()]
    return F.concat(F.lit("["), F.concat_ws(",", *parts), F.lit("]"))


def _json(column: Column, kind: DataType) -> Column:
    if isinstance(kind, IntegralType):
        # An integer is its own JSON: this is much cheaper.
        return F.coalesce(column.cast("string"), F.lit("null"))
    part = F.to_json(F.array(column), {"ignoreNullFields": "false"})
    return part.substr(F.lit(2), F.length(part) - 2)


def columns_of(ddl: str) -> StructType:
    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    return schema
