"""Quick ways into a channel, past the collector."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from confluent_kafka import Producer
from tests.soak.things import Placed, Who

from penstock.channels.kafka import Kafka
from penstock.core.record import Record

_QUICK = {"acks": "all", "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4"}


def post(kafka: Kafka, channel: str, records: Iterable[Placed]) -> int:
    """Append records, each to its partition, in order; how many, once all are safe."""
    producer = Producer({**_QUICK, "bootstrap.servers": kafka.servers, "queue.buffering.max.messages": 1_000_000})
    before, number = _size(kafka, channel), 0
    for partition, record in records:
        _produce(producer, channel, partition, record)
        number += 1
    assert producer.flush(120) == 0
    assert _size(kafka, channel) - before == number
    return number


def claim(kafka: Kafka, heartbeats: str, channel: str, last: Iterable[Who]) -> None:
    """Senders say what their last numbers are."""
    told = [
        {"kind": "heartbeat", "channel": channel, "sender": sender, "epoch": 1, "seq": seq, "time": 0}
        for sender, seq in last
    ]
    post(kafka, heartbeats, [(0, Record(json.dumps(one).encode())) for one in told])


@contextmanager
def transactions(kafka: Kafka, name: str) -> Iterator["Transactions"]:
    producer = Producer({**_QUICK, "bootstrap.servers": kafka.servers, "transactional.id": name})
    producer.init_transactions(30)
    yield Transactions(producer)


class Transactions:
    """Appends records in transactions, of which some are taken back."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def commit(self, channel: str, records: Iterable[Placed]) -> None:
        self._append(channel, records)
        self._producer.commit_transaction(30)

    def abort(self, channel: str, records: Iterable[Placed]) -> None:
        self._append(channel, records)
        self._producer.abort_transaction(30)

    def _append(self, channel: str, records: Iterable[Placed]) -> None:
        self._producer.begin_transaction()
        for partition, record in records:
            _produce(self._producer, channel, partition, record)
        # What is aborted before it was sent would leave no trace in the channel.
        self._producer.flush(30)


def _produce(producer: Producer, channel: str, partition: int, record: Record) -> None:
    while True:
        try:
            producer.produce(channel, record.value, record.key, partition, headers=list(record.headers()))
            return
        except BufferError:
            producer.poll(0.1)


def _size(kafka: Kafka, channel: str) -> int:
    return sum(end for _, end in kafka.bounds(channel).values())
