"""Finds damaged databases of channels while nothing runs, and writes them anew without what cannot be read."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.channels.sqlite.database import (
    Damage,
    StoredRow,
    connect,
    creating,
    damaged,
    id_of,
    intact_rows,
    is_complete,
    is_intact,
    load_topic,
    make_tables,
    stored_rows,
)
from penstock.core.contracts import Topic
from penstock.core.errors import Unaccounted


@dataclass(frozen=True)
class DamagedLog:
    """A database that does not hold what was acknowledged."""

    file: Path
    problem: str
    readable: bool
    """Whether its table of offsets can be read."""

    @property
    def channel(self) -> str:
        return self.file.parent.name

    def repair(self, aside: Path) -> tuple[Path, int]:
        """Write the database anew with what can be read; the original in the folder `aside`, and how many are left.

        Readers pass over the missing offsets then, as after compaction. Where the offsets that were given out are not
        known, the whole channel is moved away, because none may be given again: the next one has another id.
        """
        if not self.readable:
            aside.mkdir(parents=True, exist_ok=True)
            moved = aside / f"{self.file.parent.parent.name}-{self.channel}-{self.file.stem}"
            return self.file.parent.rename(moved), 0
        copy = self._copy(aside)
        left = 0
        with creating(self.file) as db, closing(_tolerant(self.file)) as old:
            partitions, topic = _describe(old, self.file)
            make_tables(db, topic)
            db.execute("UPDATE channel SET repaired = 1")
            db.executemany("UPDATE partitions SET first = ?, next = ?, appended = ? WHERE partition = ?", partitions)
            for first, next, _, partition in partitions:
                for row in _salvaged(old, id_of(partition, first), id_of(partition, next)):
                    db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", row)
                    left += 1
        return copy, left

    def _copy(self, aside: Path) -> Path:
        aside.mkdir(parents=True, exist_ok=True)
        copy = aside / f"{self.file.parent.parent.name}-{self.channel}-{self.file.name}"
        for ending in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copy2(self.file.with_name(f"{self.file.name}{ending}"), copy.with_name(f"{copy.name}{ending}"))
        return copy


def damaged_logs(root: Path) -> Iterator[DamagedLog]:
    """The damaged databases in a folder of channels."""
    for file in sorted(root.glob("[!.]*/*.db")):
        try:
            problem = _problem(file)
        except (Damage, sqlite3.Error, Unaccounted) as error:
            problem = error.reason if isinstance(error, Unaccounted) else str(error)
        if problem:
            yield DamagedLog(file, problem, _is_readable(file))


def _problem(file: Path) -> str:
    with closing(connect(f"{file.absolute().as_uri()}?mode=rw")) as db:
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            return str(found)
        for first, next, _, partition in _describe(db, file)[0]:
            for _ in intact_rows(db, partition, first, next, is_complete(db)):
                pass
    return ""


def _is_readable(file: Path) -> bool:
    try:
        with closing(_tolerant(file)) as db:
            _describe(db, file)
    except (sqlite3.Error, Unaccounted):
        return False
    return True


def _tolerant(file: Path) -> sqlite3.Connection:
    """A connection that also opens a database that was cut off."""
    db = connect(f"{file.absolute().as_uri()}?mode=rw")
    db.execute("PRAGMA writable_schema = ON")
    return db


def _describe(db: sqlite3.Connection, file: Path) -> tuple[list[tuple[int, int, int, int]], Topic]:
    """The partitions (first offset, next offset, newest time, number) and the topic of a channel."""
    topic = load_topic(db, file)
    partitions = db.execute("SELECT first, next, appended, partition FROM partitions ORDER BY partition").fetchall()
    if [row[-1] for row in partitions] != list(range(topic.partitions)):
        raise damaged(file, "its partitions are not all there")
    return partitions, topic


def _salvaged(db: sqlite3.Connection, id: int, end: int) -> Iterator[StoredRow]:
    """The intact records up to an end."""
    while id < end:
        try:
            for row in stored_rows(db, id, end):
                id = row[0] + 1
                if is_intact(row):
                    yield row
            return
        except sqlite3.Error:
            # Records behind damaged pages can only be found one by one.
            found: list[StoredRow] = []
            while id < end and not found:
                with suppress(sqlite3.Error):
                    found = list(stored_rows(db, id, id + 1))
                id += 1
            yield from filter(is_intact, found)
