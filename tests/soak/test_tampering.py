"""Stores and results harmed at random while records flow: each harm is named, within the time, and nothing else is."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import redis
from deltalake import DeltaTable
from tests.soak.sizes import HARMS as CASES
from tests.soak.sizes import figure
from tests.stores.lakes import LoadedLake
from tests.stores.tampering import Harm, LakeTampering, RedisTampering

from penstock.audit.auditor import Auditor
from penstock.audit.balance import Balance, balance
from penstock.audit.findings import Kind, Watched
from penstock.audit.judge import Report, Verdict
from penstock.audit.ledger import Ledger
from penstock.audit.reconcile import Reconciler, RecordCheck, TableCheck
from penstock.audit.writers import Writers
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.record import Origin
from penstock.run.accounts import announce
from penstock.stores.lake import LakeStore
from penstock.stores.lake_rows import LakeRows
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore
from penstock.testing import MemoryChannels

WITHIN = 30.0
THINGS, RESULT, BOOKMARKS, BEATS = "things", "totals", "penstock.t.bookmarks", "penstock.t.heartbeats"
TABLE, LAKE = f"store:redis/{RESULT}", f"store:delta/{THINGS}"
WATCHED = [Watched(THINGS, Kind.SOURCE), Watched(RESULT, Kind.RESULT, ("query:q",))]
HARMS = [
    (TABLE, "missing"),
    (TABLE, "changed"),
    *((LAKE, kind) for kind in LakeTampering.KINDS),
    (f"channel:{RESULT}", "forged"),
]


@dataclass
class Flow:
    """A source channel in a lake, its result in a live table, and the audit of both, while records come."""

    folder: Path
    url: str
    channels: MemoryChannels = field(default_factory=lambda: MemoryChannels(None))
    stop: threading.Event = field(default_factory=threading.Event)
    number: int = 0
    forged: int = 0

    def __post_init__(self) -> None:
        self.channels.ensure([Topic(THINGS, 2), Topic(RESULT, 2), Topic(BOOKMARKS), Topic(BEATS)])
        announce(self.channels, BOOKMARKS, "q", RESULT, "a1b2c3d4", 0)
        self.client = redis.Redis.from_url(self.url)
        self.clock, self.ledger = SystemClock(), Ledger(self.folder / "ledger.db")
        often = timedelta(milliseconds=50)
        self.lake = LoadedLake(
            LakeStore(str(self.folder / "lake"), THINGS, compact_every=10_000), typed=True, every=often
        )
        self.table = RedisStore(self.url, RESULT, every=often)
        self.auditor = Auditor(self.channels, self.ledger, WATCHED, BEATS, bookmarks=BOOKMARKS)
        lake_rows, writers = LakeRows(self.lake.path, THINGS), Writers(self.channels, [BOOKMARKS])
        self.reconciler = Reconciler(
            [
                lambda: RecordCheck(LAKE, THINGS, lake_rows, self.channels),
                lambda: TableCheck(TABLE, RESULT, self.table.open(), self.channels, self.clock, writers),
            ],
            [LAKE, TABLE],
        )
        loading = (
            Loader(self.channels, THINGS, self.lake),
            Loader(self.channels, RESULT, self.table, writers=Writers(self.channels, [BOOKMARKS])),
        )
        self.threads = [threading.Thread(target=one.run, args=(self.stop,)) for one in loading]
        for thread in self.threads:
            thread.start()

    def go_on(self) -> None:
        """Some more records, and rows of keys that come once."""
        for _ in range(20):
            self.number += 1
            value, seen = b'{"n": %d}' % self.number, self.number
            self.channels.append(THINGS, value, b"k", Origin("s", 1, seen, self.clock.now()).headers())
            told = [("writer", b"a1b2c3d4"), ("version", b"1")]
            self.channels.append(RESULT, value, b'["%d"]' % seen, told)

    def judged(self) -> Balance:
        self.go_on()
        while self.auditor.step(0):
            pass
        self.reconciler.turn()
        found = balance(self.ledger.content(), self.clock.now())
        return found.with_report(Report(found.at, False, self.reconciler.discrepancies, self.reconciler.doubts))

    def stored(self) -> bool:
        """Whether both stores hold rows that can be harmed."""
        lake = DeltaTable.is_deltatable(self.lake.path) and DeltaTable(self.lake.path).count() > 0
        return lake and any(self.client.scan_iter(f"penstock:{RESULT}:row:*"))

    def harm(self, stage: str, kind: str, chance: random.Random) -> Harm:
        if stage == TABLE:
            return RedisTampering(self.client, RESULT).harm(kind, chance)
        if stage == LAKE:
            return LakeTampering(self.lake.path).harm(kind, chance)
        self.channels.append(RESULT, b"{}", b'["forged"]', [("version", b"999999")])
        self.forged += 1
        return Harm(kind, "", lambda: None)

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        self.auditor.close()
        self.reconciler.close()
        self.ledger.close()
        self.client.close()


@pytest.fixture
def flow(redis_url: str, tmp_path: Path) -> Iterator[Flow]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    flow = Flow(tmp_path, redis_url)
    yield flow
    flow.close()


def until(flow: Flow, found: Callable[[Balance], bool]) -> float:
    began = time.monotonic()
    while not found(flow.judged()):
        assert time.monotonic() - began < WITHIN
        time.sleep(0.05)
    return time.monotonic() - began


def named(found: Balance, stage: str, harm: Harm, count: int) -> bool:
    """Whether a harm is among the findings, with its name."""
    return found.verdict is Verdict.MISSING and any(
        (one.stage, one.kind, one.count) == (stage, harm.kind, count)
        and any(harm.name in name for name in one.examples)
        for one in found.discrepancies
    )


def test_each_harm_is_named_in_time(flow: Flow) -> None:
    chance, longest = random.Random(CASES), 0.0
    began = time.monotonic()
    while flow.number < 200 or not flow.stored():
        assert flow.judged().verdict is not Verdict.MISSING
        assert time.monotonic() - began < WITHIN
    until(flow, lambda found: found.verdict is Verdict.WHOLE)
    for case in range(CASES):
        stage, kind = HARMS[case % len(HARMS)] if case < len(HARMS) else chance.choice(HARMS)
        harm = flow.harm(stage, kind, chance)
        count = flow.forged if kind == "forged" else harm.count
        longest = max(longest, until(flow, partial(named, stage=stage, harm=harm, count=count)))
        # Nothing else is found, and what is mended is no finding any more. A forged row stays in its channel.
        lasting = {("channel:totals", "forged")} if flow.forged else set()
        found = {(one.stage, one.kind) for one in flow.judged().discrepancies}
        # Each harm to a lake is a commit of its own.
        assert found == lasting | {(stage, kind)} | ({(LAKE, "changed")} if stage == LAKE else set())
        harm.heal()
        until(flow, partial(left, lasting=lasting))
    figure(f"{CASES} harms to stores and results", f"each named, the slowest after {longest:.1f} s")


def left(found: Balance, lasting: set[tuple[str, str]]) -> bool:
    return {(one.stage, one.kind) for one in found.discrepancies} == lasting
