"""A feed: a table that follows a result channel, and the changes that a client has not seen yet. No I/O.

A client holds a copy of the table. It gets a snapshot first, then changes; each message carries the position that the
client reaches with it. Missed changes are found by the position of each row's last entry, not in a list of past
messages. So a slow client costs one number, gets only the latest state of each row, and delays no other client.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from hmac import compare_digest
from typing import Literal

import orjson

from penstock.core.clock import Micros
from penstock.core.contracts import Entry
from penstock.core.errors import Refused

MAX_ABSENCE = timedelta(minutes=10)
"""A client that was away for longer gets a snapshot. Channels have to keep deletions for longer than this."""

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in one partition: the next offset, and the newest time of appending before it."""

    offset: int = 0
    appended: Micros = 0


Position = Mapping[int, Mark]
"""By partition."""


class ResumeTokens:
    """Positions as opaque, signed text, bound to one table.

    Tokens of another table, of a topic that was created again, and forged ones cannot be read.
    """

    _MAX_SIZE = 8_192

    def __init__(self, *table: str) -> None:
        self._secret = blake2b("\0".join(table).encode(), digest_size=32).digest()

    def write(self, position: Position) -> str:
        body = ".".join(f"{part}-{mark.offset:x}-{mark.appended:x}" for part, mark in sorted(position.items()))
        return f"{self._signature(body)}.{body}"

    def read(self, token: str | None) -> Position | None:
        """The position, or None if this is not a token of this table."""
        if not token or len(token) > self._MAX_SIZE or not token.isascii():
            return None
        signature, _, body = token.partition(".")
        if not compare_digest(signature, self._signature(body)):
            return None
        # The signature proves that `write` made the body, so its format is known.
        parts = [part.split("-") for part in body.split(".")] if body else []
        return {int(part): Mark(int(offset, 16), int(appended, 16)) for part, offset, appended in parts}

    def _signature(self, body: str) -> str:
        return blake2b(body.encode(), key=self._secret, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Change:
    """The new state of a key: a row, or None if it was deleted. Key and row are JSON texts."""

    key: bytes
    row: bytes | None
    version: int | None
    time: Micros | None

    def json(self) -> dict[str, object]:
        return {
            "key": orjson.Fragment(self.key),
            "row": None if self.row is None else orjson.Fragment(self.row),
            "version": self.version,
            "time": self.time,
        }


@dataclass(frozen=True)
class Message:
    """The whole table, or changes; with it, a copy of the table is at `position`."""

    kind: Literal["snapshot", "changes"]
    feed: str
    position: str
    rows: Sequence[Change]

    @cached_property
    def text(self) -> str:
        """The message as JSON on one line. Made once for all clients that get it."""
        document = {"kind": self.kind, "feed": self.feed, "position": self.position}
        return orjson.dumps({**document, "rows": [row.json() for row in self.rows]}).decode()


@dataclass(slots=True)
class Row:
    """The last change of a key, and the position of its last entry. Deleted rows are remembered for some time, too."""

    change: Change
    revision: int
    partition: int
    offset: int
    appended: Micros
    evicted: bool = False


@dataclass(slots=True)
class _Partition:
    begin: Mark
    mark: Mark
    # In the order of their last entries, and therefore of the times of appending.
    keys: dict[bytes, None] = field(default_factory=dict)


class Feed:
    """The table of one result channel.

    `retention` removes rows without an entry for that long, by the times of appending. `history` is the number of
    removed rows that are remembered: a client that missed more of them gets a snapshot.
    """

    def __init__(self, name: str, topic_id: str, retention: timedelta | None = None, history: int = 10_000) -> None:
        self.name = name
        self.received = self.passed = self.duplicate = self.refused = 0
        """How many entries were received, each counted once, and how many of them were newer, not newer, or invalid."""
        self.refusal: str | None = None
        self._retention = None if retention is None else retention // _MICROSECOND
        self._history = history
        self._tokens = ResumeTokens(name, topic_id, str(self._retention))
        self._revision = 0
        self._newest: Micros = 0
        self._partitions: dict[int, _Partition] = {}
        # Both in the order of their last change: what a client misses is at the end.
        self._rows: dict[bytes, Row] = {}
        self._deleted: dict[bytes, None] = {}
        # Up to where removed rows were forgotten: a client at an earlier position needs a snapshot.
        self._forgotten_revision = 0
        self._forgotten_offset: defaultdict[int, int] = defaultdict(int)
        self._forgotten_time: Micros | None = None
        self._last_snapshot: tuple[int, Message] | None = None
        self._last_changes: tuple[int, int, Message] | None = None

    def __len__(self) -> int:
        return len(self._rows) - len(self._deleted)

    @property
    def revision(self) -> int:
        """A number that grows with every change of the table."""
        return self._revision

    def offsets(self) -> dict[int, int]:
        """The next offset of each partition."""
        return {number: partition.mark.offset for number, partition in self._partitions.items()}

    # --- input --------------------------------------------------------------------------------------------------------

    def push(self, entries: Iterable[Entry]) -> None:
        """Apply entries, in order within each partition. Older or repeated entries change nothing."""
        for entry in entries:
            partition = self._partitions.get(entry.partition)
            if partition is None:
                begin = Mark(entry.offset, entry.appended)
                partition = self._partitions[entry.partition] = _Partition(begin, begin)
            if entry.offset < partition.mark.offset:
                continue
            self.received += 1
            partition.mark = Mark(entry.offset + 1, max(entry.appended, partition.mark.appended))
            self._newest = max(self._newest, entry.appended)
            try:
                change = _parse(entry)
            except Refused as refused:
                self.refused += 1
                self.refusal = f"partition {entry.partition}, offset {entry.offset}: {refused.reason}"
            else:
                self._apply(change, entry, partition)
        self._evict()
        self._forget()

    def _apply(self, change: Change, entry: Entry, partition: _Partition) -> None:
        row = self._rows.get(change.key)
        if row is not None:
            self._partitions[row.partition].keys.pop(change.key, None)
        if row is None or _newer(change, row):
            self.passed += 1
            self._store(change, entry.partition, entry.offset, partition.mark.appended)
        else:
            if _newer_deletion(change, row.change):
                self.passed += 1
                row.change, row.evicted = change, False
            else:
                self.duplicate += 1
            # The row gets the position of this entry: after a compaction, it is the only one that is left.
            row.partition, row.offset, row.appended = entry.partition, entry.offset, partition.mark.appended
        if self._rows[change.key].change.row is not None:
            partition.keys[change.key] = None

    def _store(self, change: Change, partition: int, offset: int, appended: Micros, evicted: bool = False) -> None:
        self._revision += 1
        self._rows.pop(change.key, None)
        self._deleted.pop(change.key, None)
        self._rows[change.key] = Row(change, self._revision, partition, offset, appended, evicted)
        if change.row is None:
            self._deleted[change.key] = None

    def _evict(self) -> None:
        if self._retention is None:
            return
        horizon = self._newest - self._retention
        for partition in self._partitions.values():
            while partition.keys and (row := self._rows[next(iter(partition.keys))]).appended < horizon:
                change = row.change
                del partition.keys[change.key]
                removed = Change(change.key, None, change.version, None)
                self._store(removed, row.partition, row.offset, row.appended, evicted=True)

    def _forget(self) -> None:
        while len(self._deleted) > self._history:
            key = next(iter(self._deleted))
            del self._deleted[key]
            row = self._rows.pop(key)
            self._forgotten_revision = row.revision
            self._forgotten_offset[row.partition] = max(self._forgotten_offset[row.partition], row.offset + 1)
            if row.evicted:
                self._forgotten_time = max(self._forgotten_time or 0, row.appended)

    # --- output -------------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Row | None:
        """The row of a key, as `orjson.dumps` writes it; None if there is none."""
        row = self._rows.get(key)
        return row if row is not None and row.change.row is not None else None

    def position(self) -> str:
        return self._tokens.write({number: partition.mark for number, partition in self._partitions.items()})

    def join(self, token: str | None = None) -> Message:
        """The changes since the position `token`, or the whole table if they are not known."""
        position = self._tokens.read(token)
        if position is None or not self._covers(position):
            return self._snapshot()
        horizon = self._horizon(position)
        missed = [
            row.change
            for row in self._rows.values()
            if row.offset >= position.get(row.partition, _START).offset or (row.evicted and row.appended >= horizon)
        ]
        return Message("changes", self.name, self.position(), missed)

    def since(self, revision: int) -> Message:
        """The changes after this revision."""
        if revision < self._forgotten_revision:
            return self._snapshot()
        if self._last_changes is None or self._last_changes[:2] != (revision, self._revision):
            missed: list[Change] = []
            for row in reversed(self._rows.values()):
                if row.revision <= revision:
                    break
                missed.append(row.change)
            message = Message("changes", self.name, self.position(), missed[::-1])
            self._last_changes = (revision, self._revision, message)
        return self._last_changes[2]

    def _snapshot(self) -> Message:
        if self._last_snapshot is None or self._last_snapshot[0] != self._revision:
            rows = [row.change for row in self._rows.values() if row.change.row is not None]
            self._last_snapshot = (self._revision, Message("snapshot", self.name, self.position(), rows))
        return self._last_snapshot[1]

    def _horizon(self, position: Position) -> Micros:
        """Rows whose last entry was appended before this were not in the table at that position."""
        return max((mark.appended for mark in position.values()), default=0) - (self._retention or 0)

    def _covers(self, position: Position) -> bool:
        """Whether all removals since that position are still known."""
        if not position.keys() <= self._partitions.keys():
            return False
        for number, partition in self._partitions.items():
            # A partition without an entry at that position is sent as a whole, if its beginning is still known.
            then, now = position.get(number, partition.begin), partition.mark
            away = now.appended - then.appended
            if number not in position and then.offset > 0:
                return False
            if then.offset > now.offset or then.offset < self._forgotten_offset[number]:
                return False
            if then.offset < now.offset and away > MAX_ABSENCE // _MICROSECOND:
                return False
        return self._forgotten_time is None or self._horizon(position) > self._forgotten_time


class Follower:
    """One client of a feed: `take` gives the next message, with all changes since the last one."""

    def __init__(self, feed: Feed, token: str | None = None) -> None:
        self._feed = feed
        self._token = token
        self._revision: int | None = None

    def take(self) -> Message | None:
        """The next message, or None if nothing changed. The first call always gives one."""
        revision, self._revision = self._revision, self._feed.revision
        if revision is None:
            return self._feed.join(self._token)
        return None if revision == self._feed.revision else self._feed.since(revision)


_START = Mark()


def _newer(change: Change, row: Row) -> bool:
    last = row.change
    if last.row is None and (change.row is None or row.evicted):
        # An evicted row was not deleted by the query: any entry with a row brings it back.
        return change.row is not None
    return change.version is None or last.version is None or change.version > last.version


def _newer_deletion(change: Change, last: Change) -> bool:
    """Whether it deletes, with a newer version, what is deleted already: clients need no message."""
    return change.row is last.row is None and (change.version or 0) > (last.version or 0)


def _parse(entry: Entry) -> Change:
    try:
        key = orjson.loads(entry.key or b"")
        row = None if entry.value is None else orjson.loads(entry.value)
    except orjson.JSONDecodeError as error:
        raise Refused("a result", f"it is not JSON: {error}") from error
    if not isinstance(key, list):
        raise Refused("a result", "its key is not an array")
    if row is not None and not isinstance(row, dict):
        raise Refused("a result", "its value is not an object")
    headers = dict(entry.headers)
    # Serialized again: on one line, and equal keys become equal bytes.
    text = None if row is None else orjson.dumps(row)
    return Change(orjson.dumps(key), text, _number(headers, "version"), _number(headers, "time"))


def _number(headers: dict[str, bytes], name: str) -> int | None:
    value = headers.get(name)
    if not value:
        return None
    if not value.isdigit() or len(value) > 18:
        raise Refused("a result", f'its header "{name}" is not a whole number')
    return int(value)
