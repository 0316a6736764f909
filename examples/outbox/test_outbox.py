"""The source passes the test suite of all sources: pytest -o asyncio_mode=auto examples/outbox"""

import sqlite3
from contextlib import closing

import pytest
from outbox import Outbox

from penstock.testing.killing import CrashContract
from penstock.testing.sources import SourceContract, plain, text


class Application:
    """A double of the application that fills the outbox."""

    def __init__(self, path):
        self.path, self.source = path, Outbox(str(path))
        with closing(sqlite3.connect(path)) as table:
            table.execute("CREATE TABLE outbox (body TEXT)")

    def payloads(self, count):
        return plain(count)

    async def add_records(self, payloads):
        with closing(sqlite3.connect(self.path)) as table, table:
            table.executemany("INSERT INTO outbox VALUES (?)", [(payload.decode(),) for payload in payloads])

    async def disconnect(self):
        """Break the connection; this source has none."""

    def acknowledged(self):
        """The number of acknowledged records; None because the application gets no acknowledgement."""


@pytest.fixture
def upstream(tmp_path):
    return Application(tmp_path / "outbox.db")


class TestContract(SourceContract):
    def supports(self, payload):
        return text(payload)


class TestCrash(CrashContract): ...
