"""Late records that are not dropped but kept: each lies in the dead letters of its channel, once for each query."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from pyspark.sql import DataFrame

from penstock.analysis.letters import AT_ONCE, SKEW, fingerprint, send
from penstock.analysis.query import Query
from penstock.audit.findings import BELATED
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Positions
from penstock.core.held import held
from penstock.core.record import Record


def of_sessions(result: DataFrame) -> bool:
    """Whether a result has session windows. They grow together, so a record's own is not among them."""
    return "session_window#" in str(result._jdf.queryExecution().analyzed().toString())


def gap_of(result: DataFrame) -> str | None:
    """The gap that ends the sessions of a result, as it was written; None when it differs from record to record."""
    plan = str(result._jdf.queryExecution().analyzed().toString())
    found = re.findall(r"event_time#\d+L? \+ cast\(([\w .]+) as interval\)", plan)
    return str(found[0]) if len(found) == 1 else None


def by_time(result: DataFrame) -> bool:
    """Whether the windows of a result have an end in time. Those by count have none, and close nothing out."""
    return "end" in getattr(result.schema["window"].dataType, "names", ())


def untold(query: Query, result: DataFrame, uncounted: str | None) -> str | None:
    """Why nobody can tell which records of a query without a gate came too late; None when its windows tell it.

    `uncounted` is why its records cannot be counted.
    """
    if len(query.inputs) != 1:
        return "it reads several channels"
    if of_sessions(result):
        return "its sessions grow together"
    if lacking := [name for name in ("window", "seen") if name not in result.columns]:
        return f"its rows have no {' and no '.join(lacking)}"
    if not by_time(result):
        return "its windows are not of time"
    # That a record counts in several rows is no matter here: it is late when all of them are closed.
    overlap = uncounted is not None and uncounted.startswith("its windows overlap")
    return None if overlap else uncounted


class Belated:
    """The late records of a query on their way to the dead letters.

    They are brought there before the account that counts them is told. A life that ended in between left letters that
    no account knows: those are found again, and not written twice.
    """

    def __init__(
        self, query: str, channels: Channels, accounted: Micros, headers: Mapping[str, str] | None = None
    ) -> None:
        """`accounted` is when the last account of this life of the query was made; 0 when there is none.

        `headers` say why the records are here, when they are not late.
        """
        self._query, self._channels, self._accounted = query, channels, accounted
        self._why = headers or {"reason": f"{BELATED}its window was closed in query {query}"}
        self._lying: dict[str, int] | None = None

    def bury(self, channel: str, records: Iterable[Any]) -> None:
        """Return once each of these raw records has its letter; raises Unavailable when that cannot be."""
        lying = self._letters(f"{channel}.dead")
        letters = ((_place(one), self._letter(one)) for one in records)
        fresh = (
            (place, letter) for place, letter in letters if lying.get(place) != fingerprint(letter.key, letter.value)
        )
        asyncio.run(self._send(f"{channel}.dead", fresh, lying))

    def accounted(self, until: Positions) -> None:
        """What lies before these offsets is counted now, and will not be asked for again."""
        lying = self._lying or {}
        for place in list(lying):
            _, partition, offset = place.rsplit(":", 2)
            if int(offset) < until.get(int(partition), 0):
                del lying[place]

    def _letters(self, dead: str) -> dict[str, int]:
        """Which records have a letter, and may be in no account yet: what was in each, by its place."""
        if self._lying is None:
            start = self._channels.since(dead, max(0, self._accounted - SKEW))
            self._lying = {}
            for entry in held(self._channels, dead, start):
                told = dict(entry.headers)
                if told.get("query") == self._query.encode() and "place" in told:
                    self._lying[told["place"].decode()] = fingerprint(entry.key, entry.value)
        return self._lying

    async def _send(self, dead: str, letters: Iterator[tuple[str, Record]], lying: dict[str, int]) -> None:
        async with self._channels.sender() as sender:
            while some := list(islice(letters, AT_ONCE)):
                await send(sender, dead, some)
                lying.update({place: fingerprint(letter.key, letter.value) for place, letter in some})

    def _letter(self, raw: Any) -> Record:
        """The record as it came, and with it the reason, its place, and the query that it is about."""
        headers = [(one["key"], bytes(one["value"] or b"")) for one in raw["headers"] or ()]
        told = {**self._why, "place": _place(raw), "query": self._query}
        key, value = (None if raw[part] is None else bytes(raw[part]) for part in ("key", "value"))
        extra = (*headers, *((name, text.encode()) for name, text in told.items()))
        return Record(value, key=key, extra=extra)


def _place(raw: Any) -> str:
    return f"{raw['topic']}:{raw['partition']}:{raw['offset']}"
