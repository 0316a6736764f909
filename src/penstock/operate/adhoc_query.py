"""A query that nobody declared: SQL over channels and results, looked at for a while, with nothing left behind."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from penstock.analysis.binder import BinderConnector
from penstock.analysis.connectors import KafkaConnector, SparkConnector
from penstock.analysis.engine import Engine
from penstock.analysis.interactive import InteractiveQuery, Result, inferred, result
from penstock.analysis.operators.statics import table
from penstock.analysis.query import Query, Shape
from penstock.analysis.session import session
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.scan import scan
from penstock.pipeline.config import LOCAL, Config
from penstock.pipeline.description import Description
from penstock.pipeline.sql import tables
from penstock.run.analyse import spark_words
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

NAME = "SQL"
_PLACE = f"query {NAME}"
_MOST = 200_000
"""Records of a batch: what is printed of it passes through the memory of this process."""
_SAMPLE = 500
_BYTES = 1 << 20
_SLOTS = 4
_EVENT_TIME = "coalesce(timestamp_micros(origin.time), timestamp_micros(origin.appended))"
"""The time at the sender, or that of arrival where no sender tells one."""


@dataclass(frozen=True)
class Asked:
    """What somebody wants to see, and all that is known of it before Spark is there."""

    sql: str
    channels: Channels
    config: Config
    description: Description | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    """By channel, columns as DDL that go before all that is declared or can be seen."""
    watermark: timedelta | None = None
    where: str | None = None
    file: str | None = None
    """Where the SQL was read from, for people."""

    def checked(self) -> "Asked":
        """The same; Misconfigured when it cannot work."""
        if not self.names:
            raise Misconfigured(_PLACE, "it reads no channel", "name one after FROM")
        if not self.channels.promise.replay:
            problem = f"what is read at {self.channels.where} is gone for others: {self.channels.promise.description}"
            raise Misconfigured(_PLACE, problem, "query channels at kafka://, redis:// or file://")
        for name in self.names:
            if "." in name and f"`{name}`" not in self.sql:
                raise Misconfigured(_PLACE, f"to Spark, {name} is a table in a database", f"write `{name}`")
        for name in self.schemas:
            if name not in self.names:
                raise Misconfigured("--schema", f"{name} is not read", f"it reads {', '.join(self.names)}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The channels that it reads."""
        statics = {static.name for static in self.description.statics} if self.description else set()
        return tuple(name for name in tables(_PLACE, self.sql) if name not in statics)

    @property
    def query(self) -> Query:
        statics = tuple(name for name in tables(_PLACE, self.sql) if name not in self.names)
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
def spark(asked: Asked, say: Callable[[str], None], stop: threading.Event) -> Iterator[tuple[Engine, Path]]:
    """Spark for one query, and a folder that is gone afterwards; when `stop` is set before it is up, all ends there."""
    java = find_java()
    jars = ensure_jars(java)
    started = threading.Event()
    place = Path(tempfile.mkdtemp(prefix="penstock-query-"))
    # Whatever is put down for a while, by us or by Spark, lies there.
    usual, tempfile.tempdir = tempfile.tempdir, str(place)
    threading.Thread(target=_leave_at_once, args=(stop, started, place), daemon=True).start()
    # It reads from here, wherever the pipeline's own Spark runs.
    settings = asked.config.spark.model_copy(update={"master": LOCAL})
    flags = [*spark_archive(java, jars).use_flags(), f"-Djava.io.tmpdir={place}"]
    try:
        with session(NAME, settings, java.path, jars.spark, _SLOTS, None, flags) as running:
            engine = Engine(running, settings, _connector(asked), str(place), {})
            engine = _knowing(engine, asked, say)
            started.set()
            yield engine, place
    finally:
        started.set()
        tempfile.tempdir = usual
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def followed(
    engine: Engine,
    asked: Asked,
    start: Mapping[str, Offsets],
    place: Path,
    take: Callable[[Result, Iterator[str]], None],
) -> Iterator[InteractiveQuery]:
    """Run the query from these positions; `take` gets what its rows look like, and some of them, each as JSON."""
    found = result(engine, asked.query, start)
    following = InteractiveQuery.start(found, asked.names, str(place / "checkpoint"), lambda rows: take(found, rows))
    try:
        yield following
    finally:
        following.stop()


def _knowing(engine: Engine, asked: Asked, say: Callable[[str], None]) -> Engine:
    """The engine, with the shapes of all that is read."""
    described = asked.description
    shapes = {name: channel.shape for name, channel in described.channels.items()} if described else {}
    for name in asked.names:
        if (told := asked.schemas.get(name)) is not None:
            shapes[name] = replace(shapes.get(name, Shape(name)), ddl=told)
        elif name not in shapes:
            shapes[name] = _seen(engine, asked.channels, name, say)
    engine = replace(engine, shapes=shapes)
    if described:
        statics = {static.name: static for static in described.statics}
        engine = replace(engine, tables={name: table(engine.spark, one) for name, one in statics.items()})
        engine = engine.knowing([*_makers(described, asked), asked.query])
    # A record without a time is refused by a pipeline; who looks at a channel wants to see it.
    timed = {name: shape for name in asked.names if (shape := engine.shapes[name]).event_time is None}
    timed = {name: replace(shape, event_time=_EVENT_TIME) for name, shape in timed.items()}
    return replace(engine, shapes={**engine.shapes, **timed})


def _makers(description: Description, asked: Asked) -> list[Query]:
    """The queries whose results are read, and those whose results they read."""
    wanted, found = [name for name in asked.names if name not in asked.schemas], dict[str, Query]()
    while wanted:
        name = wanted.pop()
        for query in description.queries:
            if query.into == name and query.name not in found:
                found[query.name] = query
                wanted += query.inputs
    return list(found.values())


def _seen(engine: Engine, channels: Channels, name: str, say: Callable[[str], None]) -> Shape:
    """The shape of a channel that nobody declared, by the newest of its records."""
    values = newest(channels, name)
    schema = inferred(engine.spark, values)
    if schema is not None:
        say(f"{name}: {schema}; seen in {len(values):,} of its records, --schema says otherwise")
    else:
        what = "they are no JSON objects" if values else "there is none yet"
        say(f"{name}: its records are text in the column value: {what}; --schema says otherwise")
    return Shape(name, schema)


def newest(channels: Channels, name: str) -> list[bytes | None]:
    """The payloads of the last records of a channel, of all its partitions; not more than are needed to know them."""
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


def _connector(asked: Asked) -> SparkConnector:
    skip_lost = asked.config.channels.lost == "skip"
    if isinstance(asked.channels, Kafka):
        return KafkaConnector(asked.channels.servers, spark_words(asked.config.kafka.conf), skip_lost, _MOST)
    return BinderConnector(asked.channels, skip_lost)


def _leave_at_once(stop: threading.Event, started: threading.Event, place: Path) -> None:
    """While Spark comes up, nobody hears; there is nothing to end in order yet, and its JVM ends with us."""
    stop.wait()
    if not started.is_set():
        shutil.rmtree(place, ignore_errors=True)
        os._exit(0)
