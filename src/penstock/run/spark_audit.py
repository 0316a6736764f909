"""Spark for the audit: a small session that reads long ranges of channels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from penstock.analysis.audit_reader import SparkAuditReader
from penstock.analysis.session import session
from penstock.channels.kafka import Kafka
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.run.analyse import spark_options
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

SLOTS = 2


@contextmanager
def spark_reader(description: Description, config: Config, log: IO[bytes] | None) -> Iterator[SparkAuditReader]:
    """Start a Spark session for the audit, on the master of the queries."""
    channels = config.bind()
    if not isinstance(channels, Kafka):
        raise Misconfigured(
            "[audit] engine", f"Spark audits Kafka, and the channels are at {channels.where}", "use auto"
        )
    java = find_java()
    jars = ensure_jars(java)
    flags = spark_archive(java, jars).use_flags()
    name = f"{description.name} audit"
    with session(name, config.spark, java.path, jars.spark, SLOTS, log, flags) as spark:
        yield SparkAuditReader(spark, channels.servers, spark_options(config.kafka.conf))
