"""The analysis tier: all queries of a pipeline in one Spark session."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from penstock.analysis.engine import Engine, failed, slots
from penstock.analysis.progress import progress
from penstock.analysis.session import session
from penstock.channels.kafka import Kafka
from penstock.errors import Unavailable
from penstock.pipeline.description import Description
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.wiring import Wiring, topics
from penstock.supervise.jars import ensure_jars
from penstock.supervise.java import find_java

_LOOK_EVERY = 0.5
_PATIENCE = 120.0


def analyse(description: Description, wiring: Wiring, stop: threading.Event, ready: Callable[[], None]) -> None:
    """Run the queries until `stop`; raises Unavailable when one of them ends, so that all begin again together."""
    kafka = wiring.channels()
    with engine(description, wiring, sys.stderr.buffer) as spark:
        # Spark comes up, and answers about modes, while the broker does.
        verdicts = spark.verdicts(description.queries)
        _arrived(kafka, stop)
        kafka.ensure(topics(description))
        ids = {topic.name: kafka.topic_id(topic.name) for topic in topics(description)}
        running = {
            f"query:{query.name}": spark.start(
                query, verdicts[query.name], {name: ids[name] for name in (*query.inputs, query.into)}
            )
            for query in description.queries
        }
        sifting = {
            f"channel:{channel.dead}": spark.sift(channel.shape, channel.dead, {channel.name: ids[channel.name]})
            for channel in description.typed
        }
        queries = [*running.values(), *sifting.values()]

        def figures() -> Figures:
            told = {node: {**progress(query), "note": notes[node]} for node, query in running.items()}
            return {"nodes": told}

        notes = {f"query:{name}": f"{verdict.mode}: {verdict.why}" for name, verdict in verdicts.items()}
        with pulse(kafka, description.status, "analyse", figures):
            ready()
            while not stop.wait(_LOOK_EVERY):
                if error := failed(queries):
                    raise error
        for query in queries:
            query.stop()


@contextmanager
def engine(description: Description, wiring: Wiring, log: IO[bytes] | None) -> Iterator[Engine]:
    """Spark, ready for the queries of a pipeline; what its JVM says goes to the log, or nowhere."""
    java = find_java()
    jars = ensure_jars(java)
    partitions = {name: channel.partitions for name, channel in description.channels.items()}
    needed = slots(
        description.queries,
        partitions,
        [channel.name for channel in description.typed],
        wiring.spark.shuffle_partitions,
    )
    with session(description.name, wiring.spark, java.path, jars.spark, needed, log) as spark:
        shapes = {name: channel.shape for name, channel in description.channels.items()}
        own = Engine(
            spark, wiring.spark, wiring.kafka.servers, wiring.checkpoints, shapes, _spark_words(wiring.kafka.conf)
        )
        yield own.knowing(description.queries)


def _spark_words(conf: Mapping[str, str]) -> dict[str, str]:
    """What the two Kafka clients call by the same name; the rest is for librdkafka alone."""
    return {name: value for name, value in conf.items() if name.startswith(("security.", "sasl.", "ssl."))}


def _arrived(kafka: Kafka, stop: threading.Event) -> None:
    """Wait until the brokers answer."""
    waited = 0.0
    while not stop.is_set():
        try:
            kafka.brokers(timeout=2)
        except Unavailable:
            if waited >= _PATIENCE:
                raise
            stop.wait(0.2)
            waited += 2
        else:
            return
