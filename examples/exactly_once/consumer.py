"""The balance of each account, exactly once: the offsets are in the database, with the result.

    penstock produce --topic payments --key-separator :     lines such as alice:120
    export CHANNELS=kafka://localhost:9092                  the address that penstock up prints
    python consumer.py payments balances.db                 start several

A batch and its offsets are written in one transaction. A consumer starts a partition at the offset in the database, not
at the committed offset of its group. So no record is applied twice, and none is skipped.
"""

import argparse
import os
import sqlite3
from collections.abc import Mapping, Sequence

from penstock.channels.binders import bind
from penstock.core.contracts import ChannelPartition, Channels, Entry
from penstock.core.errors import PenstockError
from penstock.supervise.process import stop_on_signals

TABLES = """
    CREATE TABLE IF NOT EXISTS balances (account TEXT PRIMARY KEY, payments INTEGER NOT NULL, cents INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS positions (channel TEXT, partition INTEGER, next INTEGER NOT NULL,
                                          PRIMARY KEY (channel, partition));
"""
ADD = """
    INSERT INTO balances VALUES (?, 1, ?)
    ON CONFLICT (account) DO UPDATE SET payments = payments + 1, cents = cents + excluded.cents
"""


class Balances:
    """The balances and the offsets. It is also the listener for rebalances."""

    def __init__(self, path: str, channels: Channels) -> None:
        self._channels = channels
        # Explicit transactions; a consumer waits while another one writes.
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(TABLES)

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        """The offset in the database; without one, the beginning of the partition."""
        return {
            partition: self._next(partition) or self._channels.bounds(partition[0])[partition[1]][0]
            for partition in partitions
        }

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """Nothing to do: all applied records are in the database."""

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        """Nothing to do: the next consumer skips the records that are applied here."""

    def apply(self, entries: Sequence[Entry]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for partition in {(entry.channel, entry.partition) for entry in entries}:
                self._apply(partition, [entry for entry in entries if (entry.channel, entry.partition) == partition])
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _apply(self, partition: ChannelPartition, entries: Sequence[Entry]) -> None:
        # Read within the transaction: after a long pause, another consumer may have applied more.
        done = self._next(partition) or 0
        for entry in entries:
            if entry.offset >= done:
                self._db.execute(ADD, ((entry.key or b"").decode(), int(entry.value or b"0")))
        following = max(done, entries[-1].offset + 1)
        self._db.execute("INSERT OR REPLACE INTO positions VALUES (?, ?, ?)", (*partition, following))

    def _next(self, partition: ChannelPartition) -> int | None:
        row = self._db.execute("SELECT next FROM positions WHERE channel = ? AND partition = ?", partition).fetchone()
        return row and int(row[0])


def consume(channels: Channels, channel: str, group: str, database: str) -> None:
    balances = Balances(database, channels)
    with stop_on_signals() as stop, channels.join(group, [channel], balances) as member:
        while not stop.is_set():
            if entries := member.read(500, 0.2):
                balances.apply(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description="The balance of each account, exactly once.")
    parser.add_argument("channel")
    parser.add_argument("database")
    parser.add_argument("--group", default="balances")
    parser.add_argument(
        "--channels", default=os.environ.get("CHANNELS", ""), help="their address, such as kafka://host:port"
    )
    options = parser.parse_args()
    try:
        consume(bind(options.channels), options.channel, options.group, options.database)
    except PenstockError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
