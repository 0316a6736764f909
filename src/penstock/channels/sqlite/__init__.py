"""Channels in SQLite databases in a folder, for many processes of one machine, without a server."""

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.channels.common import differences, durations
from penstock.channels.leases import LEASE, GroupState, LeasedGroups
from penstock.channels.log_reader import LogReader
from penstock.channels.sqlite.database import (
    CHANNEL_LOCK,
    GROUPS,
    SETTINGS,
    Connection,
    Database,
    creating,
    damaged,
    locked,
    make_tables,
    sync_folder,
    translating,
)
from penstock.channels.sqlite.sending import SqliteSender
from penstock.core.clock import Micros, SystemClock
from penstock.core.contracts import ChannelPartition, EnsureResult, Entry, Offsets, Promise, Topic
from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.core.scan import Bounds
from penstock.core.text import did_you_mean

Result = TypeVar("Result")

_SYNCED = Promise(
    durable=True,
    replay=True,
    description=(
        "a record is acknowledged once it is synced to disk: it survives kill -9, and a power cut if the disk keeps "
        "what it has synced; one machine, one copy"
    ),
)
_CACHED = Promise(
    durable=True,
    replay=True,
    description=(
        "a record is acknowledged from the memory of the operating system (sync=no): it survives kill -9 of every "
        "process, but not a power cut; one machine, one copy"
    ),
)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_OLD_FORMAT = "meta.json"
"""A file that each channel had before channels were SQLite databases."""
_LOCK, _HELD = ".lock", "held"
_REMOVED = ".removed-"
_SHORTEST, _LONGEST = 0.001, 0.02
"""Seconds between two polls."""


def at(address: str, _: object = None) -> "SqliteChannels":
    """`file:///absolute/path?sync=yes|no`."""
    location, parts = f"channels at {address}", urlsplit(address)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/") or ".." in path.parts:
        raise Misconfigured(location, "it has no absolute path", "write file:///absolute/path, with three slashes")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name != "sync":
            raise Misconfigured(
                location, f'"{name}" is not an option', did_you_mean(name, ["sync"], "the only option is sync")
            )
    if (sync := options.get("sync", "yes")) not in ("yes", "no"):
        raise Misconfigured(location, f'sync is "{sync}"', "write sync=yes or sync=no")
    return SqliteChannels(path, sync == "yes")


@dataclass(frozen=True)
class SqliteChannels(LeasedGroups):
    """Each channel is a folder in `folder`, with one database.

    `lease`: after how long a silent member of a group loses its partitions.
    """

    folder: Path
    sync: bool = True
    lease: timedelta = LEASE

    @property
    def promise(self) -> Promise:
        return _SYNCED if self.sync else _CACHED

    @property
    def where(self) -> str:
        return self.folder.absolute().as_uri() + ("" if self.sync else "?sync=no")

    # --- topics

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        made, extended, different = list[str](), list[str](), list[str]()
        for topic in topics:
            self._folder_of(topic.name)
            _check_settings(topic)
            if topic.partitions < 1:
                raise Misconfigured(f"channel {topic.name}", f"{topic.partitions} partitions", "ask for at least 1")
        self._check_folder()
        with translating(self.folder):
            self.folder.mkdir(exist_ok=True)
            with _alone(self.folder / _LOCK):
                self._sweep()
                for topic in topics:
                    if self._file(topic.name) is None:
                        self._make(topic)
                        made.append(topic.name)
                    with closing(self._open(topic.name)) as database:
                        here = database.topic()
                        if here.partitions < topic.partitions:
                            database.extend(topic.partitions)
                            extended.append(topic.name)
                    different += differences(here, topic, "file://", SETTINGS)
        return EnsureResult(tuple(made), tuple(extended), tuple(different))

    def names(self) -> list[str]:
        self._check_folder()
        with translating(self.folder):
            if not self.folder.exists():
                return []
            names = sorted(path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
            return [name for name in names if self._file(name) is not None]

    def topic(self, channel: str) -> Topic:
        with closing(self._open(channel)) as database:
            return database.topic()

    def topic_id(self, channel: str) -> str:
        with closing(self._open(channel)) as database:
            return database.path.stem

    def remove(self, channel: str) -> None:
        """Destroy a channel, also a damaged one. Senders that are writing to it finish first."""
        self._require(channel)
        with translating(self.folder), _alone(self.folder / _LOCK):
            # Connections that are open notice that their file is gone.
            with _alone(self._require(channel).with_name(CHANNEL_LOCK)):
                self._folder_of(channel).rename(self.folder / f"{_REMOVED}{uuid.uuid4().hex}")
            sync_folder(self.folder)
            self._sweep()
        self.forget_channel(channel)

    def size(self, channel: str) -> int:
        """How many bytes a channel takes on disk, about."""
        with closing(self._open(channel)) as database:
            return database.size()

    @contextmanager
    def hold(self, channel: str) -> Iterator[None]:
        """Lock a channel against other callers of `hold`; Misconfigured if another process has it."""
        folder = self._folder_of(channel)
        self.topic_id(channel)
        with translating(folder):
            opened = os.open(folder / _HELD, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                fix = "stop that process, or start this one in another folder"
                raise Misconfigured(str(folder), "it is in use by another process", fix) from error
            yield
        finally:
            # This releases the lock. The lock of a killed process ends with the process.
            os.close(opened)

    # --- writing

    def sender(self) -> AbstractAsyncContextManager[SqliteSender]:
        return aclosing(SqliteSender(self._open, SystemClock()))

    # --- reading

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator[LogReader]:
        with closing(SqliteLog(self._open)) as log:
            yield LogReader(log, start, only)

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        with closing(self._open(channel)) as database:
            return database.bounds()

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        with closing(self._open(channel)) as database:
            return {partition: database.since(partition, timestamp) for partition in database.bounds()}

    def forget(self, channel: str, before: Offsets) -> None:
        """Delete the records before these offsets."""
        with closing(self._open(channel)) as database:
            for partition in database.bounds():
                database.forget(partition, before.get(partition, 0))

    # --- groups

    def change(self, group: str, change: Callable[[GroupState, Micros], Result]) -> Result:
        """Change what is known of a group, atomically."""
        path = self.folder / GROUPS
        with translating(path):
            if not path.exists():
                self._make_groups(path)
            with closing(Connection(path, self.folder / _LOCK, sync=True)) as connection, connection.transaction():
                row = connection.db.execute("SELECT standing FROM groups WHERE name = ?", (group,)).fetchone()
                before = row[0] if row else None
                state = _parse(path, before)
                result = change(state, SystemClock().now())
                if (after := state.dumps()) != before and (before or state != GroupState()):
                    connection.db.execute("INSERT OR REPLACE INTO groups VALUES (?, ?)", (group, after))
        return result

    def _make_groups(self, path: Path) -> None:
        with _alone(self.folder / _LOCK):
            if not path.exists():
                with creating(path) as db:
                    db.execute("BEGIN")
                    db.execute("CREATE TABLE groups (name TEXT PRIMARY KEY, standing BLOB NOT NULL)")

    def group_states(self) -> tuple[Mapping[str, GroupState], Micros]:
        path, now = self.folder / GROUPS, SystemClock().now()
        if not path.exists():
            return {}, now
        with translating(path), closing(Connection(path, self.folder / _LOCK, sync=True)) as connection:
            rows = connection.db.execute("SELECT name, standing FROM groups").fetchall()
        return {name: _parse(path, document) for name, document in rows}, now

    # --- files

    def _folder_of(self, channel: str) -> Path:
        """The folder of a channel; Misconfigured if the name is not a plain file name."""
        if not _NAME.fullmatch(channel):
            fix = "a name has up to 200 letters, digits and . _ -, and does not begin with a dot"
            raise Misconfigured(f"channel {channel!r}", "a folder cannot have this name", fix)
        return self.folder / channel

    def _file(self, channel: str) -> Path | None:
        """The database of a channel. It has the channel's id as its name: SQLite deletes files by their names."""
        folder = self._folder_of(channel)
        if (folder / _OLD_FORMAT).exists():
            fix = f"read its records with the version of penstock that wrote it; then move {folder} away"
            raise Misconfigured(f"channel {channel}", f"{folder} has the format of an earlier version", fix)
        return next(folder.glob("*.db"), None)

    def _open(self, channel: str) -> Database:
        file = self._require(channel)
        try:
            database = Database(file, self.sync)
        except PenstockError:
            if not file.exists():
                raise self._absent(channel) from None
            raise
        # A channel that was removed before its WAL was open could be read without its last transactions.
        if not file.exists():
            database.close()
            raise self._absent(channel)
        return database

    def _require(self, channel: str) -> Path:
        with translating(self.folder):
            if (file := self._file(channel)) is None:
                raise self._absent(channel)
            return file

    def _absent(self, channel: str) -> Unavailable:
        return Unavailable(f"channel {channel}", f"there is no such channel in {self.folder}")

    def _check_folder(self) -> None:
        location = f"channels in {self.folder}"
        if self.folder.exists() and not self.folder.is_dir():
            raise Misconfigured(location, "it is not a folder", "give a folder")
        if not self.folder.parent.is_dir():
            # It is not created: where a disk is not mounted, the records would go to another one.
            raise Misconfigured(location, f"there is no folder {self.folder.parent}", "create it, or give another one")

    def _make(self, topic: Topic) -> None:
        folder = self._folder_of(topic.name)
        folder.mkdir(exist_ok=True)
        sync_folder(self.folder)
        with creating(folder / f"{uuid.uuid4().hex}.db") as db:
            make_tables(db, topic)

    def _sweep(self) -> None:
        """Delete what is left of removed channels."""
        for rest in self.folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(rest)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process or thread has this lock."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with locked(opened):
            yield
    finally:
        os.close(opened)


def _parse(path: Path, document: bytes | None) -> GroupState:
    try:
        return GroupState.loads(document)
    except (ValueError, TypeError) as error:
        # Without the committed offsets, a group would skip records or read all of them again.
        raise damaged(path, str(error)) from error


def _check_settings(topic: Topic) -> None:
    durations(topic, SETTINGS)
    for name in topic.config:
        if name not in SETTINGS and (fix := did_you_mean(name, SETTINGS, "", cutoff=0.8)):
            raise Misconfigured(f"channel {topic.name}", f'"{name}" is not a setting', fix)


# --- reading


class SqliteLog:
    """Polls for commits, often while records come and seldom while none do."""

    def __init__(self, open: Callable[[str], Database]) -> None:
        self._open = open
        self._databases: dict[str, Database] = {}
        self._pause = _SHORTEST

    def state(self, channel: str) -> tuple[str, Bounds] | None:
        if channel not in self._databases:
            self._databases[channel] = self._open(channel)
        database = self._databases[channel]
        if not database.path.exists():
            raise Unavailable(f"channel {channel}", "it was removed while it was read")
        if not database.changed():
            return None
        self._pause = _SHORTEST
        return database.path.stem, database.bounds()

    def read(self, channel: str, partition: int, offset: int | None, most: int) -> tuple[str, Sequence[Entry], int]:
        database = self._databases[channel]
        return database.path.stem, *database.read(partition, offset, most)

    def wait(self, positions: Mapping[ChannelPartition, int], seconds: float) -> None:
        time.sleep(min(seconds, self._pause))
        self._pause = min(2 * self._pause, _LONGEST)

    def close(self) -> None:
        for database in self._databases.values():
            database.close()
