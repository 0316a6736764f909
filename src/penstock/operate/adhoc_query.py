"""An ad hoc query: SQL over channels and results, run for a while in a temporary folder."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from penstock.analysis.connectors import BinderConnector, KafkaConnector, SparkConnector
from penstock.analysis.engine import Engine
from penstock.analysis.interactive import InteractiveQuery, Result, inferred, result
from penstock.analysis.operators.statics import table
from penstock.analysis.query import Query, Shape
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.scan import scan
from penstock.pipeline.config import LOCAL, Config
from penstock.pipeline.description import Description
from penstock.pipeline.sql import tables
from penstock.run.analyse import spark_options, spark_session

NAME = "SQL"
_LOCATION = f"query {NAME}"
_MOST = 200_000
"""Records of a batch: the printed rows pass through the memory of this process."""
_SAMPLE = 500
_BYTES = 1 << 20
_SLOTS = 4
_EVENT_TIME = "coalesce(timestamp_micros(origin.time), timestamp_micros(origin.appended))"
"""The time at the sender, or the time of arrival without one."""


@dataclass(frozen=True)
class AdhocQuery:
    """The SQL and the options of an ad hoc query, before Spark is started."""

    sql: str
    channels: Channels
    config: Config
    description: Description | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    """By channel, columns as DDL: they replace declared and inferred ones."""
    watermark: timedelta | None = None
    where: str | None = None
    file: str | None = None
    """The file of the SQL, for messages."""

    def checked(self) -> "AdhocQuery":
        """Return self; raise Misconfigured if it cannot run."""
        if not self.names:
            raise Misconfigured(_LOCATION, "it reads no channel", "name one after FROM")
        if not self.channels.promise.replay:
            problem = f"reading at {self.channels.where} removes records: {self.channels.promise.description}"
            raise Misconfigured(_LOCATION, problem, "query channels at kafka://, redis:// or file://")
        for name in self.names:
            if "." in name and f"`{name}`" not in self.sql:
                raise Misconfigured(_LOCATION, f"to Spark, {name} is a table in a database", f"write `{name}`")
        for name in self.schemas:
            if name not in self.names:
                raise Misconfigured("--schema", f"{name} is not read", f"it reads {', '.join(self.names)}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The channels that it reads."""
        statics = {static.name for static in self.description.statics} if self.description else set()
        return tuple(name for name in tables(_LOCATION, self.sql) if name not in statics)

    @property
    def query(self) -> Query:
        statics = tuple(name for name in tables(_LOCATION, self.sql) if name not in self.names)
        return Query(
            NAME,
            self.names,
            NAME,
            (),
            self.sql,
            watermark=self.watermark,
            where=self.where,
            file=self.file,
            statics=statics,
        )


@contextmanager
def spark(adhoc: AdhocQuery, say: Callable[[str], None], stop: threading.Event) -> Iterator[tuple[Engine, Path]]:
    """Start Spark for one query, with a temporary folder; if `stop` is set before Spark is up, the process ends."""
    started = threading.Event()
    folder = Path(tempfile.mkdtemp(prefix="penstock-query-"))
    # All temporary files, also those of Spark, are in this folder.
    usual, tempfile.tempdir = tempfile.tempdir, str(folder)
    threading.Thread(target=_leave_at_once, args=(stop, started, folder), daemon=True).start()
    # It runs locally, also if the pipeline's own Spark does not.
    settings = adhoc.config.spark.model_copy(update={"master": LOCAL})
    try:
        with spark_session(NAME, settings, _SLOTS, None, [f"-Djava.io.tmpdir={folder}"]) as running:
            engine = Engine(running, settings, _connector(adhoc), str(folder), {})
            engine = _knowing(engine, adhoc, say)
            started.set()
            yield engine, folder
    finally:
        started.set()
        tempfile.tempdir = usual
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def followed(
    engine: Engine,
    adhoc: AdhocQuery,
    start: Mapping[str, Offsets],
    folder: Path,
    take: Callable[[Result, Iterator[str]], None],
) -> Iterator[InteractiveQuery]:
    """Run the query from these offsets; `take` receives the result's columns and batches of rows, each as JSON."""
    found = result(engine, adhoc.query, start)
    following = InteractiveQuery(found, adhoc.names, str(folder / "checkpoint"), lambda rows: take(found, rows))
    try:
        yield following
    finally:
        following.stop()


def _knowing(engine: Engine, adhoc: AdhocQuery, say: Callable[[str], None]) -> Engine:
    """Return the engine with the shapes of all channels that are read."""
    pipeline = adhoc.description
    shapes = {name: channel.shape for name, channel in pipeline.channels.items()} if pipeline else {}
    for name in adhoc.names:
        if (ddl := adhoc.schemas.get(name)) is not None:
            shapes[name] = replace(shapes.get(name, Shape(name)), ddl=ddl)
        elif name not in shapes:
            shapes[name] = _inferred_shape(engine, adhoc.channels, name, say)
    engine = replace(engine, shapes=shapes)
    if pipeline:
        statics = {static.name: static for static in pipeline.statics}
        engine = replace(engine, tables={name: table(engine.spark, one) for name, one in statics.items()})
        engine = engine.knowing([*_queries_of(pipeline, adhoc), adhoc.query])
    # A pipeline refuses a record without a time; an ad hoc query shows it.
    timed = {name: shape for name in adhoc.names if (shape := engine.shapes[name]).event_time is None}
    timed = {name: replace(shape, event_time=_EVENT_TIME) for name, shape in timed.items()}
    return replace(engine, shapes={**engine.shapes, **timed})


def _queries_of(description: Description, adhoc: AdhocQuery) -> list[Query]:
    """Return the queries whose results are read, directly or by another query."""
    wanted, found = [name for name in adhoc.names if name not in adhoc.schemas], dict[str, Query]()
    while wanted:
        name = wanted.pop()
        for query in description.queries:
            if query.into == name and query.name not in found:
                found[query.name] = query
                wanted += query.inputs
    return list(found.values())


def _inferred_shape(engine: Engine, channels: Channels, name: str, say: Callable[[str], None]) -> Shape:
    """Infer the shape of an undeclared channel from its newest records."""
    values = newest(channels, name)
    schema = inferred(engine.spark, values)
    if schema is not None:
        say(f"{name}: {schema}; inferred from {len(values):,} records, --schema overrides it")
    else:
        what = "they are not JSON objects" if values else "there is none yet"
        say(f"{name}: its records are text in the column value: {what}; --schema overrides it")
    return Shape(name, schema)


def newest(channels: Channels, name: str) -> list[bytes | None]:
    """Return the payloads of the last records of a channel, from all partitions, limited in number and size."""
    bounds = channels.bounds(name)
    share = max(1, _SAMPLE // len(bounds))
    start = {partition: max(low, end - share) for partition, (low, end) in bounds.items()}
    values: list[bytes | None] = []
    length = 0
    for entry in scan(channels, name, start, bounds):
        length += len(entry.value or b"")
        if values and length > _BYTES:
            break
        values.append(entry.value)
    return values


def _connector(adhoc: AdhocQuery) -> SparkConnector:
    skip_lost = adhoc.config.channels.lost == "skip"
    if isinstance(adhoc.channels, Kafka):
        return KafkaConnector(adhoc.channels.servers, spark_options(adhoc.config.kafka.conf), skip_lost, _MOST)
    return BinderConnector(adhoc.channels, skip_lost)


def _leave_at_once(stop: threading.Event, started: threading.Event, folder: Path) -> None:
    """End the process if `stop` is set while Spark starts: nothing has to be stopped yet, and the JVM ends with it."""
    stop.wait()
    if not started.is_set():
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
