"""The writers of result channels: each row of a result has the token of the query that wrote it.

Before a query writes its first row, it announces its token in the channel of bookmarks. A row without an announced
token was written by something else. Rows before the first announcement are not checked.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unavailable
from penstock.core.record import Headers
from penstock.core.scan import scan

HEADER = "writer"
PREFIX = b"writer:"
"""Prefix of the keys of announcements in the channel of bookmarks."""
INTERNAL, BOOKMARKS, DEAD = "penstock.", ".bookmarks", ".dead"
_AGAIN = 1.0
"""Seconds between two reads of the bookmarks for an unknown writer."""
_REMEMBERED = 1_000
"""Maximum unannounced tokens that are kept."""


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
    """The end offsets of the channel when the token was announced."""

    @property
    def key(self) -> bytes:
        return PREFIX + f"{self.channel}:{self.token}".encode()

    def dumps(self) -> bytes:
        return _JSON.dump_json(self, exclude={"channel", "token"})

    @classmethod
    def of(cls, key: bytes, value: bytes) -> "Writer | None":
        """Parse an announcement; None if it cannot be parsed."""
        try:
            channel, _, token = key.removeprefix(PREFIX).decode().rpartition(":")
            return _JSON.validate_python({**json.loads(value), "channel": channel, "token": token})
        except (ValueError, TypeError, RecursionError):
            return None


_JSON = TypeAdapter(Writer)


class WriterTokens:
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
        # Of several announcements the lowest offset counts; a partition without an offset did not exist yet.
        first = self._first.get(writer.channel, writer.since)
        self._first[writer.channel] = {
            at: min(offset, first.get(at, offset)) for at, offset in {**writer.since, **first}.items()
        }

    def query(self, channel: str) -> str | None:
        """Return the query that writes a channel; None if it is not known."""
        return self._queries.get(channel)

    def tokens(self, channel: str) -> Collection[bytes]:
        return self._tokens.get(channel, ())

    def first(self, channel: str) -> Offsets:
        """Return the offsets from which rows must have a token."""
        return self._first.get(channel, {})

    def genuine(self, entry: Entry) -> bool:
        """Whether a writer of its channel has written this row, or it is older than the first announcement."""
        tokens = self._tokens.get(entry.channel)
        if not tokens:
            return True
        token = token_of(entry.headers)
        if token is None:
            return entry.offset < self._first[entry.channel].get(entry.partition, 0)
        return token in tokens

    def strange(self, entry: Entry) -> bool:
        """Whether later announcements can change the result of `genuine` for this row."""
        tokens, token = self._tokens.get(entry.channel), token_of(entry.headers)
        return token not in tokens if tokens and token is not None else not tokens


class Writers:
    """The announced writers, read from the bookmarks when a row of an unknown writer arrives."""

    def __init__(self, channels: Channels, bookmarks: Collection[str], clock: Clock | None = None) -> None:
        self.known = WriterTokens()
        self._channels, self._clock = channels, clock or SystemClock()
        self._read: dict[str, Offsets] = {name: {} for name in bookmarks}
        self._looked: float | None = None
        self._unknown: set[bytes] = set()

    def refresh(self) -> None:
        """Read the announcements since the last call."""
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
        """Return the entries without the forged rows; `among` decides which channels are results."""
        self.learn(entries, among)
        return [entry for entry in entries if not among(entry.channel) or self.known.genuine(entry)]

    def learn(self, entries: Sequence[Entry], among: Callable[[str], bool] = lambda _: True) -> None:
        """Read announcements if one of these rows has an unknown writer.

        A query announces its token before it writes a row: after this call, each genuine row is recognized.
        """
        strange = [entry for entry in entries if among(entry.channel) and self.known.strange(entry)]
        if not strange:
            return
        # A new token needs a read; for other rows a recent read is enough.
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
    """Return why a channel must not be written to by hand, and what to do instead; None if it may be."""
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
