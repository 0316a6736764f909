"""Start queries at their checkpoints, in the best mode that Spark accepts."""

import logging
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.analysis.checkpoints.batches import EXCLUDED_FILE, Written, abandon_batch, excluded, on_disk, resume_batch
from penstock.analysis.checkpoints.doctor import Diagnosis, Facts, Fit, begin_anew, examine, readable
from penstock.analysis.checkpoints.note import NAME, Fingerprint, Note, fingerprint
from penstock.analysis.engine import Engine
from penstock.analysis.frames import SPARK_ERRORS, dead_letters, description, encoded
from penstock.analysis.operators.keyed import keeps_state, waits
from penstock.analysis.plans import Verdict, accepts_update, analyzed, by_arrival, decide, plainly, refusal
from penstock.analysis.query import Emit, Mode, Query, Shape
from penstock.analysis.supervision import telling
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured, Unavailable

_OPERATORS = {
    "stateStoreSave": "an aggregation",
    "sessionWindowStateStoreSaveExec": "an aggregation by sessions",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    "symmetricHashJoin": "a join of streams",
    "globalLimit": "a limit",
    "transformWithStateInPySparkExec": "state in Python",
}


def objection_to_state(spark: SparkSession, result: DataFrame, output: str, path: Path, found: Written) -> str | None:
    """The objection of Spark's planner to this checkpoint; None when it accepts.

    The next batch is planned as at a start of the query, with copies of the files that hold the operators and their
    schemas. No source is read, no state is loaded, and the checkpoint does not change.
    """
    with TemporaryDirectory(prefix="penstock-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            _copy(path, Path(folder), found)
            _plan(spark, result, output, Path(folder), found)
        except SPARK_ERRORS as error:
            return explained(error)
    return None


def _copy(path: Path, folder: Path, found: Written) -> None:
    for log, number in (("offsets", found.begun), ("commits", found.finished)):
        if number is not None:
            (folder / log).mkdir()
            shutil.copy(path / log / str(number), folder / log)
    if found.begun == found.finished:
        # Spark writes the offsets of a batch before it plans the batch.
        shutil.copy(path / "offsets" / str(found.begun), folder / "offsets" / str(found.begun + 1))
    for noted in path.glob("state/**/_metadata"):
        shutil.copytree(noted, folder / noted.relative_to(path))


def _plan(spark: SparkSession, result: DataFrame, output: str, folder: Path, found: Written) -> None:
    jvm = spark._jvm
    assert jvm is not None
    streaming = jvm.org.apache.spark.sql.execution.streaming
    execution = streaming.runtime.IncrementalExecution
    metadata = getattr(getattr(streaming.checkpointing, "OffsetSeqMetadata$"), "MODULE$")
    watermarks = getattr(getattr(streaming.runtime, "WatermarkPropagator$"), "MODULE$")
    nothing = getattr(getattr(jvm, "scala.None$"), "MODULE$")
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    someone = jvm.java.util.UUID.randomUUID()
    _, noted, *_ = (folder / "offsets" / str(found.begun)).read_text(encoding="utf-8").splitlines()
    execution(
        spark._jsparkSession,
        analyzed(result),
        modes.Update() if output == "update" else modes.Append(),
        str(folder / "state"),
        someone,
        someone,
        found.begun + (found.begun == found.finished),
        nothing,
        metadata.apply(noted),
        watermarks.noop(),
        True,
        *(getattr(execution, f"$lessinit$greater$default${number}")() for number in range(12, 17)),
    ).executedPlan()


def explained(error: Exception) -> str:
    """Spark's objection to a state, as a sentence."""
    text = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
    if schemas := re.search(r"Existing (key|value)_schema=(.*?) and new \w+_schema=(.*?)\.\s", text, re.DOTALL):
        return f"its state has {schemas[1]} columns {_columns(schemas[2])}, and would have {_columns(schemas[3])}"
    if operators := re.search(r"in the metadata: \[(.*?)\]; .* in current batch: \[(.*?)\]", text, re.DOTALL):
        had, has = (re.findall(r"OperatorName: (\w+)", operators[number]) for number in (1, 2))
        return f"its state is of {_named(had)}, and would be of {_named(has)}"
    return f"Spark objects: {description(error)}"


def _named(operators: list[str]) -> str:
    return ", ".join(_OPERATORS.get(one, one) for one in operators) or "no operator"


def _columns(schema: str) -> str:
    found = re.findall(r"StructField\((\w+),(\w+?)(?:Type)?\b", schema)
    return ", ".join(f"{name} {kind.lower()}" for name, kind in found) or schema


log = logging.getLogger(__name__)

_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
_STARTING = threading.Lock()
"""Spark reads a session setting when a query starts: no other query may start in between."""


def examined(engine: Engine, query: Query, facts: Facts | None = None, result: DataFrame | None = None) -> Diagnosis:
    """Compare a query with its checkpoint, also by Spark's planner."""
    over = engine.frame(query, engine.stream) if result is None else result
    output = "update" if query.emit is Emit.CHANGE and accepts_update(over) else "append"

    def planned(path: Path, found: Written) -> str | None:
        return objection_to_state(engine.spark, encoded(over, query), output, path, found)

    # Records that are left out, and the known writers of an input, change nothing of what the query is.
    all_in = replace(engine, excluding=False, writers={})
    leaves_out = excluded(engine.checkpoint(query.name)) or not engine.writers.keys().isdisjoint(query.inputs)
    plain = all_in.frame(query, engine.stream) if leaves_out else over
    now = fingerprint(plain, query.into, output)
    return examine(query.name, engine.checkpoint(query.name), now, _knowing(engine, facts or Facts()), planned)


def _knowing(engine: Engine, facts: Facts) -> Facts:
    return replace(facts, setting=partial(_setting, engine), skip_lost=engine.connector.skip_lost)


def _setting(engine: Engine, name: str) -> str | None:
    try:
        return engine.spark.conf.get(name)
    except PySparkException:
        return None


def launch(
    engine: Engine, query: Query, locations: int, topics: Mapping[str, str], turn: int = 0, facts: Facts | None = None
) -> tuple[StreamingQuery, Verdict]:
    """Start a query at its checkpoint, in the best mode that Spark accepts.

    Misconfigured as in `fitting`. Real time is tried by a start: Spark refuses it before it reads a record. Queries
    with different turns start their batches at different times.
    """
    return begin(engine, query, fitting(engine, query, topics, facts), locations, turn)


@dataclass(frozen=True)
class Fitting:
    """A query that may start: its result over streams, its checkpoint's note, and the objection to real time."""

    result: DataFrame
    before: Note
    diagnosis: Diagnosis
    against: str | None


def fitting(engine: Engine, query: Query, topics: Mapping[str, str], facts: Facts | None = None) -> Fitting:
    """Misconfigured when a query cannot run, or does not fit its checkpoint. Changes nothing.

    `topics` are the ids of the query's topics.
    """
    engine.require_identifiable_late(query)
    before = readable(query.name, engine.checkpoint(query.name))
    result = _over_streams(engine, query, before.since or {})
    engine.require_streamable(query, result)
    diagnosis = examined(engine, query, replace(facts or Facts(), topics=topics), result)
    diagnosis.require()
    against = engine.foreseen(query, result) or diagnosis.in_batches_only
    if against is not None and query.mode is Mode.REAL_TIME:
        raise _not_in_real_time(query, against, diagnosis)
    return Fitting(result, before, diagnosis, against)


def _over_streams(engine: Engine, query: Query, since: Mapping[str, Offsets]) -> DataFrame:
    """The result of a query over its channels.

    Spark passes all records of a key in a batch to Python at once, and the first batch is the whole log. So queries
    with state in Python read a limited number of records with each batch.
    """
    result = engine.frame(query, lambda name: engine.stream(name, since.get(name)))
    if not keeps_state(result):
        return result
    limited = engine.connector.limited(engine.settings.state_batch)
    whole = {name for name in query.inputs if engine.shapes[name].table}
    if whole and not by_arrival(engine.over_nothing(query)):
        # Only a lookup depends on how much of the table was read before.
        whole = set()

    def stream(name: str) -> DataFrame:
        return (engine.connector if name in whole else limited).stream(engine.spark, name, since.get(name))

    return engine.frame(query, stream)


def begin(engine: Engine, query: Query, fits: Fitting, locations: int, turn: int = 0) -> tuple[StreamingQuery, Verdict]:
    """Start a query that fits its checkpoint, see `launch`."""
    folder, result, diagnosis = engine.checkpoint(query.name), fits.result, fits.diagnosis
    note = diagnosis.require()
    if not note.writer or note.generation > fits.before.generation:
        note = replace(note, writer=engine.token_prefix + token_hex(4))
    for remark in diagnosis.remarks:
        log.info("query %s: %s", query.name, remark)
    if note.generation > fits.before.generation:
        # Spark would compare the query with its previous plan.
        _forget_if_unused(folder)
    if not engine.abandons(query):
        resume_batch(folder)
    elif (number := abandon_batch(folder)) is not None:
        log.warning("query %s: its unfinished batch %d is abandoned", query.name, number)
    against = fits.against
    verdict = decide(query, against, locations)
    tried = verdict.mode is Mode.REAL_TIME
    if tried:
        try:
            started = _start(engine, query, result, verdict.mode, note, turn)
            against = refusal(engine.spark, started)
        except SPARK_ERRORS as error:
            against = plainly(error)
        if against is None:
            return started, verdict
        verdict = decide(query, against, locations)
    if verdict.mode is Mode.REAL_TIME:
        raise _not_in_real_time(query, str(against), diagnosis)
    if tried or diagnosis.fit is Fit.NEW:
        # In real time, Spark writes state metadata before it writes the offsets of the first batch.
        _forget_if_unused(folder)
    return _start(engine, query, result, verdict.mode, note, turn), verdict


def _not_in_real_time(query: Query, against: str, diagnosis: Diagnosis) -> Misconfigured:
    fix = "leave mode= out" + (f", or {begin_anew(query.name)}" if diagnosis.in_batches_only else "")
    return Misconfigured(f"query {query.name}", f"it cannot run in real time: {against}", fix)


def _start(engine: Engine, query: Query, result: DataFrame, mode: Mode, note: Note, turn: int) -> StreamingQuery:
    real_time = mode is Mode.REAL_TIME
    update = real_time or (query.emit is Emit.CHANGE and accepts_update(result))
    records = encoded(result, query, note.generation, note.writer)
    writer = _into(engine, records, query.into, query.name, note, at_once=real_time)
    # Before the first row: readers look up the token of a row.
    engine.announce(query, note)
    writer = writer.outputMode("update" if update else "append")
    if real_time:
        length = _length(engine.settings.real_time_batch, turn)
        # PySpark's own overloads do not know this trigger yet.
        return writer.trigger(realTime=length).start()  # type: ignore[call-overload,no-any-return]
    # Without new records, the watermark of the last batch may finalize rows, and timers may fire.
    without_data = str(not update or waits(result)).lower()
    writer = writer.trigger(processingTime=_every(query.every or engine.settings.every, turn))
    with _STARTING:
        engine.spark.conf.set(_WITHOUT_DATA, without_data)
        return writer.start()


def validate(engine: Engine, shape: Shape, into: str, topics: Mapping[str, str], turn: int = 0) -> StreamingQuery:
    """Start the query that writes records that do not fit to the dead letters of their channel."""
    name, note = f"{shape.channel}.dead", require_validation(engine, shape, into, topics)
    raw = engine.stream(shape.channel, (note.since or {}).get(shape.channel))
    if (out := engine.left_out(name, shape.channel)) is not None:
        raw = raw.where(~out)
    refused = dead_letters(raw, shape)
    writer = _into(engine, refused, into, name, note).outputMode("append")
    return writer.trigger(processingTime=_every(engine.settings.every, turn)).start()


def require_validation(engine: Engine, shape: Shape, into: str, topics: Mapping[str, str]) -> Note:
    """The note for the checkpoint of `validate`; Misconfigured when it does not fit. Changes nothing."""
    name, now = f"{shape.channel}.dead", Fingerprint((shape.channel,), into, "append")
    return examine(name, engine.checkpoint(name), now, _knowing(engine, Facts(topics))).require()


def _into(
    engine: Engine, records: DataFrame, channel: str, name: str, note: Note, at_once: bool = False
) -> DataStreamWriter:
    folder = engine.checkpoint(name)
    note.write(folder)
    writer = engine.connector.into(records, channel, at_once)
    return writer.queryName(name).option("checkpointLocation", folder)


def _length(batch: timedelta, turn: int) -> str:
    """Queries pause between batches. Different lengths keep the pauses of two queries apart."""
    return f"{int(batch.total_seconds() * (1000 + 70 * turn))} milliseconds"


def _every(interval: timedelta, turn: int) -> str:
    """Spark starts batches at multiples of the interval. Different intervals keep queries apart."""
    return f"{int(interval.total_seconds() * 1000) + 130 * turn} milliseconds"


def failed(queries: Iterable[StreamingQuery]) -> Unavailable | None:
    """Why the first ended query has ended."""
    for query in queries:
        if not query.isActive:
            error: StreamingQueryException | None = query.exception()
            return Unavailable(f"query {query.name}", telling(error) if error else "it ended")
    return None


def _forget_if_unused(folder: str) -> None:
    """Remove a checkpoint without commits after a refused start, except the files of Penstock."""
    path = on_disk(folder)
    if path is not None and path.is_dir() and not any(path.glob("commits/[0-9]*")):
        for left in path.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            elif left.name not in (NAME, EXCLUDED_FILE):
                left.unlink()


WARM_UPS = 25
WARM_UP_PAUSE = 0.5


def warm_up(
    engine: Engine, query: Query, stop: threading.Event, times: int = WARM_UPS, pause: float = WARM_UP_PAUSE
) -> int:
    """Plan a query over an empty frame repeatedly, until `times` or `stop`; return how often.

    Spark plans a query for each batch, and a real-time query pauses meanwhile. A cold JVM takes three times as long.
    """
    rows = encoded(engine.over_nothing(query), query)
    for done in range(times):
        if stop.wait(pause):
            return done
        # A frame caches its plan: a new frame is planned again.
        rows.select("*")._jdf.queryExecution().executedPlan()
    return times
