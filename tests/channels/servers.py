"""A broker for the tests of channels: they kill it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.channels.kafka import Kafka
from penstock.supervise.process import Process, Service, start

HURRIED = """
group.consumer.min.heartbeat.interval.ms=100
group.consumer.heartbeat.interval.ms=100
group.consumer.min.session.timeout.ms=500
group.consumer.session.timeout.ms=2000
log.cleaner.backoff.ms=100
"""
"""Groups settle, and the dead are noticed, as quickly as a test wants it."""


class KafkaServer:
    """A real broker, which can be killed and started again."""

    def __init__(self, service: Service, servers: str) -> None:
        self.servers = servers
        self._service = service
        self._process: Process | None = None

    def start(self) -> None:
        self._process = start(self._service)
        until = time.monotonic() + 60
        while not self._service.ready():
            assert time.monotonic() < until, self._process.last_lines()
            time.sleep(0.05)

    @property
    def folder(self) -> Path:
        """That of all brokers: `kafka` in a state folder."""
        assert self._service.folder is not None
        return self._service.folder.parent

    def stop(self) -> None:
        """In order: what it has in memory is written."""
        if self._process:
            self._process.signal(signal.SIGTERM)
            until = time.monotonic() + 60
            while self._process.exit_code() is None:
                assert time.monotonic() < until, self._process.last_lines()
                time.sleep(0.05)
            self.kill()

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It answers nobody, and knows nothing of it."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def retire(self, channel: str) -> None:
        """What retention does, which looks at its clock every five minutes only."""
        ends = Kafka(self.servers).bounds(channel)
        admin = AdminClient({"bootstrap.servers": self.servers})
        asked = [TopicPartition(channel, partition, end) for partition, (_, end) in ends.items()]
        for result in admin.delete_records(asked).values():
            result.result(10)
