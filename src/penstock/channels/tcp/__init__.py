"""Channels over TCP without a server: the reader listens at the address, and senders connect to it.

Such a channel keeps nothing. It has one reader at a time and one partition, whose offsets begin with each reader at 0.
While both processes run, each record arrives once and in order, even if connections break.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn
from urllib.parse import urlsplit

from penstock.channels.common import posting
from penstock.channels.tcp.reader import Inbox, TcpReader, listening
from penstock.channels.tcp.sender import TcpSender, sending
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
    description="a record is acknowledged once the reading process has it in memory; that process reads it once, and "
    "records that it has not handled when it ends are lost",
)
_NOTHING_KEPT = timedelta(0)
_OTHERS = "use kafka://, redis:// or file://"


def at(address: str, _: object = None) -> "Tcp":
    """`tcp://host:port`; an IPv6 address in brackets."""
    fix = "write tcp://host:port, with a port from 1 to 65535"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # Raises for a name that cannot be looked up.
    except ValueError as error:
        raise Misconfigured(f"channels at {address}", str(error), fix) from error
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise Misconfigured(f"channels at tcp://{host}", "it has more than a host and a port", fix)
    if not host or not port:
        raise Misconfigured(f"channels at {address}", f"it has no {'port' if host else 'host'}", fix)
    return Tcp(host, port)


@dataclass(frozen=True, slots=True)
class Tcp:
    """A sender that reaches no reader for `timeout` seconds fails."""

    host: str
    port: int
    timeout: float = 30.0

    @property
    def promise(self) -> Promise:
        return _PROMISE

    @property
    def where(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    # --- topics

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        return EnsureResult(differences=tuple(sentence for topic in topics for sentence in _differences(topic)))

    def names(self) -> list[str]:
        """None: only its reader and its senders know a channel."""
        return []

    def topic(self, channel: str) -> Topic:
        return Topic(channel, partitions=1, replicas=1, retention=_NOTHING_KEPT)

    def topic_id(self, channel: str) -> str:
        self._cannot(channel, "a channel has no identity")

    def remove(self, channel: str) -> None:
        self._cannot(channel, "there is nothing to remove")

    # --- in

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[TcpSender]:
        """A sender. `send` waits for a reader, and raises Unavailable if none appears."""
        async with sending(self.host, self.port, self.where, self.timeout, SystemClock()) as sender:
            yield sender

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        return posting(self.sender)

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], linger: float = 0.0, only: Collection[ChannelPartition] | None = None
    ) -> Iterator[TcpReader]:
        """Listen, and read what arrives from now on. Misconfigured if the address is in use."""
        for channel, positions in start.items():
            if any(positions.values()):
                self._cannot(channel, f"reading cannot begin at offset {max(positions.values())}, only at the end")
        inbox = Inbox((name for name in start if only is None or (name, 0) in only), SystemClock())
        with listening(self.host, self.port, self.where, inbox):
            yield TcpReader(inbox)

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        """Nothing is kept, and each reader begins at offset 0."""
        return {0: (0, 0)}

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        self._cannot(channel, "reading cannot begin in the past, only at the end")

    # --- groups

    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> AbstractContextManager[Member]:
        self._cannot(", ".join(channels), f"it has one partition and one reader, and no groups ({group})")

    def groups(self) -> list[str]:
        self._cannot("groups", "there are none")

    def group(self, name: str) -> Group:
        self._cannot(f"group {name}", "there are no groups")

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        self._cannot(f"group {group}", "there are no groups and no offsets to commit")

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
