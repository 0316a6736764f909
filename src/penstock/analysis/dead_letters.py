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


class DeadLetters:
    """Writes dead letters. A repeated batch finds the existing ones, and adds only the others."""

    def __init__(self, channels: Channels, dead: str, since: Callable[[], Micros]) -> None:
        """`since` returns when the last batch ended: dead letters before it belong to other records."""
        self._channels, self._dead, self._since = channels, dead, since
        self._there: dict[str, int] | None = None

    def write(self, refused: Iterable[Mapping[str, Any]]) -> None:
        """Return once each of these rows (key, value, and headers with the place) is a dead letter.

        Raises Unavailable when they cannot be written.
        """
        there = self._read() if self._there is None else self._there
        dead_letters = ((_location(row), _record(row)) for row in refused)
        fresh = (
            (location, one) for location, one in dead_letters if there.get(location) != fingerprint(one.key, one.value)
        )
        asyncio.run(self._send(fresh))
        # Only the first batch can be a repeated one.
        self._there = {}

    def _read(self) -> dict[str, int]:
        start = self._channels.since(self._dead, max(0, self._since() - SKEW))
        found: dict[str, int] = {}
        for entry in scan(self._channels, self._dead, start):
            headers = dict(entry.headers)
            if "place" in headers and "query" not in headers:
                found[headers["place"].decode()] = fingerprint(entry.key, entry.value)
        return found

    async def _send(self, dead_letters: Iterator[tuple[str, Record]]) -> None:
        async with self._channels.sender() as sender:
            while some := list(islice(dead_letters, AT_ONCE)):
                await send(sender, self._dead, some)


async def send(sender: Sender, dead: str, some: Sequence[tuple[str, Record]]) -> None:
    """Write dead letters, each with the place of its record."""
    try:
        await sender.send(dead, [letter for _, letter in some])
    except Refused as refused:
        if len(some) > 1:
            for one in some:
                await send(sender, dead, [one])
            return
        # The record is still in its channel, and is counted and named.
        log.warning("the record %s gets no dead letter: %s", some[0][0], refused.reason)


def fingerprint(key: bytes | None, value: bytes | None) -> int:
    """A hash of a record: in a recreated channel, the same offset holds another record."""
    return hash((key, value))


def _record(row: Mapping[str, Any]) -> Record:
    key, value = (None if row[part] is None else bytes(row[part]) for part in ("key", "value"))
    return Record(value, key=key, extra=tuple((one["key"], bytes(one["value"] or b"")) for one in row["headers"]))


def _location(row: Mapping[str, Any]) -> str:
    return next(bytes(one["value"]).decode() for one in reversed(row["headers"]) if one["key"] == "place")


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
        self._lying: dict[str, int] | None = None

    def write(self, channel: str, records: Iterable[Any]) -> None:
        """Return once each of these raw records has a dead letter; raises Unavailable when they cannot be written."""
        lying = self._existing(f"{channel}.dead")
        records_of = ((_location_of_raw(one), self._record(one)) for one in records)
        fresh = (
            (location, letter)
            for location, letter in records_of
            if lying.get(location) != fingerprint(letter.key, letter.value)
        )
        asyncio.run(self._send(f"{channel}.dead", fresh, lying))

    def accounted(self, until: Offsets) -> None:
        """Forget the dead letters of records before these offsets, which are accounted for."""
        lying = self._lying or {}
        for location in list(lying):
            _, partition, offset = location.rsplit(":", 2)
            if int(offset) < until.get(int(partition), 0):
                del lying[location]

    def _existing(self, dead: str) -> dict[str, int]:
        """Hashes of the dead letters whose records may be in no account yet, by place."""
        if self._lying is None:
            start = self._channels.since(dead, max(0, self._accounted - SKEW))
            self._lying = {}
            for entry in scan(self._channels, dead, start):
                headers = dict(entry.headers)
                if headers.get("query") == self._query.encode() and "place" in headers:
                    self._lying[headers["place"].decode()] = fingerprint(entry.key, entry.value)
        return self._lying

    async def _send(self, dead: str, dead_letters: Iterator[tuple[str, Record]], lying: dict[str, int]) -> None:
        async with self._channels.sender() as sender:
            while some := list(islice(dead_letters, AT_ONCE)):
                await send(sender, dead, some)
                lying.update({location: fingerprint(letter.key, letter.value) for location, letter in some})

    def _record(self, raw: Any) -> Record:
        """The original record with the reason, its place, and the query as headers."""
        headers = [(one["key"], bytes(one["value"] or b"")) for one in raw["headers"] or ()]
        added = {**self._why, "place": _location_of_raw(raw), "query": self._query}
        key, value = (None if raw[part] is None else bytes(raw[part]) for part in ("key", "value"))
        extra = (*headers, *((name, text.encode()) for name, text in added.items()))
        return Record(value, key=key, extra=extra)


def _location_of_raw(raw: Any) -> str:
    return f"{raw['topic']}:{raw['partition']}:{raw['offset']}"
