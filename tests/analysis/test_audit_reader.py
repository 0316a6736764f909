"""The reduction by Spark finds what the one in Python finds: a real broker, a real Spark, the same entries."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from penstock.analysis.audit_reader import SparkAuditReader
from penstock.audit.findings import Findings, Kind, reduced
from penstock.audit.writers import Writer, WriterTokens
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Entry, Offsets, Topic
from penstock.core.errors import Unaccounted, Unavailable
from penstock.core.metrics import Sketch
from penstock.core.record import Origin
from penstock.core.runs import Runs

Fresh = Callable[[str], str]
Told = list[tuple[str, bytes | None]]
Given = tuple[str, int, bytes | None, bytes | None, int, Told]
"""Channel, partition, key, value, timestamp in ms, headers."""

NOW = 1_700_000_000_000


def origin(sender: str, seq: int, epoch: int = 1, time: int = NOW * 1_000 - 12_345) -> Told:
    return list(Origin(sender, epoch, seq, time).headers())


def append(kafka: Kafka, records: Iterable[Given]) -> None:
    producer = Producer({"bootstrap.servers": kafka.servers, "acks": "all", "enable.idempotence": True})
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        failures.extend([error] if error else [])

    for channel, partition, key, value, at, headers in records:
        producer.produce(channel, value, key, partition, delivered, timestamp=at, headers=[*headers])
    assert producer.flush(30) == 0
    assert not failures


def ends(kafka: Kafka, channels: Iterable[str]) -> dict[str, dict[int, int]]:
    return {name: {partition: end for partition, (_, end) in kafka.bounds(name).items()} for name in channels}


def entries(kafka: Kafka, start: dict[str, Offsets], end: dict[str, dict[int, int]]) -> list[Entry]:
    found: list[Entry] = []
    with kafka.reader(start) as reader:
        while any(reader.positions(name)[at] < offset for name, some in end.items() for at, offset in some.items()):
            found += reader.read(1_000, 1)
    return [entry for entry in found if entry.offset < end[entry.channel][entry.partition]]


def assert_equal(found: Findings, due: Findings) -> None:
    for sketches, expected in ((found.latencies, due.latencies), (found.steps, due.steps)):
        assert sketches.keys() == expected.keys()
        for channel, sketch in sketches.items():
            assert comparable(sketch) == comparable(expected[channel])
    # Of forged rows, Spark names the last one of each key.
    assert bool(found.forged_rows) == bool(due.forged_rows)
    assert {row.key for row in found.forged_rows} >= {row.key for row in due.forged_rows}
    one, other = (replace(some, latencies={}, steps={}, forged_rows=[]) for some in (found, due))
    assert one == other


def comparable(sketch: Sketch) -> dict[str, object]:
    """Sums of floats depend on their order in the last bits."""
    told = sketch.to_json()
    return {**told, **{name: pytest.approx(told[name]) for name in ("sum", "min", "max")}}


BROKEN: Sequence[Told] = (
    [],
    [("sender", b"a")],
    [("time", b"17")],
    [("time", None), ("time", b"17")],
    [*origin("a", 1), ("seq", b"2")],
    [*origin("a", 1), ("sender", b"a")],
    [("seq", None), *origin("a", 1)],
    [("sender", b"\xff\xfe"), *origin("a", 1)[1:]],
    [("sender", b"\xc0\xaf"), *origin("a", 1)[1:]],
    [("sender", b"\xed\xa0\x80"), *origin("a", 1)[1:]],
    [*origin("a", 1)[:2], ("seq", None), ("time", b"1")],
    [*origin("a", 1)[:3], ("time", b"soon")],
    [*origin("a", 1)[:2], ("seq", b"9223372036854775808"), ("time", b"1")],
    [*origin("a", 1)[:2], ("seq", b"9" * 5_000), ("time", b"1")],
    [*origin("a", 1)[:2], ("seq", b"1.0"), ("time", b"1")],
    [*origin("a", 1)[:2], ("seq", b"1e3"), ("time", b"1")],
    [*origin("a", 1)[:2], ("seq", b"0x1"), ("time", b"1")],
    [*origin("a", 1)[:2], ("seq", b"7\x00"), ("time", b"1")],
    [*origin("a", 1)[:2], ("seq", b"7L"), ("time", b"1")],
    [("reason", b"late: its window was closed")],
)

WHOLE: Sequence[Told] = (
    [("sender", None), *origin("", 5)[1:]],
    origin("line\nfeed \x1b[31m\x00", 5),
    origin("𝄞 ünï", 5),
    origin("x" * 20_000, 5),
    [*reversed(origin("backwards", 5)), ("other", b"1"), ("other", b"2"), ("redrive", b"")],
    origin("far", 2**63 - 1),
    origin("far", -(2**63)),
    origin("far", -1, epoch=-(2**63)),
    *(origin("odd", 3, time=time) for time in (0, -1, 1, 253_402_300_799_000_000, NOW, -(2**61), 2**62)),
    *(origin("even", 4, time=NOW * 1_000 + skew) for skew in (-1, 0, 1, 999, 1_000, 1_001, -999, -1_000)),
    [*origin("back", 9), ("redriven", b"1")],
    [*origin("back", 9), ("redriven", None), ("redriven", b"2")],
    [*origin("late", 9), ("reason", b"late: its window was closed"), ("query", b"q")],
    [*origin("late", 8), ("reason", None), ("reason", b"late: "), ("redriven", b"1")],
    [*origin("unfit", 9), ("reason", b"it is too late: no")],
    [*origin("unfit", 8), ("reason", b"late: of its own"), ("reason", b"it is not JSON")],
    [*origin("unfit", 7), ("reason", b"late: of its own"), ("reason", None)],
)


def generated(dice: random.Random, source: str, dead: str, result: str) -> list[Given]:
    """Numbers with gaps, doubles and disorder over partitions, results with versions, and whatever is odd."""
    given: list[Given] = []
    numbers = {sender: dice.randrange(-70, 200) for sender in "abcdef"}
    for _ in range(dice.randrange(300, 700)):
        sender = dice.choice("abcdef")
        numbers[sender] += dice.choice([1] * 20 + [0, 2, 7, 100])
        seq = numbers[sender] - dice.choice([0] * 20 + [1, 3, 70])
        at = NOW + dice.randrange(-200_000, 200_000)
        told = origin(
            sender, seq, dice.choice([1, 1, 1, 2]), (at - dice.randrange(-2, 5_000)) * 1_000 + dice.randrange(999)
        )
        if dice.random() < 0.05:
            told.insert(dice.randrange(5), ("redriven", b"1"))
        value = b"{}" if dice.random() < 0.95 else None
        given.append((dice.choice([source, source, source, dead]), 0, None, value, at, told))
    for _ in range(dice.randrange(100, 300)):
        at = NOW + dice.randrange(5_000)
        told = [("query", b"q"), ("version", b"%d" % dice.randrange(-5, 50))]
        told += [("time", b"%d" % ((at - dice.randrange(-3, 3_000)) * 1_000 - dice.randrange(999)))]
        told += [("appended", b"%d" % ((at - dice.randrange(-3, 900)) * 1_000))] if dice.random() < 0.8 else []
        told += [("writer", token)] if (token := dice.choice([b"a1b2", b"c3d4", b"\xff'", None])) else []
        dice.shuffle(told)
        key = b'["%d"]' % dice.randrange(30) if dice.random() < 0.95 else dice.choice([None, b"", b"\xff"])
        given.append((result, 0, key, b"{}" if dice.random() < 0.9 else None, at, told))
    versions = [("version", b"soon"), ("version", None), ("version", b"9" * 30), ("appended", b"?"), ("query", b"q")]
    given += [(result, 0, b"k", b"{}", NOW, [told]) for told in versions]
    given += [(result, 0, b"k", b"{}", NOW, [*origin("a", seq), ("version", b"3")]) for seq in (4, 2)]
    for channel in (source, dead, result):
        given += [(channel, 0, b"k", b"x", dice.choice([0, 1, NOW]), told) for told in (*BROKEN, *WHOLE)]
    dice.shuffle(given)
    partitions = {source: 3, dead: 1, result: 2}
    return [(one[0], dice.randrange(partitions[one[0]]), *one[2:]) for one in given]


@pytest.mark.parametrize(("seed", "small"), [(1, 20_000), (2, 20_000), (3, 0), (4, 0)])
def test_spark_finds_what_python_finds(seed: int, small: int, spark: SparkSession, kafka: Kafka, fresh: Fresh) -> None:
    source, dead, result = fresh("rsvps"), fresh("rsvps.dead"), fresh("by_country")
    kafka.ensure([Topic(source, 3), Topic(dead), Topic(result, 2)])
    kinds = {source: Kind.SOURCE, dead: Kind.DEAD, result: Kind.RESULT}
    tally = SparkAuditReader(spark, kafka.servers, small=small)
    dice = random.Random(seed)
    writers = WriterTokens(
        [Writer(result, "a1b2", "q", 0, "", {0: 20, 1: 10}), Writer(result, "c3d4", "q", 1, "", {0: 60})]
    )
    start: dict[str, Offsets] = {source: {}, dead: {}, result: {}}
    for _ in range(2):
        append(kafka, generated(dice, source, dead, result))
        end = ends(kafka, kinds)
        due = reduced(entries(kafka, start, end), start, end, kinds, writers=writers)
        assert due.disorder
        assert due.redriven
        assert due.rows
        assert due.forged
        assert_equal(tally.reduce(start, end, kinds, writers), due)
        start = dict(end)


def test_a_number_in_another_spelling_is_none(spark: SparkSession, kafka: Kafka, fresh: Fresh) -> None:
    """Python's own reading and Spark's would differ on these."""
    spellings = ["1_000", " 7", "7 ", "+7", "007", "-0", "7\n", "\t7", "٧", "７", ""]
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel)])
    told = [[*origin(text, 1)[:2], ("seq", text.encode()), ("time", b"1")] for text in spellings]
    append(kafka, [(channel, 0, None, b"", NOW, headers) for headers in (*told, origin("as we write it", 7))])
    found = SparkAuditReader(spark, kafka.servers).reduce({}, ends(kafka, [channel]), {})
    assert found.numbered == {(channel, "as we write it", 1): 1}
    assert found.without_identity == {channel: len(spellings)}


def test_what_was_never_committed_is_no_entry(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Callable[..., None]
) -> None:
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel)])
    producer = Producer({"bootstrap.servers": kafka.servers, "transactional.id": channel})
    producer.init_transactions(30)
    for seq, end in enumerate([producer.commit_transaction, producer.abort_transaction] * 2):
        producer.begin_transaction()
        producer.produce(channel, b"", headers=[*origin("s", seq)])
        assert producer.flush(30) == 0
        end(30)
    # Who ends a transaction is not told when its mark lies in the log.
    eventually(lambda: ends(kafka, [channel]) == {channel: {0: 8}})
    found = SparkAuditReader(spark, kafka.servers).reduce({}, ends(kafka, [channel]), {})
    assert found.records == {channel: 2}
    assert found.runs == {(channel, "s", 1): Runs([(0, 0), (2, 2)])}


def test_nothing_to_read_is_nothing_found(spark: SparkSession) -> None:
    start = {"rsvps": {0: 7}}
    assert SparkAuditReader(spark, "127.0.0.1:1").reduce(start, start, {}) == Findings(start, start)


def test_a_run_is_one_run_across_blocks_and_partitions(spark: SparkSession, kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel, 2)])
    append(kafka, [(channel, n % 2, None, b"", NOW, origin("s", n)) for n in range(-100, 1_000) if n != 500])
    found = SparkAuditReader(spark, kafka.servers).reduce({}, ends(kafka, [channel]), {})
    assert found.runs == {(channel, "s", 1): Runs([(-100, 499), (501, 999)])}
    assert not found.disorder


def test_entries_that_are_no_longer_there_are_missed(spark: SparkSession, kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel, 2)])
    append(kafka, [(channel, 1, None, b"", NOW, origin("s", n)) for n in range(9)])
    admin, gone = AdminClient({"bootstrap.servers": kafka.servers}), TopicPartition(channel, 1, 5)
    admin.delete_records([gone])[gone].result(30)
    with pytest.raises(Unaccounted, match=f"{channel}: partition 1 is to be read from 3, and does not hold that"):
        SparkAuditReader(spark, kafka.servers).reduce({channel: {1: 3}}, {channel: {1: 9}}, {})


def test_a_channel_that_is_not_there_is_unavailable(spark: SparkSession, kafka: Kafka, fresh: Fresh) -> None:
    with pytest.raises(Unavailable):
        SparkAuditReader(spark, kafka.servers).reduce({}, {fresh("nowhere"): {0: 9}}, {})
