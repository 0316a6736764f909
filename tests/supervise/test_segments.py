"""Kafka's own files, damaged on a real broker."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.channels.servers import KafkaServer
from tests.channels.traffic import numbered, send
from tests.damaging import change

from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable
from penstock.supervise.kafka import batches, crc32c, damaged_segments

Fresh = Callable[[str], str]


def test_the_checksum_is_the_one_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def log_of(server: KafkaServer, channel: str) -> Path:
    (file,) = server.folder.glob(f"*/data/{channel}-0/*.log")
    return file


def read(kafka: Kafka, channel: str) -> tuple[list[int], Unavailable | None]:
    """The offsets that can be read, and what stands in the way of more."""
    end, found = kafka.bounds(channel)[0][1], list[int]()
    with kafka.reader({channel: {}}) as reader:
        while reader.positions(channel)[0] < end:
            try:
                found += [entry.offset for entry in reader.read(100, 1)]
            except Unavailable as error:
                return found, error
    return found, None


@pytest.mark.parametrize("location", ["a value", "a length"])
def test_a_damaged_batch_is_named_and_taken_out(
    kafka_server: KafkaServer, fresh: Fresh, tmp_path: Path, location: str
) -> None:
    kafka, channel = Kafka(kafka_server.servers), fresh("damaged")
    kafka.ensure([Topic(channel)])
    for record in numbered(12):
        send(kafka, channel, [record])
    file = log_of(kafka_server, channel)
    (batch,) = [one for one in batches(file.read_bytes()) if one.first == 5]
    change(file, batch.stop - 1 if location == "a value" else batch.start + 10)
    if location == "a value":
        found, error = read(kafka, channel)
        assert found == [0, 1, 2, 3, 4]
        assert error is not None
        assert channel in error.service

    kafka_server.stop()
    ours = [one for one in damaged_segments(kafka_server.folder) if one.channel == channel]
    assert [(one.file, one.partition, one.offsets, one.repairable) for one in ours] == [(file, 0, "5 to 5", True)]
    damaged = file.read_bytes()
    assert ours[0].repair(tmp_path / "aside").read_bytes() == damaged
    assert not [one for one in damaged_segments(kafka_server.folder) if one.channel == channel]
    kafka_server.start()
    assert read(Kafka(kafka_server.servers), channel) == ([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], None)
    send(kafka, channel, numbered(1))
    assert kafka.bounds(channel)[0] == (0, 13)


def test_what_follows_a_torn_end_is_not_known() -> None:
    # No whole batch follows: nobody knows how many records there were.
    (found,) = batches(b"\0" * 100)
    assert (found.valid, found.last) == (False, -1)
