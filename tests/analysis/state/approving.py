"""A driver to be killed: runs a query that keeps state in Python until then.

python approving.py SERVERS CHANNEL INTO CHECKPOINTS LOCAL
"""

import sys

from tests.analysis.state import cards

from penstock.analysis.engine import Engine
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.launching import launch
from penstock.analysis.session import session
from penstock.analysis.settings import SparkSettings
from penstock.pipeline.warm import spark_archive
from penstock.supervise.jars import ensure_jars
from penstock.supervise.java import find_java


def main(servers: str, channel: str, into: str, checkpoints: str, local: str) -> None:
    java = find_java()
    jars = ensure_jars(java)
    settings = SparkSettings(every="50 ms", conf={"spark.local.dir": local})
    with session("approving", settings, java.path, jars.spark, 4, None, spark_archive(java, jars).used()) as spark:
        engine = Engine(spark, settings, KafkaWire(servers), checkpoints, {channel: cards.shape(channel)})
        running, _ = launch(engine, cards.query(channel, into), 0, {})
        running.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
