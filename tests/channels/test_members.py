"""Members of a group come, go and are killed, while records flow: each is processed, and by nobody beside another."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.channels.traffic import eventually

from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

PARTITIONS, MEMBERS = 12, 5
RECORDS, SETTLED = 150_000, 50_000
"""Records that flow while members come and go; and after the group has settled."""
SENDERS, RATE = 100, 10_000
PENSTOCK = [sys.executable, "-m", "penstock"]


@dataclass
class Lives:
    """The members, dead and alive, and the diary of each."""

    servers: str
    group: str
    channel: str
    folder: Path
    numbers: Iterator[int] = field(default_factory=count)
    alive: "dict[Path, subprocess.Popen[bytes]]" = field(default_factory=dict)
    killed: dict[Path, float] = field(default_factory=dict)
    """When a member that was killed was surely dead."""

    def join(self) -> None:
        diary = self.folder / f"member-{next(self.numbers)}.jsonl"
        script = Path(__file__).with_name("member.py")
        self.alive[diary] = subprocess.Popen(
            [sys.executable, str(script), self.servers, self.group, self.channel, str(diary)]
        )

    def kill(self, diary: Path) -> None:
        member = self.alive.pop(diary)
        member.kill()
        member.wait()
        self.killed[diary] = time.monotonic()

    def leave(self, diary: Path) -> None:
        member = self.alive.pop(diary)
        eventually(diary.exists)  # Before that, it does not handle the signal.
        member.send_signal(signal.SIGTERM)
        assert member.wait(30) == 0

    def diaries(self) -> list[Path]:
        return sorted(self.folder.glob("member-*.jsonl"))


@contextmanager
def generations(kafka: Kafka, group: str, channel: str, folder: Path) -> Iterator[Lives]:
    found = Lives(kafka.servers, group, channel, folder)
    try:
        yield found
    finally:
        for diary in list(found.alive):
            found.kill(diary)


@contextmanager
def producing(servers: str, channel: str, records: int, name: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Numbered updates of many senders, at a steady pace."""
    options = {
        "--topic": channel,
        "--servers": servers,
        "--name": name,
        "--senders": str(SENDERS),
        "--every": "100ms",
        "--count": str(RATE // SENDERS // 10),
        "--total": str(records // SENDERS),
    }
    command = [*PENSTOCK, "produce", "updates", *(word for pair in options.items() for word in pair)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


# --- what the diaries tell


@dataclass(frozen=True)
class Holding:
    """A time during which a member held a partition, and how that ended."""

    since: float
    until: float
    member: str
    end: str


@dataclass
class Told:
    processed: dict[int, Counter[int]]
    """Per partition, how often each offset was processed."""
    holdings: dict[int, list[Holding]]
    strange: list[str]
    """What was processed by a member that did not hold it."""


def events(diary: Path) -> Iterator[dict[str, object]]:
    for line in diary.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)


def told(diaries: Lives) -> Told:
    found = Told({one: Counter() for one in range(PARTITIONS)}, {one: [] for one in range(PARTITIONS)}, [])
    for diary in diaries.diaries():
        held: dict[int, float] = {}
        for event in map(Event.of, events(diary)):
            for partition in event.partitions:
                if event.kind == "given":
                    held[partition] = event.at
                else:
                    holding = Holding(held.pop(partition), event.at, diary.stem, event.kind)
                    found.holdings[partition].append(holding)
            for partition, offsets in event.offsets.items():
                if partition not in held:
                    found.strange.append(f"{diary.stem} processed {partition}: {offsets}, at {event.at}")
                for first, last in offsets:
                    found.processed[partition].update(range(first, last + 1))
        for partition, since in held.items():
            found.holdings[partition].append(Holding(since, diaries.killed.get(diary, math.inf), diary.stem, "killed"))
    return found


@dataclass(frozen=True)
class Event:
    kind: str
    at: float
    partitions: list[int]
    offsets: dict[int, list[list[int]]]

    @classmethod
    def of(cls, line: dict[str, object]) -> "Event":
        partitions, offsets = line.get("partitions", []), line.get("offsets", {})
        assert isinstance(partitions, list)
        assert isinstance(offsets, dict)
        return cls(
            str(line["event"]), float(str(line["at"])), partitions, {int(one): runs for one, runs in offsets.items()}
        )


def overlaps(holdings: list[Holding]) -> list[tuple[Holding, Holding]]:
    """Holdings of two members at once. Who has lost a partition learns of it when another has it already."""
    found, latest = [], None
    for one in sorted((one for one in holdings if one.end != "lost"), key=lambda one: one.since):
        if latest is not None and one.since < latest.until:
            found.append((latest, one))
        latest = one if latest is None or one.until > latest.until else latest
    return found


def test_two_who_hold_a_partition_at_once_would_be_found() -> None:
    long, within = Holding(0, 10, "a", "taken"), Holding(1, 2, "b", "taken")
    later, after = Holding(3, 4, "c", "killed"), Holding(10, 11, "b", "taken")
    assert overlaps([after, within, long, later]) == [(long, within), (long, later)]
    assert overlaps([after, within, later]) == []


# ---


def settled(kafka: Kafka, group: str) -> bool:
    """All partitions are held, each by one of as many members as are alive."""
    try:
        found = kafka.group(group)
    except Unavailable:
        return False
    held = [location for partitions in found.members.values() for location in partitions]
    return len(found.members) == MEMBERS and len(held) == len(set(held)) == PARTITIONS and all(found.members.values())


def written(diaries: Lives) -> int:
    """How many records were processed, the same one once."""
    return sum(len(offsets) for offsets in told(diaries).processed.values())


def ends(kafka: Kafka, channel: str) -> dict[int, int]:
    return {partition: end for partition, (_, end) in kafka.bounds(channel).items()}


def test_members_come_go_and_are_killed_and_each_record_is_processed(
    kafka: Kafka, fresh: Fresh, tmp_path: Path, eventually: Eventually
) -> None:
    channel, group, chance = fresh("shared"), fresh("members"), random.Random(7)
    kafka.ensure([Topic(channel, PARTITIONS)])
    with generations(kafka, group, channel, tmp_path) as members:
        for _ in range(MEMBERS):
            members.join()
        kills = 0
        with producing(kafka.servers, channel, RECORDS, "early") as producer:
            while producer.poll() is None:
                time.sleep(chance.uniform(0.3, 0.9))  # The pace of the chaos, not a wait for something.
                if len(members.alive) >= MEMBERS:
                    chosen = chance.choice(list(members.alive))
                    if chance.random() < 0.7:
                        members.kill(chosen)
                        kills += 1
                    else:
                        members.leave(chosen)
                else:
                    members.join()
            assert producer.returncode == 0
        while len(members.alive) < MEMBERS:
            members.join()
        assert kills >= 5
        eventually(lambda: settled(kafka, group))
        before = ends(kafka, channel)
        eventually(lambda: written(members) == RECORDS)
        with producing(kafka.servers, channel, SETTLED, "late") as producer:
            assert producer.wait(60) == 0
        eventually(lambda: written(members) == RECORDS + SETTLED)
        for diary in list(members.alive):
            members.leave(diary)
        found = told(members)
    after = ends(kafka, channel)
    assert sum(after.values()) == RECORDS + SETTLED
    for partition in range(PARTITIONS):
        assert set(found.processed[partition]) == set(range(after[partition]))
        since_then = {found.processed[partition][offset] for offset in range(before[partition], after[partition])}
        assert since_then <= {1}, "no record is processed by two members once the group has settled"
        assert overlaps(found.holdings[partition]) == []
    assert found.strange == []
    verified = subprocess.run([*PENSTOCK, "verify", channel, "--first", "1", "--servers", kafka.servers], check=False)
    assert verified.returncode == 0
