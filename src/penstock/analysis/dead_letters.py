"""Writes records to the dead letters of their channel, each once.

These are records that do not fit their schema, and records that came too late for a query (once for each query).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from penstock.audit.findings import LATE_PREFIX
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Offsets, Sender
from penstock.core.errors import Refused
from penstock.core.record import Record
from penstock.core.scan import scan

log = logging.getLogger(__name__)

SKEW: Micros = 3_600_000_000
"""How much the clocks of writers may differ."""
AT_ONCE = 500

Letter = tuple[str, Record]
"""A dead letter, with the place of its record."""


class DeadLetters:
    """Writes dead letters. A repeated batch finds the existing ones, and adds only the others."""

    def __init__(self, channels: Channels, dead: str, since: Callable[[], Micros]) -> None:
        """`since` returns when the last batch ended: dead letters before it belong to other records."""
        self._channels, self._dead, self._since = channels, dead, since
        self._there: dict[str, int] | None = None

    def write(self, refused: Iterable[Any]) -> None:
        """Return once each of these rows (key, value, and headers with the place) is a dead letter.

        Raises Unavailable when they cannot be written.
        """
        there = _existing(self._channels, self._dead, self._since()) if self._there is None else self._there
        asyncio.run(_send(self._channels, self._dead, _missing(map(_letter, refused), there)))
        # Only the first batch can be a repeated one.
        self._there = {}


class LateRecords:
    """Writes the late records of a query to the dead letters.

    They are written before the account that counts them is published. After a crash in between, the existing dead
    letters are found, and not written twice.
    """

    def __init__(
        self, query: str, channels: Channels, accounted: Micros, headers: Mapping[str, str] | None = None
    ) -> None:
        """`accounted`: when the last account of this generation of the query was made; 0 when there is none.

        `headers` replace the reason, for records that are not late.
        """
        self._query, self._channels, self._accounted = query, channels, accounted
        self._why = headers or {"reason": f"{LATE_PREFIX}its window was closed in query {query}"}
        self._there: dict[str, int] | None = None
        """Hashes of the dead letters whose records may be in no account yet, by place."""

    def write(self, channel: str, records: Iterable[Any]) -> None:
        """Return once each of these raw records has a dead letter; raises Unavailable when they cannot be written."""
        dead = f"{channel}.dead"
        if self._there is None:
            self._there = _existing(self._channels, dead, self._accounted, self._query)
        dead_letters = (
            _letter(
                raw, {**self._why, "place": f"{raw['topic']}:{raw['partition']}:{raw['offset']}", "query": self._query}
            )
            for raw in records
        )
        asyncio.run(_send(self._channels, dead, _missing(dead_letters, self._there), self._there))

    def accounted(self, until: Offsets) -> None:
        """Forget the dead letters of records before these offsets, which are accounted for."""
        there = self._there or {}
        for location in list(there):
            _, partition, offset = location.rsplit(":", 2)
            if int(offset) < until.get(int(partition), 0):
                del there[location]


def _existing(channels: Channels, dead: str, since: Micros, query: str | None = None) -> dict[str, int]:
    """Hashes of the dead letters after a time, by place: those of a query, or those of no query."""
    found: dict[str, int] = {}
    for entry in scan(channels, dead, channels.since(dead, max(0, since - SKEW))):
        headers = dict(entry.headers)
        if "place" in headers and headers.get("query") == (None if query is None else query.encode()):
            found[headers["place"].decode()] = _hash(entry.key, entry.value)
    return found


def _missing(records: Iterable[Letter], there: Mapping[str, int]) -> Iterator[Letter]:
    return ((location, one) for location, one in records if there.get(location) != _hash(one.key, one.value))


def _hash(key: bytes | None, value: bytes | None) -> int:
    """A hash of a record: in a recreated channel, the same offset holds another record."""
    return hash((key, value))


async def _send(channels: Channels, dead: str, records: Iterator[Letter], sent: dict[str, int] | None = None) -> None:
    """Write dead letters; their hashes are added to `sent`."""
    async with channels.sender() as sender:
        while some := list(islice(records, AT_ONCE)):
            await _send_some(sender, dead, some)
            if sent is not None:
                sent.update({location: _hash(one.key, one.value) for location, one in some})


async def _send_some(sender: Sender, dead: str, some: Sequence[Letter]) -> None:
    try:
        await sender.send(dead, [one for _, one in some])
    except Refused as refused:
        if len(some) > 1:
            for one in some:
                await _send_some(sender, dead, [one])
            return
        # The record is still in its channel, and is counted and named.
        log.warning("the record %s gets no dead letter: %s", some[0][0], refused.reason)


def _letter(row: Any, added: Mapping[str, str] | None = None) -> Letter:
    """The dead letter of a row or a raw record, with further headers."""
    key, value = (None if row[part] is None else bytes(row[part]) for part in ("key", "value"))
    headers = [(one["key"], bytes(one["value"] or b"")) for one in row["headers"] or ()]
    headers += [(name, text.encode()) for name, text in (added or {}).items()]
    location = next(value for name, value in reversed(headers) if name == "place")
    return location.decode(), Record(value, key=key, extra=tuple(headers))
