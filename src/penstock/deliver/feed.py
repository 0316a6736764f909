"""A feed: a table that follows a result channel, and what each client misses of it. No I/O.

A client holds a copy of the table. It gets a snapshot first, then changes, each with the position that it reaches by
them. What a client misses is found from where each row was written, not from a list of past messages: so a slow client
costs one number, gets the latest of each row only, and holds nobody up.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal

import orjson

from penstock.core.clock import Micros
from penstock.core.contracts import Entry
from penstock.core.errors import Refused
from penstock.deliver.position import Mark, Position, Tokens

AWAY = timedelta(minutes=10)
"""How long a client may be away and still get only what it missed. Channels have to keep their deletions for longer."""

_A_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Change:
    """What a key holds now: a row, or None when it is gone. Key and row are JSON texts."""

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
    """Either the whole table, or what changed; with it a copy of the table is at `position`."""

    kind: Literal["snapshot", "changes"]
    feed: str
    position: str
    rows: Sequence[Change]

    @cached_property
    def text(self) -> str:
        """The message as clients get it: JSON on one line. Made once for all clients that get it."""
        document = {"kind": self.kind, "feed": self.feed, "position": self.position}
        return orjson.dumps({**document, "rows": [row.json() for row in self.rows]}).decode()


@dataclass(slots=True)
class Held:
    """The last change of a key, and where its last entry lies. A row that is gone is held too, for those who had it."""

    change: Change
    tick: int
    partition: int
    offset: int
    appended: Micros
    evicted: bool = False


@dataclass(slots=True)
class _Partition:
    begin: Mark
    mark: Mark
    # In the order of their last entries, and therefore of the times at which these were appended.
    keys: dict[bytes, None] = field(default_factory=dict)


class Feed:
    """The table of one result channel.

    `keep` takes rows away that had no entry for so long, by the times at which entries were appended. `history` is the
    number of removed rows that are remembered: a client that was away for more of them gets a snapshot.
    """

    def __init__(self, name: str, topic_id: str, keep: timedelta | None = None, history: int = 10_000) -> None:
        self.name = name
        self.taken = self.passed = self.duplicate = self.refused = 0
        """How many entries were taken, each once, and what they were: newer than what was held, or not, or broken."""
        self.refusal: str | None = None
        self._keep = None if keep is None else keep // _A_MICROSECOND
        self._history = history
        self._tokens = Tokens(name, topic_id, str(self._keep))
        self._tick = 0
        self._newest: Micros = 0
        self._partitions: dict[int, _Partition] = {}
        # Both in the order of their last change: what somebody misses is at the end.
        self._held: dict[bytes, Held] = {}
        self._gone: dict[bytes, None] = {}
        # What was forgotten: nobody who stood before this can be told what was removed since.
        self._forgotten_tick = 0
        self._forgotten_offset: defaultdict[int, int] = defaultdict(int)
        self._forgotten_time: Micros | None = None
        self._last_snapshot: tuple[int, Message] | None = None
        self._last_changes: tuple[int, int, Message] | None = None

    def __len__(self) -> int:
        return len(self._held) - len(self._gone)

    @property
    def tick(self) -> int:
        """Grows with every change of the table."""
        return self._tick

    def positions(self) -> dict[int, int]:
        """Where reading the channel goes on."""
        return {number: partition.mark.offset for number, partition in self._partitions.items()}

    # --- what comes in ------------------------------------------------------------------------------------------------

    def push(self, entries: Iterable[Entry]) -> None:
        """Apply entries, in order within each partition. What is not newer, or was applied already, changes nothing."""
        for entry in entries:
            partition = self._partitions.get(entry.partition)
            if partition is None:
                begin = Mark(entry.offset, entry.appended)
                partition = self._partitions[entry.partition] = _Partition(begin, begin)
            if entry.offset < partition.mark.offset:
                continue
            self.taken += 1
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
        held = self._held.get(change.key)
        if held is not None:
            self._partitions[held.partition].keys.pop(change.key, None)
        if held is None or _newer(change, held):
            self.passed += 1
            self._settle(change, entry.partition, entry.offset, partition.mark.appended)
        else:
            if _gone_again(change, held.change):
                self.passed += 1
                held.change, held.evicted = change, False
            else:
                self.duplicate += 1
            # The row stays, but lives on from here: after a compaction this entry is the only one that is left.
            held.partition, held.offset, held.appended = entry.partition, entry.offset, partition.mark.appended
        if self._held[change.key].change.row is not None:
            partition.keys[change.key] = None

    def _settle(self, change: Change, partition: int, offset: int, appended: Micros, evicted: bool = False) -> None:
        self._tick += 1
        self._held.pop(change.key, None)
        self._gone.pop(change.key, None)
        self._held[change.key] = Held(change, self._tick, partition, offset, appended, evicted)
        if change.row is None:
            self._gone[change.key] = None

    def _evict(self) -> None:
        if self._keep is None:
            return
        horizon = self._newest - self._keep
        for partition in self._partitions.values():
            while partition.keys and (held := self._held[next(iter(partition.keys))]).appended < horizon:
                change = held.change
                del partition.keys[change.key]
                removed = Change(change.key, None, change.version, None)
                self._settle(removed, held.partition, held.offset, held.appended, evicted=True)

    def _forget(self) -> None:
        while len(self._gone) > self._history:
            key = next(iter(self._gone))
            del self._gone[key]
            held = self._held.pop(key)
            self._forgotten_tick = held.tick
            self._forgotten_offset[held.partition] = max(self._forgotten_offset[held.partition], held.offset + 1)
            if held.evicted:
                self._forgotten_time = max(self._forgotten_time or 0, held.appended)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Held | None:
        """The row of a key, in the spelling of `orjson.dumps`, and where it lies; None when there is none."""
        held = self._held.get(key)
        return held if held is not None and held.change.row is not None else None

    def position(self) -> str:
        return self._tokens.write({number: partition.mark for number, partition in self._partitions.items()})

    def join(self, token: str | None = None) -> Message:
        """What a client that stands at `token` misses; the whole table when that cannot be told."""
        position = self._tokens.read(token)
        if position is None or not self._covers(position):
            return self._snapshot()
        horizon = self._horizon(position)
        missed = [
            held.change
            for held in self._held.values()
            if held.offset >= position.get(held.partition, _START).offset or (held.evicted and held.appended >= horizon)
        ]
        return Message("changes", self.name, self.position(), missed)

    def since(self, tick: int) -> Message:
        """What a client misses that got everything up to `tick`."""
        if tick < self._forgotten_tick:
            return self._snapshot()
        if self._last_changes is None or self._last_changes[:2] != (tick, self._tick):
            missed: list[Change] = []
            for held in reversed(self._held.values()):
                if held.tick <= tick:
                    break
                missed.append(held.change)
            message = Message("changes", self.name, self.position(), missed[::-1])
            self._last_changes = (tick, self._tick, message)
        return self._last_changes[2]

    def _snapshot(self) -> Message:
        if self._last_snapshot is None or self._last_snapshot[0] != self._tick:
            rows = [held.change for held in self._held.values() if held.change.row is not None]
            self._last_snapshot = (self._tick, Message("snapshot", self.name, self.position(), rows))
        return self._last_snapshot[1]

    def _horizon(self, position: Position) -> Micros:
        """Rows whose last entry was appended before this were not in the table at that position."""
        return max((mark.appended for mark in position.values()), default=0) - (self._keep or 0)

    def _covers(self, position: Position) -> bool:
        """Whether all that was removed since is still known here."""
        if not position.keys() <= self._partitions.keys():
            return False
        for number, partition in self._partitions.items():
            # A partition that had no entry at that position is missed as a whole, if its beginning is still there.
            then, now = position.get(number, partition.begin), partition.mark
            away = now.appended - then.appended
            if number not in position and then.offset > 0:
                return False
            if then.offset > now.offset or then.offset < self._forgotten_offset[number]:
                return False
            if then.offset < now.offset and away > AWAY // _A_MICROSECOND:
                return False
        return self._forgotten_time is None or self._horizon(position) > self._forgotten_time


class Follower:
    """One client's way through a feed: `take` gives the next message, made of all that changed since the last."""

    def __init__(self, feed: Feed, token: str | None = None) -> None:
        self._feed = feed
        self._token = token
        self._tick: int | None = None

    def take(self) -> Message | None:
        """The next message, or None while there is nothing new. The first is always there."""
        tick, self._tick = self._tick, self._feed.tick
        if tick is None:
            return self._feed.join(self._token)
        return None if tick == self._feed.tick else self._feed.since(tick)


_START = Mark()


def _newer(change: Change, held: Held) -> bool:
    known = held.change
    if known.row is None and (change.row is None or held.evicted):
        # What was removed for its age is deleted nowhere: any entry brings it back.
        return change.row is not None
    return change.version is None or known.version is None or change.version > known.version


def _gone_again(change: Change, held: Change) -> bool:
    """Whether it is newer, and deletes what is deleted: clients have nothing to learn from it."""
    return change.row is held.row is None and (change.version or 0) > (held.version or 0)


def _parse(entry: Entry) -> Change:
    try:
        key = orjson.loads(entry.key or b"")
        row = None if entry.value is None else orjson.loads(entry.value)
    except orjson.JSONDecodeError as error:
        raise Refused("a result", f"it is not JSON: {error}") from error
    if not isinstance(key, list):
        raise Refused("a result", "its key is not an array of values")
    if row is not None and not isinstance(row, dict):
        raise Refused("a result", "its value is not an object")
    told = dict(entry.headers)
    # Written anew: on one line, and one key has one spelling.
    text = None if row is None else orjson.dumps(row)
    return Change(orjson.dumps(key), text, _number(told, "version"), _number(told, "time"))


def _number(headers: dict[str, bytes], name: str) -> int | None:
    value = headers.get(name)
    if not value:
        return None
    if not value.isdigit() or len(value) > 18:
        raise Refused("a result", f'its header "{name}" is not a whole number')
    return int(value)
