"""Records of a few senders, in order, and what can happen to one of them on its way into a channel."""

import json
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum

from penstock.core.record import Origin, Record

SENDERS = 4
PARTITIONS = 2
SPAN = 1_000_000
"""Milliseconds of event time from the first record to the last, however many there are."""
WINDOW = 100_000
DELAY = 500_000
SCHEMA = "name STRING NOT NULL, n BIGINT NOT NULL, at BIGINT NOT NULL"

BEGIN = 1_700_000_000_000
_NAMES = 7

Who = tuple[str, int]
"""A record's sender and number."""
Placed = tuple[int, Record]
"""A record, and the partition that it belongs to."""


class Change(StrEnum):
    DROPPED = "dropped"
    DOUBLED = "doubled"
    SWAPPED = "swapped"
    """It comes after the next one of its sender."""
    CORRUPTED = "corrupted"
    DELAYED = "delayed"
    """Its event time is that of records that came long before."""


def who(index: int) -> Who:
    """The sender and the number of the record at this place of the whole."""
    return f"s{index % SENDERS}", index // SENDERS + 1


def at(share: float, sender: int, total: int) -> Who:
    """A record of this sender at that share of the whole."""
    return who(int(total * share) // SENDERS * SENDERS + sender)


def folded(window: int, total: int) -> int:
    """How many records of the name n0 belong to a window."""
    return sum(index * SPAN // total // WINDOW == window for index in range(0, total, _NAMES))


def things(part: range, total: int, changes: Mapping[Who, Change]) -> Iterator[Placed]:
    """A part of all records, in the order in which they arrive."""
    held: dict[str, Record] = {}
    now = time.time_ns() // 1_000
    for index in part:
        sender, seq = who(index)
        change = changes.get((sender, seq))
        if change is Change.DROPPED:
            continue
        record = _thing(index, total, Origin(sender, 1, seq, now), change)
        if change is Change.SWAPPED:
            held[sender] = record
            continue
        partition = index % PARTITIONS
        yield partition, record
        if change is Change.DOUBLED:
            yield partition, record
        if overtaken := held.pop(sender, None):
            yield partition, overtaken


def _thing(index: int, total: int, origin: Origin, change: Change | None) -> Record:
    timestamp = BEGIN + index * SPAN // total - (DELAY if change is Change.DELAYED else 0)
    value = json.dumps({"name": f"n{index % _NAMES}", "n": index % 5, "at": timestamp}).encode()
    return Record(value[:-1] if change is Change.CORRUPTED else value, origin)
