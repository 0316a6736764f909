"""The source of one's own is as good as Penstock's: pytest -o asyncio_mode=auto examples/outbox"""

import sqlite3
from contextlib import closing

import pytest
from outbox import Outbox

from penstock.testing.killing import KilledContract
from penstock.testing.sources import SourceContract, plain, text


class Application:
    """The outside, as a test needs it: somebody who has something to give."""

    def __init__(self, path):
        self.path, self.source = path, Outbox(str(path))
        with closing(sqlite3.connect(path)) as table:
            table.execute("CREATE TABLE outbox (body TEXT)")

    def payloads(self, count):
        return plain(count)

    async def give(self, payloads):
        with closing(sqlite3.connect(self.path)) as table, table:
            table.executemany("INSERT INTO outbox VALUES (?)", [(payload.decode(),) for payload in payloads])

    async def cut(self):
        """It would break the connection, if there were one."""

    def acknowledged(self):
        """How many it was told are safe; None where nobody is told."""


@pytest.fixture
def world(tmp_path):
    return Application(tmp_path / "outbox.db")


class TestContract(SourceContract):
    def carries(self, payload):
        return text(payload)


class TestKilled(KilledContract): ...
