"""Deliveries that came, on disk: their ids for a time, and their bodies until they are safe elsewhere.

Each id has a number, in the order in which they came. It is synced before anything else happens with the delivery. So
whatever ends in between, the same id has the same number again, by which the collector knows what it holds.

Numbers of a file that was put back from a backup are in use already: then they go on in another epoch.
"""

import hashlib
import logging
import sqlite3
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured, Unavailable

log = logging.getLogger(__name__)

_FORGET_AT_A_TIME = 10_000
_MAKE = """
create table if not exists epochs (first integer primary key, epoch integer not null);
create table if not exists deliveries (
    seq integer primary key autoincrement,
    id text not null unique,
    digest blob not null,
    time integer not null,
    body blob
);
create index if not exists by_time on deliveries (time) where body is null;
create index if not exists not_safe on deliveries (seq) where body is not null;
"""


@dataclass(frozen=True, slots=True)
class Delivery:
    id: str
    body: bytes
    time: Micros

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.body).digest()


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of an id: its number, when it came first, whether with this very body, whether it is safe."""

    seq: int
    time: Micros
    same: bool
    safe: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A delivery that was not known to be safe."""

    seq: int
    time: Micros
    body: bytes
    damaged: bool


class Deliveries:
    """A file. Every method blocks, and they are called one at a time.

    `highest`: the epoch and the highest number that somebody else knows to be in use.
    """

    def __init__(self, folder: Path, name: str, now: Micros, highest: tuple[int, int] = (0, 0)) -> None:
        self.path = folder / f"{quote(name, safe='')}.sqlite"
        self._whose = f"source {name}, {self.path}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=1, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            fix = "let it be written, or choose another folder"
            raise Misconfigured(f"source {name}, folder {folder}", str(error), fix) from error
        try:
            self._epochs = self._begin(now, highest)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, now: Micros, highest: tuple[int, int]) -> list[tuple[int, int]]:
        """The first number of each epoch, and the epoch."""
        try:
            # Nobody else may number at the same time.
            self._file.execute("pragma locking_mode = exclusive")
            self._file.execute("pragma journal_mode = wal")
            self._file.execute("pragma synchronous = full")
            (verdict,) = self._file.execute("pragma quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._file.executescript(_MAKE)
            epochs = self._file.execute("select first, epoch from epochs order by first").fetchall()
            (last,) = self._file.execute("select coalesce(max(seq), 0) from sqlite_sequence").fetchone()
            # Behind the last epoch that can be written there is none: somebody made that up.
            in_use = highest if highest[0] < 2**63 - 1 else (0, 0)
            if not epochs or in_use > (epochs[-1][1], last):
                if epochs:
                    log.warning(
                        "%s is older than what was taken: what came since is taken again if repeated", self._whose
                    )
                epochs.append((last + 1, max(now, in_use[0] + 1)))
                self._file.execute("insert or replace into epochs values (?, ?)", epochs[-1])
            return epochs
        except sqlite3.OperationalError as error:
            raise Unavailable(self._whose, str(error)) from error
        except sqlite3.DatabaseError as error:
            fix = "move it away; what comes again of the ids that it holds is then taken again"
            raise Misconfigured(self._whose, f"the file is damaged: {error}", fix) from error

    def epoch(self, seq: int) -> int:
        """In which epoch a number was given."""
        return self._epochs[bisect(self._epochs, seq, key=lambda one: one[0]) - 1][1]

    def note(self, came: Sequence[Delivery], safe: Sequence[int], before: Micros | None) -> list[Row]:
        """Write down these deliveries, those that are safe, and forget what came before a moment; all, or nothing.

        Returns when it is synced. Unavailable when it cannot be written.
        """
        try:
            self._file.execute("begin immediate")
            try:
                self._file.executemany("update deliveries set body = null where seq = ?", ((seq,) for seq in safe))
                if before is not None:
                    oldest = "select seq from deliveries where body is null and time < ? order by time limit ?"
                    self._file.execute(f"delete from deliveries where seq in ({oldest})", (before, _FORGET_AT_A_TIME))
                rows = [self._row(one) for one in came]
                self._file.execute("commit")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise Unavailable(self._whose, str(error), 1.0) from error
        return rows

    def _row(self, one: Delivery) -> Row:
        known = self._file.execute(
            "select seq, time, digest = ?, body is null from deliveries where id = ?", (one.digest, one.id)
        ).fetchone()
        if known is not None:
            seq, time, same, safe = known
            return Row(seq, time, bool(same), bool(safe))
        made = self._file.execute(
            "insert into deliveries (id, digest, time, body) values (?, ?, ?, ?)",
            (one.id, one.digest, one.time, one.body),
        )
        return Row(int(made.lastrowid or 0), one.time, True, False)

    def left(self, after: int, most: int) -> list[Left]:
        """Some of those after a number that were not known to be safe, in their order."""
        try:
            not_safe = "from deliveries where body is not null and seq > ? order by seq limit ?"
            found = self._file.execute(f"select seq, time, body, digest {not_safe}", (after, most)).fetchall()
        except sqlite3.Error as error:
            raise Unavailable(self._whose, str(error)) from error
        return [Left(seq, time, body, hashlib.sha256(body).digest() != digest) for seq, time, body, digest in found]

    def count(self) -> int:
        """How many ids are remembered."""
        (count,) = self._file.execute("select count(*) from deliveries").fetchone()
        return int(count)

    def close(self) -> None:
        self._file.close()
