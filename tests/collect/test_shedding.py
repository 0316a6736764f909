"""What is dropped when there is too much: what was declared, counted, and nothing else."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from tests.collect.waiting import until

from penstock.audit.account import Outcome
from penstock.audit.balance import balance
from penstock.audit.findings import Kind, Watched, reduced
from penstock.audit.hops import Hop
from penstock.audit.ledger import Ledger
from penstock.collect.dedup import shed_numbers, shed_records
from penstock.collect.ingest import ARRIVAL_OVERHEAD, IngestLoop
from penstock.collect.shedding import MAX_BYTES, Shed, Shedding, ShedPolicy
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Heartbeat, Origin, OutageInterval
from penstock.testing import ManualClock, MemoryChannels


def arrivals(count: int, **fields: Sequence[object]) -> list[Arrival]:
    return [
        Arrival(orjson.dumps({"n": n, **{name: values[n % len(values)] for name, values in fields.items()}}))
        for n in range(count)
    ]


def kept(found: Sequence[object]) -> list[Arrival]:
    return [one for one in found if isinstance(one, Arrival) and not one.shed]


def in_a_second(deciding: ShedPolicy, clock: ManualClock, some: Sequence[Arrival], lag: int = 0) -> list[Arrival]:
    """These come spread over a second; those that pass."""
    found: list[Arrival] = []
    for one in some:
        clock.move(1 / len(some))
        found += kept(deciding.decide([one], lag))
    return found


def test_below_the_rate_all_pass() -> None:
    clock = ManualClock()
    deciding = ShedPolicy(Shed("random", rate=1_000), clock)
    for _ in range(5):
        assert len(in_a_second(deciding, clock, arrivals(900))) == 900


def test_above_it_so_many_pass_as_the_rate_says() -> None:
    clock = ManualClock()
    deciding = ShedPolicy(Shed("random", rate=1_000, seed=1), clock)
    in_a_second(deciding, clock, arrivals(10_000))
    for _ in range(5):
        assert 950 <= len(in_a_second(deciding, clock, arrivals(10_000))) <= 1_050


def test_the_important_pass_first() -> None:
    clock, levels = ManualClock(), ["error", "info", "debug", "info", "debug"]
    deciding = ShedPolicy(Shed("priority", rate=1_000, field="level", order=("error", "info")), clock)
    for _ in range(3):
        found = in_a_second(deciding, clock, arrivals(4_000, level=levels))
    counted = Counter(orjson.loads(one.value)["level"] for one in found)
    assert counted["error"] == 800
    assert counted["debug"] == 0
    assert 150 <= counted["info"] <= 250


def test_of_a_key_all_pass_or_none() -> None:
    clock, names = ManualClock(), [f"key-{n}" for n in range(100)]
    deciding = ShedPolicy(Shed("key", rate=1_000, field="name"), clock)
    for _ in range(5):
        found = in_a_second(deciding, clock, arrivals(4_000, name=names))
    counted = Counter(orjson.loads(one.value)["name"] for one in found)
    whole = sum(count == 40 for count in counted.values())
    # Only those at the border come and go.
    assert 18 <= whole <= 28
    assert len(counted) - whole <= 8
    assert 900 <= len(found) <= 1_100


def test_with_a_lag_fewer_and_fewer_pass() -> None:
    deciding = ShedPolicy(Shed("random", lag=1_000, seed=3), ManualClock())
    shares = [len(kept(deciding.decide(arrivals(1_000), lag))) for lag in (0, 1_000, 1_250, 1_500, 1_750, 2_000, 9_000)]
    assert shares[:2] == [1_000, 1_000]
    assert shares[5:] == [0, 0]
    assert shares == sorted(shares, reverse=True)
    assert 430 <= shares[3] <= 570


def test_what_is_no_record_or_refused_already_is_never_dropped() -> None:
    deciding = ShedPolicy(Shed("random", lag=1), ManualClock())
    some: list[Arrival | Heartbeat | OutageInterval] = [Heartbeat("a", 1, 1, 1), Arrival(b"x", refused="it is bad")]
    assert deciding.decide(some, 1_000) == some


@dataclass
class Outside:
    """A source that gives what is asked of it, and hears what was settled."""

    some: Sequence[Sequence[Arrival | Heartbeat]]
    pause: float = 0
    name: str = "outside"
    description: str = "of a test"
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    given: int = 0
    settled: list[Exception | None] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        yield self._intakes()

    async def _intakes(self) -> AsyncIterator[Intake]:
        for some in self.some:
            await asyncio.sleep(self.pause)
            self.given += 1
            yield Intake(some, self._settle)

    async def _settle(self, error: Exception | None) -> None:
        self.settled.append(error)


async def test_the_oldest_that_wait_are_dropped_and_the_newest_pass() -> None:
    outside = Outside([[one] for one in arrivals(100)])
    async with Shedding(outside, Shed("oldest", lag=10)).open(ResumeState()) as intakes:
        await until(lambda: outside.given == 100)
        found = [intake async for intake in intakes]
    assert [one.value for intake in found for one in kept(intake.arrivals)] == [one.value for one in arrivals(100)[90:]]
    assert sum(len(intake.arrivals) for intake in found) == 100
    assert all(
        not arrival.value for intake in found[:90] for arrival in intake.arrivals if isinstance(arrival, Arrival)
    )


async def test_what_is_on_its_way_counts_as_lag() -> None:
    outside = Outside([[one] for one in arrivals(40)])
    async with Shedding(outside, Shed("random", lag=10)).open(ResumeState()) as intakes:
        found = [await anext(intakes) for _ in range(40)]
        passed = sum(len(kept(intake.arrivals)) for intake in found)
        assert 10 <= passed <= 20
        for intake in found:
            await intake.settle(None)
    assert outside.settled == [None] * 40


async def test_the_lag_of_those_who_read_counts_as_well() -> None:
    outside = Outside([[one] for one in arrivals(40)])
    async with Shedding(outside, Shed("random", lag=10), lambda: 1_000).open(ResumeState()) as intakes:
        assert not [one async for intake in intakes for one in kept(intake.arrivals)]


async def test_when_nothing_is_dropped_the_source_waits() -> None:
    """Memory is bounded, whatever the lag allows."""
    outside = Outside([[Arrival(b"x" * (8 << 20))] for _ in range(100)])
    async with Shedding(outside, Shed("random", lag=1_000_000)).open(ResumeState()) as intakes:
        before = -1
        while outside.given != before:
            before = outside.given
            await asyncio.sleep(0.05)
        assert outside.given <= 10
        count = 0
        async for _ in intakes:
            count += 1
        assert count == 100


async def test_what_breaks_the_source_is_raised_after_what_came_before() -> None:
    class Broken(Outside):
        async def _intakes(self) -> AsyncIterator[Intake]:
            yield Intake([Arrival(b"x")], self._settle)
            raise ConnectionError("gone")

    found: list[Arrival] = []

    async def hear() -> None:
        async with Shedding(Broken([]), Shed("random", lag=10)).open(ResumeState()) as intakes:
            async for intake in intakes:
                found.extend(kept(intake.arrivals))

    with pytest.raises(ConnectionError, match="gone"):
        await hear()
    assert [one.value for one in found] == [b"x"]


async def pumped(source: Source) -> tuple[MemoryChannels, IngestLoop]:
    channels = MemoryChannels(2)
    pump = IngestLoop(source, "into", channels, heartbeats="heartbeats", bookmarks="bookmarks")
    await pump.run(asyncio.Event())
    return channels, pump


def audited(channels: MemoryChannels, path: Path) -> Hop:
    names = {"into": Kind.SOURCE, "into.dead": Kind.DEAD}
    ledger = Ledger(path)
    ledger.watch([Watched(name, kind, ("source:outside",)) for name, kind in names.items()])
    entries = [entry for name in (*names, "heartbeats", "bookmarks") for entry in channels.entries(name)]
    ends = {name: {p: end for p, (_, end) in channels.bounds(name).items()} for name in (*names, "heartbeats")}
    ledger.merge(reduced(entries, {}, ends, names, "heartbeats", "bookmarks"), 10**15)
    found = balance(ledger.content(), 2 * 10**15)
    ledger.close()
    return found.hops[0]


@pytest.mark.parametrize("numbered", [True, False])
async def test_each_that_was_dropped_is_counted_as_shed_and_the_balance_closes(numbered: bool, tmp_path: Path) -> None:
    given = [
        Arrival(b'{"n":%d}' % n, Origin(f"s{n % 3}", 1, n // 3 + 1, 1_000) if numbered else None) for n in range(3_000)
    ]
    last = [Heartbeat(f"s{n}", 1, 1_000, 1_000) for n in range(3)] if numbered else []
    outside = Outside([*([one] for one in given), last])
    channels, pump = await pumped(Shedding(outside, Shed("random", rate=100, seed=5)))
    shed = int(str(pump.figures()["shed"]))
    assert 1_000 < shed < 3_000
    hop = audited(channels, tmp_path / "ledger.db")
    assert (hop.outcomes[Outcome.SHED], hop.outcomes[Outcome.PASSED], hop.missing, hop.in_flight) == (
        shed,
        3_000 - shed,
        0,
        0,
    )
    assert hop.due == 3_000


async def test_what_was_dropped_and_comes_again_is_a_record_like_others(tmp_path: Path) -> None:
    """A collector that crashed before its bookmark asks for it again; then there may be room."""
    one, two = (Arrival(b"%d" % n, Origin("s", 1, n, 1_000)) for n in (1, 2))
    channels = MemoryChannels(1)
    for some in ([Arrival(b"", Origin("s", 1, 1, 1_000), shed=True), two], [one]):
        pump = IngestLoop(
            Outside([some]), "into", channels, heartbeats="heartbeats", bookmarks=f"bookmarks-{len(some)}"
        )
        await pump.run(asyncio.Event())
    hop = audited(channels, tmp_path / "ledger.db")
    assert (hop.outcomes[Outcome.SHED], hop.outcomes[Outcome.PASSED], hop.missing) == (0, 2, 0)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "rate="),
        ({"by": "size", "rate": 1}, 'by is "size"; the choices are random, priority, key, oldest'),
        ({"rate": 0}, "more than 0"),
        ({"lag": 0}, "more than 0"),
        ({"by": "key", "rate": 1}, 'by "key" needs a field'),
        ({"by": "priority", "rate": 1, "field": "level"}, "order"),
        ({"by": "oldest", "rate": 1}, "set lag="),
    ],
)
def test_what_cannot_be_meant_is_misconfigured(told: dict[str, object], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        Shed(**told)  # type: ignore[arg-type]


async def test_what_is_dropped_takes_room_as_well() -> None:
    """While nobody takes anything all is dropped, and each of them waits to be counted."""
    outside = Outside([arrivals(2_000)] * 1_000)
    async with Shedding(outside, Shed("random", lag=1)).open(ResumeState()):
        before = -1
        while outside.given != before:
            before = outside.given
            await asyncio.sleep(0.05)
        assert outside.given * 2_000 * ARRIVAL_OVERHEAD < 2 * MAX_BYTES


async def test_who_brought_what_nobody_takes_is_told() -> None:
    outside = Outside([[one] for one in arrivals(5)])
    async with Shedding(outside, Shed("random", lag=10)).open(ResumeState()) as intakes:
        await until(lambda: outside.given == 5)
        await (await anext(intakes)).settle(None)
    assert outside.settled[0] is None
    assert [type(error) for error in outside.settled[1:]] == [Unavailable] * 4


@dataclass
class Placed(Outside):
    """Its records have cursors, after which it goes on."""

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        self.after = taken.cursor
        yield self._intakes()


async def test_what_was_dropped_is_no_gap_to_which_a_source_goes_back() -> None:
    """A collector that crashed before its bookmark finds in the heartbeats which numbers lie nowhere."""
    channels = MemoryChannels(1)
    given = [Arrival(b"" if n % 2 else b"%d" % n, cursor=str(n), shed=bool(n % 2)) for n in range(1, 101)]
    first = Placed([[one] for one in given])
    await IngestLoop(first, "into", channels, heartbeats="heartbeats", bookmarks="lost").run(asyncio.Event())
    second = Placed([])
    await IngestLoop(second, "into", channels, heartbeats="heartbeats", bookmarks="bookmarks").run(asyncio.Event())
    assert second.after == "100"


def test_notices_of_what_was_dropped_fit_into_a_channel() -> None:
    origins = [Origin("名" * 200, 1, 2 * n, 0) for n in range(10_000)]
    told = [record.value or b"" for record in shed_records("into", origins)]
    assert max(map(len, told)) < 900_000
    found = [number for value in told for _, number in shed_numbers("名" * 200, "into", value)]
    assert found == [origin.seq for origin in origins]


@pytest.mark.parametrize("value", [None, b"", b"[]", b"5", b'{"kind":"shed"}', b'{"kind":"shed","channel":"into"}'])
def test_a_notice_that_tells_nothing_drops_nothing(value: bytes | None) -> None:
    assert list(shed_numbers("s", "into", value)) == []


@pytest.mark.parametrize(
    "runs",
    [
        b"5",
        b"[5]",
        b'[["s"]]',
        b'[["s",1,"a",2]]',
        b'[["s",1,5,2]]',
        b'[["other",1,1,2]]',
        b'[["s","1",1,2]]',
        b'[["s",1.5,1,2]]',
        b'[["s",-1,1,2]]',
        b'[["s",9223372036854775807,1,2]]',
    ],
)
def test_nor_does_one_with_nonsense(runs: bytes) -> None:
    assert list(shed_numbers("s", "into", b'{"kind":"shed","channel":"into","runs":' + runs + b"}")) == []
