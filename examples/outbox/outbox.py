"""A source that reads the rows of a table in SQLite."""

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
    description = "rows keep their numbers, and it resumes after the last one in the channel"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        yield self._rows(int(resume.cursor or 0))

    async def _rows(self, after: int) -> AsyncIterator[Intake]:
        while True:
            try:
                rows = await asyncio.to_thread(self._read, after)
            except sqlite3.Error as error:
                raise Unavailable(self.path, str(error)) from error  # The collector retries.
            if rows:
                after = rows[-1][0]
                yield Intake([Arrival(body.encode(), cursor=str(row)) for row, body in rows], _settled)
            else:
                await asyncio.sleep(0.2)

    def _read(self, after: int) -> list[tuple[int, str]]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as table:
            query = "SELECT rowid, body FROM outbox WHERE rowid > ? ORDER BY rowid LIMIT 500"
            return table.execute(query, (after,)).fetchall()


async def _settled(error: Exception | None) -> None:
    """There is nothing to acknowledge: rows that were not safe are read again."""
