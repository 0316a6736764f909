"""The binders that the contract suite runs over. A new one adds how it is opened, and its line in CASES.

What a binder does not promise is not asked of it: the lists below are built from what its line says, and a test holds
the line against the promise of the binder itself.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from tests.channels.servers import KafkaServer
from tests.ports import later_port
from tests.servers import RedisServer

from penstock.channels.kafka import Kafka
from penstock.channels.kafka.settings import KafkaSettings
from penstock.channels.memory import MemoryChannels
from penstock.channels.redis import RedisChannels
from penstock.channels.sqlite import SqliteChannels
from penstock.channels.tcp import Tcp
from penstock.core.clock import Micros, SystemClock
from penstock.core.contracts import Channels
from penstock.core.record import Record

LEASE = timedelta(seconds=2)
"""For binders that deal partitions by `channels/leases.py`: give them this lease, so that groups settle quickly.

`LeasedConsumer(…, lease=…)` takes it; a binder takes it as an argument and keeps it when it is pickled.
"""


def pass_by() -> None:
    time.sleep(0.35)


@dataclass(frozen=True)
class Bound:
    """A binder that is open for one test."""

    channels: Channels
    restart: Callable[[], None] | None = None
    """Kill -9 what serves it, and start that again."""
    keep: timedelta = timedelta(milliseconds=300)
    """A retention that a test can bring about."""
    retire: Callable[[str], None] = lambda _channel: pass_by()
    """Let what a channel holds become older than `keep`; it may be gone at once, or with one of the next sends."""
    compaction: Mapping[str, str] = field(default_factory=dict)
    """The settings of a channel that is compacted soon."""
    never: Record = field(default_factory=lambda: Record(b"", extra=(("\ud800", b""),)))
    """What no channel of it takes; without more, a header whose name is no text."""
    mature: Callable[[str], None] = lambda _channel: None
    """Let what a channel holds become old enough to be compacted, with one of the next sends or soon after."""


@dataclass(frozen=True)
class Case:
    name: str
    opened: Callable[[pytest.FixtureRequest], AbstractContextManager[Bound]]
    durable: bool = True
    replay: bool = True
    pickled: bool = True
    killable: bool = False
    """There is a server, and `Bound.restart` kills it."""
    refuses: bool = True
    """There are records that it never takes: `Bound.never`."""
    compacts: bool = True
    """Compaction can be brought about by `Bound.mature`."""


# --- memory


class Shifted(SystemClock):
    """The system's time, which a test can let jump."""

    def __init__(self) -> None:
        self.shift: Micros = 0

    def now(self) -> Micros:
        return super().now() + self.shift


@contextmanager
def memory(_: pytest.FixtureRequest) -> Iterator[Bound]:
    clock, keep = Shifted(), timedelta(hours=2)

    def later(_: str) -> None:
        clock.shift += round(keep.total_seconds() * 1e6)

    yield Bound(MemoryChannels(None, clock, LEASE), keep=keep, retire=later, mature=later)


# --- kafka


@contextmanager
def kafka(request: pytest.FixtureRequest) -> Iterator[Bound]:
    server: KafkaServer = request.getfixturevalue("kafka_server")
    quickly = KafkaSettings(conf={"max.poll.interval.ms": "2500"})
    yield Bound(
        Kafka(server.servers, quickly),
        server.restart,
        timedelta(hours=1),
        server.retire,
        {"segment.ms": "50", "min.cleanable.dirty.ratio": "0.01", "max.compaction.lag.ms": "100"},
        Record(os.urandom(1_500_000)),
    )


# --- redis


@contextmanager
def redis(request: pytest.FixtureRequest) -> Iterator[Bound]:
    server: RedisServer = request.getfixturevalue("shared_redis")
    soon = {"compaction.lag": "100 ms", "deletions.keep": "100 ms"}
    yield Bound(RedisChannels(server.url, LEASE), server.restart, compaction=soon)


# --- files


@contextmanager
def files(request: pytest.FixtureRequest) -> Iterator[Bound]:
    folder: Path = request.getfixturevalue("tmp_path")
    yield Bound(SqliteChannels(folder / "channels", lease=LEASE), compaction={"compact.after": "100 ms"})


# --- tcp


@contextmanager
def tcp(_: pytest.FixtureRequest) -> Iterator[Bound]:
    yield Bound(Tcp("127.0.0.1", later_port()))


CASES = [
    Case("memory", memory, durable=False, pickled=False, refuses=False),
    Case("kafka", kafka, killable=True),
    Case("files", files),
    Case("redis", redis, killable=True),
    Case("tcp", tcp, durable=False, replay=False),
]

REPLAYED = [case for case in CASES if case.replay]
DURABLE = [case for case in CASES if case.durable and case.replay]
KILLABLE = [case for case in CASES if case.killable]
COMPACTING = [case for case in CASES if case.compacts and case.replay]
REFUSING = [case for case in CASES if case.refuses]
PICKLED = [case for case in CASES if case.pickled]


def over(cases: list[Case]) -> pytest.MarkDecorator:
    """Run a test with each of these binders, as its `bound`."""
    return pytest.mark.parametrize("bound", cases, ids=lambda case: case.name, indirect=True)
