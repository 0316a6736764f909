"""SQLite databases: one file for each channel, and one for the groups of a folder.

A transaction is acknowledged after it is synced (WAL, synchronous=FULL), so readers never see records that a crash can
take away. SQLite checks the structure of a file but not its values, so each record has a checksum.
"""

import errno
import fcntl
import os
import sqlite3
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import NamedTuple
from zlib import crc32

import orjson

from penstock.channels.common import beyond, durations, overtaken
from penstock.core.clock import Micros, micros
from penstock.core.contracts import Entry, Topic
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.core.record import Headers, Record

COMPACT_AFTER = "compact.after"
SETTINGS = {COMPACT_AFTER: "1 hour"}
"""How long a record of a compacted channel stays after a later record of its key replaced it."""
GROUPS, CHANNEL_LOCK = ".groups.db", "lock"
_TOMBSTONES = timedelta(days=1)
"""How long the deletion of a key stays, so that slow readers see it."""
_LOCKED = 30.0
"""Seconds to wait for a lock of SQLite. Writers wait for each other before, without a limit."""
_CHUNK = 10_000
"""Records that one transaction deletes: other writers wait for it."""
_VACUUM_PAGES = 2_000
_NEVER: Micros = 1 << 63
_LARGEST = 900_000_000
"""Bytes of one record; SQLite takes 10^9 in a row."""

_SCHEMA = """
BEGIN;
CREATE TABLE channel (
    partitions INTEGER NOT NULL, retention REAL, compacted INTEGER NOT NULL, config TEXT NOT NULL,
    repaired INTEGER NOT NULL DEFAULT 0);
CREATE TABLE partitions (
    partition INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL, appended INTEGER NOT NULL);
CREATE TABLE records (
    id INTEGER PRIMARY KEY, appended INTEGER NOT NULL, key BLOB, value BLOB, headers BLOB NOT NULL,
    checksum INTEGER NOT NULL);
"""
_ROWS = "SELECT id, appended, key, value, headers, checksum FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
_OFFSET_BITS = 40
_OFFSETS = (1 << _OFFSET_BITS) - 1
"""The id of a record is its partition and its offset."""

Connect = Callable[[str], sqlite3.Connection]


def connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=_LOCKED, isolation_level=None, check_same_thread=False)


class Removed(Unavailable):
    """Raised when an open database was removed."""


class Damage(Exception):
    """A record is missing, or has a wrong checksum."""


# --- errors


def translate(path: Path, error: sqlite3.Error | OSError) -> PenstockError:
    """An error of SQLite or of the operating system, as an error with a place and a fix."""
    location, code = f"channels in {path.parent}", getattr(error, "sqlite_errorcode", None)
    if isinstance(error, OSError):
        return _translate_os(location, path, error)
    if code is None:  # Python raises some errors itself.
        code = sqlite3.SQLITE_CORRUPT if isinstance(error, sqlite3.DatabaseError) else sqlite3.SQLITE_MISUSE
    match code & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CONSTRAINT | sqlite3.SQLITE_ERROR:
            return damaged(path, str(error))
        case sqlite3.SQLITE_FULL:
            return Unavailable(location, "the disk is full")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Unavailable(location, f"another process has locked {path} for {_LOCKED:g} s")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return _forbidden(location, path, str(error))
        case sqlite3.SQLITE_CANTOPEN if path.exists():
            return _forbidden(location, path, str(error))
    return Unavailable(location, f"{path}: {error}")


def _translate_os(location: str, path: Path, error: OSError) -> PenstockError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Unavailable(location, f"the disk is full: {error.strerror}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _forbidden(location, Path(error.filename or path), str(error.strerror))
    if error.errno == errno.ENOTDIR:
        return Misconfigured(location, "it is not a folder", "give a folder")
    return Unavailable(location, f"{error.filename or path}: {error.strerror}")


def _forbidden(location: str, path: Path, why: str) -> Misconfigured:
    return Misconfigured(location, f"{path}: {why}", "let this user write there, or use another folder")


def damaged(path: Path, why: str) -> Unaccounted:
    if path.name == GROUPS:
        fix = "bring it back from a copy, or move it away: its groups then begin as new ones"
        return Unaccounted(f"groups in {path.parent}", (), f"{path} is damaged: {why}; {fix}")
    consequence = "nothing behind the damage can be read. Stop the pipeline and run penstock repair"
    return Unaccounted(f"channel {path.parent.name}", (), f"{path} is damaged: {why}; {consequence}")


@contextmanager
def translating(path: Path) -> Iterator[None]:
    try:
        yield
    except Damage as error:
        raise damaged(path, str(error)) from error
    except (sqlite3.Error, OSError) as error:
        raise translate(path, error) from error


# --- records


class Row(NamedTuple):
    """A record that is ready to be written."""

    hash: int
    """Decides the partition: of the key, or of the sender, so that its order is kept."""
    key: bytes | None
    value: bytes | None
    headers: bytes
    checksum: int


@cache
def _lengths(count: int) -> Struct:
    return Struct(f"<H{count}I")


def encode(record: Record) -> Row:
    """Raises Refused when the record cannot be written."""
    key, value = record.key, record.value
    try:
        texts = [text for name, content in record.headers() for text in (name.encode(), content)]
        headers = _lengths(len(texts)).pack(len(texts), *map(len, texts)) + b"".join(texts)
    except UnicodeEncodeError as error:
        raise Refused("a record", f"the name of a header is not valid text: {error.reason}") from error
    except StructError as error:
        raise Refused("a record", "it has too many headers") from error
    if (size := len(key or b"") + len(value or b"") + len(headers)) > _LARGEST:
        raise Refused("a record", f"it has {size} bytes; the limit is {_LARGEST}")
    sender = record.origin.sender.encode() if record.origin else b""
    checksum = crc32(headers, crc32(value or b"", crc32(key or b"")))
    return Row(crc32(sender if key is None else key), key, value, headers, checksum)


def _decode(headers: bytes) -> Headers:
    count = int.from_bytes(headers[:2], "little")
    lengths = _lengths(count)
    bounds = accumulate(lengths.unpack_from(headers)[1:], initial=lengths.size)
    texts = [headers[start:stop] for start, stop in pairwise(bounds)]
    return [(name.decode(), value) for name, value in zip(texts[::2], texts[1::2], strict=True)]


def _checksum(id: int, appended: Micros, content: int) -> int:
    return content ^ (id & 0xFFFFFFFF) ^ (id >> 32) ^ (appended & 0xFFFFFFFF) ^ (appended >> 32)


StoredRow = tuple[int, Micros, bytes | None, bytes | None, bytes, int]
"""Id, time, key, value, headers and checksum."""


def is_intact(row: StoredRow) -> bool:
    id, appended, key, value, headers, checksum = row
    try:
        return _checksum(id, appended, crc32(headers, crc32(value or b"", crc32(key or b"")))) == checksum
    except TypeError:  # Damage can make a value of another type.
        return False


def id_of(partition: int, offset: int) -> int:
    return partition << _OFFSET_BITS | offset


def partition_and_offset(id: int) -> tuple[int, int]:
    return id >> _OFFSET_BITS, id & _OFFSETS


def stored_rows(db: sqlite3.Connection, id: int, end: int, most: int = -1) -> Iterator[StoredRow]:
    """The records from an id up to another one, intact or not."""
    return db.execute(_ROWS, (id, end, most))


def intact_rows(
    db: sqlite3.Connection, partition: int, offset: int, end: int, complete: bool, most: int = 1 << _OFFSET_BITS
) -> Iterator[tuple[int, StoredRow]]:
    """Up to `most` records from an offset on, with their offsets. Raises Damage where one is damaged.

    `complete`: all offsets up to the end have a record.
    """
    left = most
    for row in stored_rows(db, id_of(partition, offset), id_of(partition, end), most):
        _, found = partition_and_offset(row[0])
        if complete and found != offset:
            break
        if not is_intact(row):
            raise Damage(f"offset {found} of partition {partition} has a wrong checksum")
        yield found, row
        offset, left = found + 1, left - 1
    if complete and left and offset < end:
        raise Damage(f"offset {offset} of partition {partition} is missing")


# --- databases


@contextmanager
def creating(path: Path) -> Iterator[sqlite3.Connection]:
    """Create a database in one transaction. It is at `path`, and survives a power cut, when the block is left."""
    new = path.with_name(".new")
    with translating(path):
        new.unlink(missing_ok=True)
        with closing(connect(f"{new.absolute().as_uri()}?mode=rwc")) as db:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = OFF")  # Nothing reads an unfinished file.
            yield db
            db.execute("COMMIT")
            db.execute("PRAGMA journal_mode = WAL")
        for ending in ("-wal", "-shm"):  # Those of a damaged database that this one replaces.
            path.with_name(f"{path.name}{ending}").unlink(missing_ok=True)
        new.rename(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Connection:
    """A connection to a database. One thread at a time uses it.

    Writers take turns by a lock on the file `lock`: SQLite itself polls, and a busy writer would starve the others.
    """

    def __init__(self, path: Path, lock: Path, sync: bool, connect: Connect = connect) -> None:
        self.path = path
        self._failed: PenstockError | None = None
        with translating(path), ExitStack() as opened:
            self.db = opened.enter_context(closing(connect(f"{path.absolute().as_uri()}?mode=rw")))
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, self._lock)
            self.db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            self.db.execute("PRAGMA wal_autocheckpoint = 4000")
            self.db.execute("PRAGMA journal_size_limit = 16777216")
            self.db.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # This opens the WAL.
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write in one transaction; it is safe when the block is left. Raises Removed.

        An I/O error is final: the kernel may have dropped what could not be written, and a second sync would succeed
        all the same.
        """
        if self._failed is not None:
            raise self._failed
        with translating(self.path), locked(self._lock):
            if not self.path.exists():
                raise Removed(f"channels in {self.path.parent}", "it was removed")
            try:
                self.db.execute("BEGIN IMMEDIATE")
                yield
                self.db.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):
                    if self.db.in_transaction:
                        self.db.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
                    why = f"{self.path}: {error}, which is final; check the disk, and start again"
                    self._failed = Unavailable(f"channels in {self.path.parent}", why)
                    raise self._failed from error
                raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads of the block see the same state."""
        with translating(self.path):
            self.db.execute("BEGIN")
            try:
                yield
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")


@contextmanager
def locked(fd: int) -> Iterator[None]:
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


class Database(Connection):
    """The database of one channel."""

    def __init__(self, path: Path, sync: bool, connect: Connect = connect) -> None:
        super().__init__(path, path.with_name(CHANNEL_LOCK), sync, connect)
        self.channel = path.parent.name
        self._version = -1

    # --- the channel

    def topic(self) -> Topic:
        """The channel as it was declared."""
        with translating(self.path):
            return load_topic(self.db, self.path)

    def extend(self, partitions: int) -> None:
        with self.transaction():
            _add_partitions(self.db, self.topic().partitions, partitions)
            self.db.execute("UPDATE channel SET partitions = ?", (partitions,))

    def changed(self) -> bool:
        """Whether another connection has written since the last call."""
        with translating(self.path):
            before, self._version = self._version, self.db.execute("PRAGMA data_version").fetchone()[0]
        return self._version != before

    def bounds(self) -> dict[int, tuple[int, int]]:
        with translating(self.path):
            rows = self.db.execute("SELECT partition, first, next FROM partitions ORDER BY partition").fetchall()
        return {partition: (first, next) for partition, first, next in rows}

    def size(self) -> int:
        """Bytes in use."""
        with translating(self.path):
            used = self._pragma("page_count") - self._pragma("freelist_count")
            return used * self._pragma("page_size")

    # --- records

    def append(self, rows: Sequence[Row], now: Micros) -> Topic:
        """Append in order, in one transaction; the topic as it is now."""
        with self.transaction():
            topic = self.topic()
            split: dict[int, list[Row]] = defaultdict(list)
            for row in rows:
                split[row.hash % topic.partitions].append(row)
            for partition, some in split.items():
                self._append(partition, some, now)
        return topic

    def _append(self, partition: int, rows: Sequence[Row], now: Micros) -> None:
        offset, appended = self.db.execute(
            "SELECT next, appended FROM partitions WHERE partition = ?", (partition,)
        ).fetchone()
        appended = max(appended, now)  # Time never steps back within a partition.
        self.db.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)",
            (
                (id, appended, row.key, row.value, row.headers, _checksum(id, appended, row.checksum))
                for id, row in enumerate(rows, id_of(partition, offset))
            ),
        )
        self.db.execute(
            "UPDATE partitions SET next = ?, appended = ? WHERE partition = ?",
            (offset + len(rows), appended, partition),
        )

    def read(self, partition: int, offset: int | None, most: int) -> tuple[list[Entry], int]:
        """Entries from an offset or from the beginning, and where reading goes on.

        Raises Unaccounted at what is damaged or not kept.
        """
        with self.snapshot():
            first, next = self.bounds().get(partition, (0, 0))
            offset = first if offset is None else offset
            if offset < first:
                raise overtaken(self.channel, partition, offset, first)
            if offset > next:
                raise beyond(self.channel, partition, offset, next)
            entries: list[Entry] = []
            try:
                for found, row in intact_rows(self.db, partition, offset, next, is_complete(self.db), most):
                    _, appended, key, value, headers, _ = row
                    entries.append(Entry(self.channel, partition, found, appended, key, value, _decode(headers)))
                    offset = found + 1
            except (Damage, sqlite3.Error):
                if not entries:
                    raise
                return entries, offset  # The next call raises it.
        return entries, offset if len(entries) == most else next

    def since(self, partition: int, timestamp: Micros) -> int:
        """The offset of the first record that was appended at this time or later; the end if there is none."""
        with self.snapshot():
            first, end = self.bounds()[partition]

            def record_at(offset: int) -> tuple[int, Micros]:
                """The offset and the time of the first record there or later."""
                row = self.db.execute(
                    "SELECT id, appended FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT 1",
                    (id_of(partition, offset), id_of(partition, end)),
                ).fetchone()
                return (partition_and_offset(row[0])[1], row[1]) if row else (end, _NEVER)

            found = bisect_left(range(first, end), timestamp, key=lambda offset: record_at(offset)[1])
            return record_at(first + found)[0]

    # --- retention and compaction

    def forget(self, partition: int, before: int) -> None:
        """Delete the records with smaller offsets."""
        first, next = self.bounds()[partition]
        before = min(before, next)
        while first < before:
            stop = min(first + _CHUNK, before)
            with self.transaction():
                self.db.execute(
                    "DELETE FROM records WHERE id >= ? AND id < ?", (id_of(partition, first), id_of(partition, stop))
                )
                self.db.execute("UPDATE partitions SET first = max(first, ?) WHERE partition = ?", (stop, partition))
            first = stop
        self._vacuum()

    def clean(self, now: Micros) -> None:
        """Delete what retention and compaction do not keep. It can be broken off at any time."""
        topic = self.topic()
        if topic.retention is not None:
            for partition in range(topic.partitions):
                self.forget(partition, self.since(partition, now - micros(topic.retention) + 1))
        if topic.compacted:
            self._compact(now - micros(compact_after(topic)), now - micros(_TOMBSTONES))

    def _compact(self, oldest: Micros, tombstones: Micros) -> None:
        # A deletion goes only after all that it deletes: otherwise older records of the key would come back.
        for query, limit in (
            (
                "SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY id >> 40, key ORDER BY id DESC) AS age "
                "FROM records WHERE key IS NOT NULL AND appended <= ?) WHERE age > 1",
                oldest,
            ),
            (
                "SELECT id FROM records WHERE key IS NOT NULL AND value IS NULL AND appended < ?",
                min(oldest, tombstones),
            ),
        ):
            with translating(self.path):
                ids = self.db.execute(query, (limit,)).fetchall()
            for start in range(0, len(ids), _CHUNK):
                with self.transaction():
                    self.db.executemany("DELETE FROM records WHERE id = ?", ids[start : start + _CHUNK])
        self._vacuum()

    def _vacuum(self) -> None:
        """Give free pages back to the disk when there are more of them than others, some at a time."""
        with translating(self.path):
            free, pages = self._pragma("freelist_count"), self._pragma("page_count")
        if free > _VACUUM_PAGES // 4 and 2 * free > pages:
            empty = all(first == next for first, next in self.bounds().values())
            with translating(self.path), locked(self._lock):
                # Not by `execute`: it would free a single page.
                self.db.executescript(f"PRAGMA incremental_vacuum({0 if empty else _VACUUM_PAGES})")

    def _pragma(self, name: str) -> int:
        value: int = self.db.execute(f"PRAGMA {name}").fetchone()[0]
        return value


def is_complete(db: sqlite3.Connection) -> bool:
    """Whether all offsets of a channel have a record."""
    return not db.execute("SELECT compacted OR repaired FROM channel").fetchone()[0]


def make_tables(db: sqlite3.Connection, topic: Topic) -> None:
    db.executescript(_SCHEMA)
    keep = topic.retention.total_seconds() if topic.retention is not None else None
    config = {name: value for name, value in topic.config.items() if name in SETTINGS}
    facts = topic.partitions, keep, topic.compacted, orjson.dumps(config).decode()
    db.execute("INSERT INTO channel (partitions, retention, compacted, config) VALUES (?, ?, ?, ?)", facts)
    _add_partitions(db, 0, topic.partitions)


def load_topic(db: sqlite3.Connection, path: Path) -> Topic:
    row = db.execute("SELECT partitions, retention, compacted, config FROM channel").fetchone()
    try:
        partitions, keep, compacted, config = row
        kept = timedelta(seconds=keep) if keep is not None else None
        return Topic(path.parent.name, partitions, 1, bool(compacted), kept, orjson.loads(config))
    except (TypeError, ValueError, OverflowError) as error:
        raise damaged(path, str(error)) from error


def _add_partitions(db: sqlite3.Connection, first: int, stop: int) -> None:
    rows = [(partition,) for partition in range(first, stop)]
    db.executemany("INSERT INTO partitions (partition, first, next, appended) VALUES (?, 0, 0, 0)", rows)


def compact_after(topic: Topic) -> timedelta:
    return durations(topic, SETTINGS)[COMPACT_AFTER]
