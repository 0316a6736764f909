"""Rows of a table in SQLite: a source of one's own, in thirty lines."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Unavailable


@dataclass(frozen=True)
class Outbox:
    path: str
    name: str = "outbox"
    guarantee = Guarantee.EXACTLY_ONCE
    description = "rows keep their numbers, and it goes on after the last one that the channel holds"

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        yield self._rows(int(taken.cursor or 0))

    async def _rows(self, after: int) -> AsyncIterator[Intake]:
        while True:
            try:
                rows = await asyncio.to_thread(self._read, after)
            except sqlite3.Error as error:
                raise Unavailable(self.path, str(error)) from error  # It is tried again.
            if rows:
                after = rows[-1][0]
                yield Intake([Arrival(body.encode(), cursor=str(row)) for row, body in rows], _settled)
            else:
                await asyncio.sleep(0.2)

    def _read(self, after: int) -> list[tuple[int, str]]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as table:
            asked = "SELECT rowid, body FROM outbox WHERE rowid > ? ORDER BY rowid LIMIT 500"
            return table.execute(asked, (after,)).fetchall()


async def _settled(error: Exception | None) -> None:
    """Nobody waits to be told: what was not safe is read again."""
