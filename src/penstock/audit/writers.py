"""The writers of result channels: each row of a result carries the token of the query that wrote it.

Before a query writes its first row, it announces its token in the channel of bookmarks. A row without a token that was
announced for its channel was written by something else. Rows that lie before the first announcement are older than
tokens, and are not judged.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unavailable
from penstock.core.record import Headers
from penstock.core.scan import scan

HEADER = "writer"
PREFIX = b"writer:"
"""How the keys of announcements begin, in the channel of bookmarks."""
INTERNAL, BOOKMARKS, DEAD = "penstock.", ".bookmarks", ".dead"
_AGAIN = 1.0
"""Seconds between two looks at the bookmarks for a writer that is not known."""
_REMEMBERED = 1_000
"""So many tokens that nobody announced are remembered."""


@dataclass(frozen=True, slots=True)
class Writer:
    """One generation of a query, as the writer of its result."""

    channel: str
    token: str
    query: str
    generation: int
    topic: str
    """The id of the topic."""
    since: Offsets
    """Where the channel ended when the token was announced."""

    @property
    def key(self) -> bytes:
        return PREFIX + f"{self.channel}:{self.token}".encode()

    def dumps(self) -> bytes:
        told = {"query": self.query, "generation": self.generation, "topic": self.topic, "since": self.since}
        return json.dumps(told).encode()

    @classmethod
    def of(cls, key: bytes, value: bytes) -> "Writer | None":
        """None when it cannot be read."""
        try:
            channel, _, token = key.removeprefix(PREFIX).decode().rpartition(":")
            told: Mapping[str, Any] = json.loads(value)
            since = {int(partition): int(offset) for partition, offset in told["since"].items()}
            return cls(channel, token, str(told["query"]), int(told["generation"]), str(told["topic"]), since)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


class KnownWriters:
    """The writers of each channel. No I/O."""

    def __init__(self, writers: Iterable[Writer] = ()) -> None:
        self._tokens: dict[str, set[bytes]] = {}
        self._first: dict[str, dict[int, int]] = {}
        self._queries: dict[str, str] = {}
        for writer in writers:
            self.add(writer)

    def add(self, writer: Writer) -> None:
        self._queries[writer.channel] = writer.query
        self._tokens.setdefault(writer.channel, set()).add(writer.token.encode())
        # Of several announcements, the lowest offset counts; a partition that one does not name was not there yet.
        first = self._first.get(writer.channel, writer.since)
        self._first[writer.channel] = {
            at: min(offset, first.get(at, offset)) for at, offset in {**writer.since, **first}.items()
        }

    def query(self, channel: str) -> str | None:
        """The query that writes a channel; None when no query is known to."""
        return self._queries.get(channel)

    def tokens(self, channel: str) -> Collection[bytes]:
        return self._tokens.get(channel, ())

    def first(self, channel: str) -> Offsets:
        """Where the rows begin that have to carry a token."""
        return self._first.get(channel, {})

    def genuine(self, entry: Entry) -> bool:
        """Whether a writer of its channel has written this row, or it is older than tokens."""
        tokens = self._tokens.get(entry.channel)
        if not tokens:
            return True
        token = token_of(entry.headers)
        if token is None:
            return entry.offset < self._first[entry.channel].get(entry.partition, 0)
        return token in tokens

    def strange(self, entry: Entry) -> bool:
        """Whether this row could be judged otherwise once more announcements are read."""
        tokens, token = self._tokens.get(entry.channel), token_of(entry.headers)
        return token not in tokens if tokens and token is not None else not tokens


class Writers:
    """The announced writers, read from channels of bookmarks whenever a row of an unknown writer comes."""

    def __init__(self, channels: Channels, bookmarks: Collection[str], clock: Clock | None = None) -> None:
        self.known = KnownWriters()
        self._channels, self._clock = channels, clock or SystemClock()
        self._read: dict[str, Offsets] = {name: {} for name in bookmarks}
        self._looked: float | None = None
        self._unknown: set[bytes] = set()

    def refresh(self) -> None:
        """Read what was announced since the last call."""
        self._looked = self._clock.elapsed()
        for bookmarks, start in self._read.items():
            bounds = self._channels.bounds(bookmarks)
            for entry in scan(self._channels, bookmarks, start, bounds):
                if entry.key is None or not entry.key.startswith(PREFIX) or entry.value is None:
                    continue
                writer = Writer.of(entry.key, entry.value)
                if writer is not None and self._same_topic(writer):
                    self.known.add(writer)
            self._read[bookmarks] = {partition: end for partition, (_, end) in bounds.items()}

    def genuine(self, entries: Sequence[Entry], among: Callable[[str], bool] = lambda _: True) -> list[Entry]:
        """The entries without the forged rows; `among` tells which channels are results."""
        self.learn(entries, among)
        return [entry for entry in entries if not among(entry.channel) or self.known.genuine(entry)]

    def learn(self, entries: Sequence[Entry], among: Callable[[str], bool] = lambda _: True) -> None:
        """Look for announcements if one of these rows is of a writer that is not known.

        A query announces its token before it writes a row: after this, every genuine row is known as one.
        """
        strange = [entry for entry in entries if among(entry.channel) and self.known.strange(entry)]
        if not strange:
            return
        # A token that is seen for the first time needs a look of its own; other rows not if there was one just now.
        new = {token for entry in strange if (token := token_of(entry.headers)) is not None} - self._unknown
        lately = self._looked is not None and self._clock.elapsed() - self._looked < _AGAIN
        if new or not lately:
            self.refresh()
            self._unknown = new if len(self._unknown) > _REMEMBERED else self._unknown | new

    def _same_topic(self, writer: Writer) -> bool:
        try:
            return writer.topic in ("", self._channels.topic_id(writer.channel))
        except Unavailable:
            return False


def token_of(headers: Headers) -> bytes | None:
    return next((value for name, value in headers if name == HEADER), None)


def protected(channel: str, channels: Channels) -> tuple[str, str] | None:
    """Why nobody may write to a channel by hand, and what to do instead; None when it may be written to."""
    if channel.startswith(INTERNAL):
        why = "it is an internal channel: the processes of a pipeline write to it"
        return why, "write to a channel of your own"
    if channel.endswith(DEAD):
        source = channel.removesuffix(DEAD)
        return f"it holds the dead letters of {source}", f"write to {source}; penstock dlq redrive sends them again"
    if not channels.promise.replay:
        return None
    names = [name for name in channels.names() if name.startswith(INTERNAL) and name.endswith(BOOKMARKS)]
    writers = Writers(channels, names)
    writers.refresh()
    if (query := writers.known.query(channel)) is None:
        return None
    return f"it is the result of query {query}, its only writer", f"write to a channel that {query} reads"
