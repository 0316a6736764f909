"""Channels over TCP, with nothing between: a reader listens at the address, and senders connect to it.

A channel over TCP is a line, not a log. It has one reader at a time and one partition; offsets count from the start of
its reader. Within the lives of both ends, each record arrives once and in order, whatever happens to the connections.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn
from urllib.parse import urlsplit

from penstock.channels.tcp.receiving import Inbox, TcpReader, listening
from penstock.channels.tcp.sending import TcpSender, posting, sending
from penstock.core.clock import Micros, SystemClock
from penstock.core.contracts import (
    ChannelPartition,
    EnsureResult,
    Group,
    Member,
    Offsets,
    Promise,
    RebalanceListener,
    Topic,
)
from penstock.core.errors import Misconfigured

_PROMISE = Promise(
    durable=False,
    replay=False,
    description="a record is acknowledged once the process that reads has it in its memory; it is read once, by that "
    "one process, and what it has not dealt with when its reader ends, or it dies, is lost",
)
_NOTHING_KEPT = timedelta(0)
_OTHERS = "use kafka://, redis:// or file://"


def at(address: str, _: object = None) -> "Tcp":
    """`tcp://host:port`; an IPv6 address in brackets."""
    fix = "write tcp://host:port, with a port from 1 to 65535"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # As whoever looks the name up will spell it.
    except ValueError as error:
        raise Misconfigured(f"channels at {address}", str(error), fix) from error
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise Misconfigured(f"channels at tcp://{host}", "it tells more than a host and a port", fix)
    if not host or not port:
        raise Misconfigured(f"channels at {address}", f"it tells no {'port' if host else 'host'}", fix)
    return Tcp(host, port)


@dataclass(frozen=True, slots=True)
class Tcp:
    """The binder. A sender that reaches nobody for `patience` seconds gives up."""

    host: str
    port: int
    patience: float = 30.0

    @property
    def promise(self) -> Promise:
        return _PROMISE

    @property
    def where(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    # --- topics: there is nothing to make, and nothing that stays

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        return EnsureResult(differences=tuple(sentence for topic in topics for sentence in _differences(topic)))

    def names(self) -> list[str]:
        """None: a channel is there while it is read, and only its reader and its senders know of it."""
        return []

    def topic(self, channel: str) -> Topic:
        return Topic(channel, partitions=1, replicas=1, retention=_NOTHING_KEPT)

    def topic_id(self, channel: str) -> str:
        self._cannot(channel, "one channel cannot be told from another that had its name before")

    def remove(self, channel: str) -> None:
        self._cannot(channel, "there is nothing to remove")

    # --- in

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[TcpSender]:
        """A sender that need not find a reader yet: `send` waits for one, and raises Unavailable when none comes."""
        async with sending(self.host, self.port, self.where, self.patience, SystemClock()) as sender:
            yield sender

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        return posting(self.sender)

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], linger: float = 0.0, only: Collection[ChannelPartition] | None = None
    ) -> Iterator[TcpReader]:
        """Listen, and read what comes from now on. Misconfigured when somebody else listens there already."""
        for channel, positions in start.items():
            if any(positions.values()):
                self._cannot(channel, f"reading cannot begin at offset {max(positions.values())}, only now")
        inbox = Inbox((name for name in start if only is None or (name, 0) in only), SystemClock())
        with listening(self.host, self.port, self.where, inbox):
            yield TcpReader(inbox)

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        """Nothing is kept, and the next reader counts from zero."""
        return {0: (0, 0)}

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        self._cannot(channel, "reading cannot begin in the past, only now")

    # --- groups

    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> AbstractContextManager[Member]:
        self._cannot(", ".join(channels), f"no group ({group}) can share what has one partition and one reader")

    def groups(self) -> list[str]:
        self._cannot("groups", "there are none")

    def group(self, name: str) -> Group:
        self._cannot(f"group {name}", "there are no groups")

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        self._cannot(f"group {group}", "there are no groups, and no positions to write down")

    def _cannot(self, what: str, why: str) -> NoReturn:
        raise Misconfigured(f"{what} at {self.where}", f"tcp:// keeps nothing: {why}", _OTHERS)


def _differences(topic: Topic) -> Iterator[str]:
    if topic.partitions > 1:
        yield f"channel {topic.name} has one partition over tcp://, and {topic.partitions} are declared"
    if topic.replicas is not None and topic.replicas > 1:
        yield f"channel {topic.name} has no replicas over tcp://, and {topic.replicas} are declared"
    if topic.retention is not None:
        yield f"channel {topic.name} keeps nothing over tcp://, and {topic.retention} is declared"
    if topic.compacted:
        yield f"channel {topic.name} keeps nothing over tcp://, and the last record of each key is declared to stay"
    if topic.config:
        yield f"channel {topic.name} has no settings over tcp://, and {', '.join(sorted(topic.config))} is declared"
