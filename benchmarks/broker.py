"""A broker for a benchmark."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.channels.kafka import Kafka
from penstock.run.warm import kafka_archive
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.java import ensure_jars, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.supervisor import Supervisor


@contextmanager
def broker(folder: Path) -> Iterator[Kafka]:
    java = find_java()
    jars = ensure_jars(java)
    with StateFolder(folder / ".penstock").locked() as state:
        services, servers = kafka_services(java, jars, state, LocalSettings(), kafka_archive(java, jars).use_flags())
        supervisor = Supervisor(services, state)
        supervisor.start()
        try:
            yield Kafka(servers)
        finally:
            supervisor.stop()
