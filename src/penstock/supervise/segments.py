"""Checks and repairs the log segments of Kafka while no broker runs.

A batch has a base offset, a length, and a CRC-32C of the rest: `org.apache.kafka.common.record`, magic 2.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

_HEADER = Struct(">qiibIhi")
_BEFORE_LENGTH = 12
_BEFORE_CRC = 21
_LEAST, _MOST = 49, 128 << 20
_MAGIC = 2
_METADATA = "__cluster_metadata-"


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes of a segment: a valid batch, or damaged bytes up to the next valid batch."""

    start: int
    stop: int
    first: int
    """Its first offset; of damaged bytes, the first missing offset."""
    last: int
    """Its last offset; of damaged bytes, the last missing offset, or -1 if unknown."""
    valid: bool


@dataclass(frozen=True)
class DamagedSegment:
    file: Path
    damaged: tuple[Batch, ...]
    copies: int
    """The number of brokers with this partition."""

    @property
    def channel(self) -> str:
        return self.file.parent.name.rpartition("-")[0]

    @property
    def partition(self) -> int:
        return int(self.file.parent.name.rpartition("-")[2])

    @property
    def repairable(self) -> bool:
        """The metadata log of the cluster cannot be repaired."""
        return not self.file.parent.name.startswith(_METADATA)

    @property
    def offsets(self) -> str:
        """The unreadable offsets, as text."""
        return ", ".join(
            f"{one.first} and later" if one.last < 0 else f"{one.first} to {one.last}" for one in self.damaged
        )

    def repair(self, aside: Path) -> Path:
        """Remove the damaged batches; return the path of the original in the folder `aside`. No broker may run.

        If other brokers have the partition, the whole copy is removed: Kafka fetches it from them.
        """
        broker, folder = self.file.parent.parent.parent.name, self.file.parent
        aside.mkdir(parents=True, exist_ok=True)
        if self.copies > 1:
            kept = _free(aside / f"kafka-{broker}-{folder.name}")
            shutil.move(folder, kept)
            return kept
        kept = _free(aside / f"kafka-{broker}-{folder.name}-{self.file.name}")
        shutil.copy2(self.file, kept)
        data = self.file.read_bytes()
        new = self.file.with_name(f"{self.file.name}.repaired")
        # Readers accept missing offsets, which compaction leaves, too.
        new.write_bytes(b"".join(data[one.start : one.stop] for one in batches(data) if one.valid))
        new.replace(self.file)
        for index in ("index", "timeindex"):
            self.file.with_suffix(f".{index}").unlink(missing_ok=True)
        return kept


def damaged_segments(kafka: Path) -> Iterator[DamagedSegment]:
    """The damaged segments in the folder of the brokers, `.penstock/kafka`."""
    for file in sorted(kafka.glob("*/data/*-*/*.log")):
        if found := tuple(one for one in batches(file.read_bytes()) if not one.valid):
            yield DamagedSegment(file, found, len(list(kafka.glob(f"*/data/{file.parent.name}"))))


def batches(data: bytes) -> Iterator[Batch]:
    """The batches of a segment, from its beginning to its end."""
    at, offset = 0, None
    while at < len(data):
        if (batch := _at(data, at, offset)) is not None:
            yield batch
            at, offset = batch.stop, batch.last + 1
            continue
        following = _next(data, at + 1, offset)
        stop = following.start if following else len(data)
        first = offset if offset is not None else _HEADER.unpack_from(data, at)[0] if len(data) - at >= 61 else 0
        yield Batch(at, stop, first, following.first - 1 if following else -1, valid=False)
        at = stop
        if following is not None:
            offset = following.first


def _next(data: bytes, at: int, offset: int | None) -> Batch | None:
    """The next valid batch. After damage the lengths are not reliable, so this searches for a header."""
    while (magic := data.find(b"\x02", at + 16)) >= 0:
        at = magic - 16
        if (batch := _at(data, at, offset)) is not None:
            return batch
        at += 1
    return None


def _at(data: bytes, at: int, offset: int | None) -> Batch | None:
    """The valid batch at this byte, with offsets from `offset` on."""
    if len(data) - at < _BEFORE_LENGTH + _LEAST:
        return None
    base, length, _, magic, crc, _, delta = _HEADER.unpack_from(data, at)
    stop = at + _BEFORE_LENGTH + length
    if magic != _MAGIC or not _LEAST <= length <= _MOST or stop > len(data) or delta < 0:
        return None
    if base < (offset or 0) or crc32c(data[at + _BEFORE_CRC : stop]) != crc:
        return None
    return Batch(at, stop, base, base + delta, valid=True)


def _free(path: Path) -> Path:
    """A path that does not exist yet."""
    number, free = 1, path
    while free.exists():
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free
