"""The balance of each account, exactly once by hand: the position lies in the database, beside the result.

    penstock produce --topic payments --key-separator :     lines such as alice:120
    export CHANNELS=kafka://localhost:9092                  the address that penstock up tells
    python consumer.py payments balances.db                 as many of them as you like

What a batch adds to the balances and how far it goes are one transaction. A member that is given a partition begins
where the database says, whatever its group has committed: nothing is applied twice, and nothing is left out.
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
    """The result and the positions. It is also what is told when partitions are dealt."""

    def __init__(self, path: str, channels: Channels) -> None:
        self._channels = channels
        # Transactions begin where we say so, and a member waits while another one writes.
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(TABLES)

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        """Where to begin: where the database stands; and at the very beginning where it knows of nothing yet."""
        return {
            partition: self._next(partition) or self._channels.bounds(partition[0])[partition[1]][0]
            for partition in partitions
        }

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """Nothing is left to do: what was applied is in the database already."""

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        """Nor here: whoever has them now skips what we applied, and we skip what they did."""

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
        # Asked within the transaction: a member that was silent for too long may be late, and another one ahead.
        done = self._next(partition) or 0
        for entry in entries:
            if entry.offset >= done:
                self._db.execute(ADD, ((entry.key or b"").decode(), int(entry.value or b"0")))
        stands = max(done, entries[-1].offset + 1)
        self._db.execute("INSERT OR REPLACE INTO positions VALUES (?, ?, ?)", (*partition, stands))

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
