"""Stores compared with their channels, row by row, while both change.

There are two kinds of stores. A `RecordStore` keeps a row for each record, with its partition and offset: these offsets
are compared, as runs, with those that it has loaded. A `TableStore` keeps the newest row of each key: its rows are
compared with the channel at the offsets up to which the store was filled when the rows were read. Neither is compared
beyond the offsets that the store itself reports, so a row that is not loaded yet is not missing. A difference counts
when it is seen twice.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

from penstock.audit.findings import key_text, location_of
from penstock.audit.judge import Discrepancy, Doubt
from penstock.audit.writers import Writers
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import PenstockError, Unaccounted, Unavailable
from penstock.core.record import Origin
from penstock.core.runs import Runs
from penstock.core.scan import scan

log = logging.getLogger(__name__)

NAMED = 10
"""Maximum rows that are named in a finding."""
ROWS = 200_000
"""Maximum rows of a table that are compared repeatedly: those that changed last. `--deep` compares all."""
AT_ONCE, EACH_TURN = 500, 5_000
"""Maximum rows of a table that are read in one request, and in one turn."""
TURNS = 3
"""Turns in which a small table is compared completely."""
READ = 50_000
"""Maximum entries of a channel that are read in one turn."""
MARGIN: Micros = 5_000_000
"""Rows that expire within this many microseconds are not compared: clocks differ."""
TIMEOUT = 15.0
"""Seconds for which a store may be unavailable before that is a doubt."""
SEARCHED = 200_000
"""Maximum offsets of a channel that are searched for the names of missing rows."""

Interval = tuple[int, int, int]
"""Offsets of a partition: partition, first, last."""


# --- stores that keep each record -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForeignChange:
    """A file of rows that something else than the loader wrote into a store, or removed from it."""

    version: int
    """Of the commit."""
    file: str
    rows: int
    runs: tuple[Interval, ...] = ()
    """The offsets of the rows, as far as they are known."""
    removed: bool = False

    def __str__(self) -> str:
        offsets = "; ".join(map(_interval, self.runs[:NAMED]))
        done = "removed" if self.removed else "wrote"
        return f"version {self.version} {done} {self.file}" + (f": {offsets}" if offsets else "")


@dataclass(frozen=True, slots=True)
class Holdings:
    """The rows of a store, as of one commit."""

    since: Offsets
    stands: Offsets
    """The offsets between which it was filled."""
    passed: int
    """How many rows it has written between them, by its own count."""
    rows: Mapping[int, Runs]
    """The offsets of the rows, per partition."""
    doubled: Sequence[Interval] = ()
    """Offsets that have more than one row."""
    damaged: Sequence[str] = ()
    """Files that cannot be read or are not as they were committed, each with the reason."""
    foreign: Sequence[ForeignChange] = ()
    whole: bool = True
    """All commits were searched for foreign changes."""


class RecordStore(Protocol):
    """A store that keeps a row for each record, with the partition and offset of each."""

    def holdings(self) -> Holdings | None:
        """Return its rows; None if it does not exist yet. The same object is returned while nothing changes."""

    def numbers(self) -> Mapping[tuple[str, int], Runs]:
        """Return the numbers that it holds, per sender and epoch. This reads all of it."""


class Check(Protocol):
    """The comparison of one store with its channel. One thread calls it."""

    stage: str
    complete: bool
    """The whole store was compared at least once."""

    def turn(self) -> None:
        """Compare the next part, in limited time."""

    def discrepancies(self) -> tuple[Discrepancy, ...]: ...

    def close(self) -> None: ...


class RecordCheck:
    """A store that keeps each record, compared by the offsets of its rows."""

    def __init__(self, stage: str, channel: str, store: RecordStore, channels: Channels, dead: str = "") -> None:
        """`dead`: the channel with the dead letters of this one."""
        self.stage, self.complete = stage, False
        self.judge_commits = True
        """Foreign changes are findings."""
        self._channel, self._dead, self._store, self._channels = channel, dead, store, channels
        self._looked: Holdings | None = None
        self._whole: Holdings | None = None
        self._suspected: tuple[object, ...] = ()
        self._found: tuple[Discrepancy, ...] = ()

    def turn(self) -> None:
        holdings = self._store.holdings()
        if holdings is None:
            self.complete, self._found = True, ()
            return
        facts = _facts(holdings)
        if not any(facts):
            self._found, self._suspected, self._whole = (), (), holdings
        elif facts == self._suspected:
            if holdings is not self._looked or not self._found:
                self._found = tuple(self._named(holdings))
                self._looked = holdings
        else:
            # A file can be read while it is replaced: a difference counts when it is seen again.
            self._suspected = facts
            return
        self.complete = self.complete or holdings.whole

    def discrepancies(self) -> tuple[Discrepancy, ...]:
        return self._found

    def close(self) -> None:
        pass

    def _named(self, holdings: Holdings) -> Iterator[Discrepancy]:
        missing, unloaded, *_ = _facts(holdings)
        for text in holdings.damaged:
            yield Discrepancy("changed", self.stage, 1, f"{self.stage}: {text}")
        if holdings.foreign and self.judge_commits:
            rows = sum(one.rows for one in holdings.foreign)
            versions = len({one.version for one in holdings.foreign})
            text = (
                f"{self.stage}: {rows:,} rows were written or removed by something else than Penstock, in "
                f"{versions:,} {'commit' if versions == 1 else 'commits'}; penstock audit --deep compares their values"
            )
            yield Discrepancy("changed", self.stage, rows, text, tuple(map(str, holdings.foreign[:NAMED])))
        if missing:
            names = tuple(self._missing(holdings, missing))
            yield Discrepancy("missing", self.stage, missing, _text(self.stage, missing, "missing"), names)
        if holdings.doubled:
            count = sum(last - first + 1 for _, first, last in holdings.doubled)
            names = tuple(_interval(one) for one in holdings.doubled[:NAMED])
            yield Discrepancy("doubled", self.stage, count, _text(self.stage, count, "there more than once"), names)
        if unloaded:
            names = tuple(_interval(one) for one in _beyond(holdings))[:NAMED]
            yield Discrepancy("forged", self.stage, unloaded, _text(self.stage, unloaded, "of no loaded record"), names)

    def _missing(self, holdings: Holdings, count: int) -> Iterator[str]:
        """Yield the names of missing rows."""
        gone = list(self._gone(holdings))
        if sum(last - first + 1 for _, first, last in gone) != count:
            # Some were missing before the first turn, or were never loaded.
            gone = list(self._unexplained(holdings))
        left = min(count, NAMED)
        for partition, first, last in gone:
            last = min(last, first + left - 1)
            origins = self._origins(partition, first, last)
            yield from (f"partition {partition}, offset {at}{origins.get(at, '')}" for at in range(first, last + 1))
            left -= last + 1 - first
            if not left:
                return

    def _gone(self, holdings: Holdings) -> Iterator[Interval]:
        """Yield offsets that had a row when the store was last complete, and have none now."""
        if self._whole is None:
            return
        for partition, runs in self._whole.rows.items():
            for gap in runs.without(holdings.rows.get(partition, Runs())):
                yield partition, *gap

    def _unexplained(self, holdings: Holdings) -> Iterator[Interval]:
        """Yield offsets without a row whose record was neither refused nor a duplicate, if the channel holds them."""
        gaps: dict[int, Runs] = {}
        for partition, first, last in _gaps(holdings):
            gaps.setdefault(partition, Runs()).add(first, last)
        try:
            refused, numbers = set(self._refused(gaps)), self._store.numbers()
            bounds, left = self._channels.bounds(self._channel), SEARCHED
            for partition, runs in gaps.items():
                low, end = bounds.get(partition, (0, 0))
                start, end = max(low, runs.first or 0), min(end, (runs.last or 0) + 1)
                for entry in scan(self._channels, self._channel, {partition: start}, {partition: (low, end)}):
                    left -= 1
                    if left < 0:
                        return
                    if entry.offset not in runs or (partition, entry.offset) in refused:
                        continue
                    origin = Origin.read(entry.headers)
                    if origin is None or origin.seq not in numbers.get((origin.sender, origin.epoch), ()):
                        yield partition, entry.offset, entry.offset
        except (Unavailable, Unaccounted) as error:
            log.warning("the missing rows of %s are not named: %s", self.stage, error)

    def _refused(self, gaps: Mapping[int, Runs]) -> Iterator[tuple[int, int]]:
        """Yield offsets within the gaps whose records are in the dead letters."""
        for entry in scan(self._channels, self._dead) if self._dead else ():
            location = location_of(next((value for name, value in reversed(entry.headers) if name == "place"), b""))
            if location is None:
                continue
            channel, partition, offset = location
            if channel == self._channel and offset in gaps.get(partition, ()):
                yield partition, offset

    def _origins(self, partition: int, first: int, last: int) -> dict[int, str]:
        """Return senders and numbers of these records, by offset, if the channel still holds them."""
        found: dict[int, str] = {}
        try:
            low, end = self._channels.bounds(self._channel).get(partition, (0, 0))
            part = {partition: (low, min(end, last + 1))}
            for entry in scan(self._channels, self._channel, {partition: first}, part):
                if (origin := Origin.read(entry.headers)) is not None:
                    found[entry.offset] = f" ({origin.sender}/{origin.epoch}: {origin.seq})"
        except (Unavailable, Unaccounted) as error:
            log.warning("the missing rows of %s are not named: %s", self.stage, error)
        return found


def _facts(holdings: Holdings) -> tuple[int, int, tuple[object, ...], tuple[object, ...], tuple[object, ...]]:
    """Missing rows, rows of no loaded record, doubled rows, damaged files, foreign changes."""
    within = 0
    for partition, runs in holdings.rows.items():
        since, stands = holdings.since.get(partition, 0), holdings.stands.get(partition, 0)
        within += sum(max(0, min(last, stands - 1) - max(first, since) + 1) for first, last in runs)
    beyond = sum(last - first + 1 for _, first, last in _beyond(holdings))
    missing, more = max(0, holdings.passed - within), max(0, within - holdings.passed)
    return missing, more + beyond, tuple(holdings.doubled), tuple(holdings.damaged), tuple(holdings.foreign)


def _beyond(holdings: Holdings) -> Iterator[Interval]:
    """Yield offsets of rows after the end up to which the store was filled."""
    for partition, runs in holdings.rows.items():
        stands = holdings.stands.get(partition, 0)
        for first, last in runs:
            if last >= stands:
                yield partition, max(first, stands), last


def _gaps(holdings: Holdings) -> Iterator[Interval]:
    """Yield loaded offsets without a row."""
    for partition, stands in sorted(holdings.stands.items()):
        since = holdings.since.get(partition, 0)
        loaded = Runs([(since, stands - 1)] if since < stands else [])
        for gap in loaded.without(holdings.rows.get(partition, Runs())):
            yield partition, *gap


def _interval(one: Interval) -> str:
    partition, first, last = one
    return f"partition {partition}, offset{'' if first == last else 's'} {first}{'' if first == last else f'–{last}'}"


def _text(stage: str, count: int, what: str) -> str:
    return f"{stage}: {count:,} {'row is' if count == 1 else 'rows are'} {what}"


# --- stores that keep the newest row of each key ----------------------------------------------------------------------


class Kept(NamedTuple):
    """A row of a table; both are None if there is no row."""

    row: bytes | None
    version: int | None


class TableStore(Protocol):
    """A store that keeps the newest row of each key."""

    @property
    def ttl(self) -> timedelta | None:
        """The time after which a row expires, from when its record was appended."""

    @property
    def ttl_since(self) -> Micros | None:
        """Rows appended before this time can expire by an earlier rule. As of the last `kept`; None: all can."""

    def kept(self, keys: Sequence[bytes]) -> tuple[Offsets, Sequence[Kept]]:
        """Return the rows of these keys, and the offsets up to which the store was filled at the same time."""

    def key(self, entry: Entry) -> bytes:
        """Return the key under which it keeps an entry."""

    def version(self, entry: Entry) -> int | None:
        """Return the version by which it compares an entry; None if there is none."""

    def close(self) -> None: ...


class Expected(NamedTuple):
    """The expected row: its version, the hash of its value (None: deleted), when it was appended."""

    version: int | None
    digest: int | None
    appended: Micros
    also: tuple[int, ...] = ()
    """Hashes of other values that were written with the same version."""


_Wrong = Literal["missing", "changed"]


class TableCheck:
    """A table, compared in parts with its channel at the offsets up to which it was filled.

    It keeps the expected rows that changed last, `most` of them.
    """

    def __init__(
        self,
        stage: str,
        channel: str,
        store: TableStore,
        channels: Channels,
        clock: Clock,
        writers: Writers | None = None,
        most: int | None = ROWS,
    ) -> None:
        self.stage, self.complete = stage, False
        self.rows: dict[bytes, Expected] = {}
        self._channel, self._store, self._channels, self._clock = channel, store, channels, clock
        self._writers, self._most = writers, most
        self._opened = ExitStack()
        self._reader: Reader | None = None
        self._applied: dict[int, int] = {}
        self._pending: dict[int, deque[Entry]] = {}
        self._left: list[bytes] = []
        self._suspected: dict[bytes, _Wrong] = {}
        self._found: dict[bytes, _Wrong] = {}

    def turn(self) -> None:
        stands, _ = self._store.kept(())
        if not self._reach(stands):
            # A store that has lost rows and offsets together is filled again; until then it is not compared.
            self.complete = self.complete and not any(at > stands.get(part, 0) for part, at in self._applied.items())
            return
        again = list(self._suspected.keys() | self._found.keys())[:EACH_TURN]
        if not self._left:
            self._left = list(self.rows)
        size = min(EACH_TURN, max(AT_ONCE, len(self.rows) // TURNS + 1))
        some, self._left = self._left[:size], self._left[size:]
        keys = [*again, *(key for key in some if key not in self._suspected and key not in self._found)]
        for start in range(0, len(keys), AT_ONCE):
            if not self._compare(keys[start : start + AT_ONCE]):
                self._left = [*keys[start:], *self._left]
                return
        self.complete = self.complete or (not self._left and not self._suspected)

    def discrepancies(self) -> tuple[Discrepancy, ...]:
        return tuple(self._named("missing", "missing")) + tuple(self._named("changed", "not as in the channel"))

    def _named(self, kind: _Wrong, what: str) -> Iterator[Discrepancy]:
        if keys := [key for key, wrong in self._found.items() if wrong == kind]:
            names = tuple(map(self._name, keys[:NAMED]))
            yield Discrepancy(kind, self.stage, len(keys), _text(self.stage, len(keys), what), names)

    def foreign(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys for which the table has a row, but the channel no record."""
        stands, rows = self._store.kept(keys)
        if not self._reach(stands):
            return []
        found = zip(keys, rows, strict=True)
        return [key for key, kept in found if kept.row is not None and key not in self.rows]

    def close(self) -> None:
        self._opened.close()
        self._store.close()

    def _name(self, key: bytes) -> str:
        due = self.rows.get(key)
        version = "" if due is None or due.version is None else f", version {due.version}"
        return f"key {key_text(key)}{version}"

    def _compare(self, keys: Sequence[bytes]) -> bool:
        """Compare these rows; False if the channel could not be read up to the offsets of the store."""
        stands, rows = self._store.kept(keys)
        if not self._reach(stands):
            return False
        now = self._clock.now()
        for key, kept in zip(keys, rows, strict=True):
            wrong = self._wrong(key, kept, now)
            if wrong is None:
                self._suspected.pop(key, None)
                self._found.pop(key, None)
            elif key in self._found or self._suspected.get(key) == wrong:
                self._suspected.pop(key, None)
                self._found[key] = wrong
            else:
                self._suspected[key] = wrong
        return True

    def _apply(self, entry: Entry) -> None:
        """Apply an entry as the store does: a row replaces only an older version, without a version any row."""
        key, version = self._store.key(entry), self._store.version(entry)
        digest = None if entry.value is None else hash(entry.value)
        before = self.rows.get(key)
        if before is not None and version is not None and before.version is not None and version <= before.version:
            if version == before.version and digest is not None and digest != before.digest:
                self.rows[key] = before._replace(also=(*before.also[-3:], digest))
            return
        self.rows.pop(key, None)
        self.rows[key] = Expected(version, digest, entry.appended)
        if self._most is not None and len(self.rows) > self._most:
            del self.rows[next(iter(self.rows))]

    def _wrong(self, key: bytes, kept: Kept, now: Micros) -> _Wrong | None:
        """Return what is wrong with a row; None if it is as expected, or if this is not known."""
        due = self.rows.get(key)
        if due is None or self._perishes(due, now):
            return None
        if due.digest is None:
            return None if kept.row is None else "changed"
        if kept.row is None:
            since = self._store.ttl_since
            return None if since is None or due.appended < since else "missing"
        same = hash(kept.row) in (due.digest, *due.also) and kept.version == due.version
        return None if same else "changed"

    def _perishes(self, due: Expected, now: Micros) -> bool:
        ttl = self._store.ttl
        if ttl is None:
            return False
        return due.appended <= 0 or due.appended + ttl // timedelta(microseconds=1) < now + MARGIN

    def _reach(self, stands: Offsets) -> bool:
        """Apply the channel up to exactly these offsets. False if that takes longer, or they are already passed."""
        reader, most = self._reader or self._open(), READ
        self._take(stands)
        while most > 0 and any(self._applied.get(at, 0) < end for at, end in stands.items()):
            entries = reader.read(min(AT_ONCE * 10, most), 0.5)
            genuine = entries if self._writers is None else self._writers.genuine(entries)
            for entry in genuine:
                self._pending.setdefault(entry.partition, deque()).append(entry)
            before = dict(self._applied)
            self._take(stands)
            most -= max(1, len(entries))
            if not entries and before == self._applied:
                return False
        return all(at == stands.get(partition, 0) for partition, at in self._applied.items())

    def _take(self, stands: Offsets) -> None:
        assert self._reader is not None
        reached = self._reader.positions(self._channel)
        for partition, end in stands.items():
            pending = self._pending.get(partition, deque())
            while pending and pending[0].offset < end:
                self._apply(pending.popleft())
            at = end if pending else min(end, reached.get(partition, 0))
            self._applied[partition] = max(at, self._applied.get(partition, 0))

    def _open(self) -> Reader:
        start: Offsets = {}
        if self._store.ttl is not None:
            # Expired rows are not read.
            start = self._channels.since(
                self._channel, self._clock.now() - self._store.ttl // timedelta(microseconds=1)
            )
        opening: AbstractContextManager[Reader] = self._channels.reader({self._channel: start})
        self._reader = self._opened.enter_context(opening)
        return self._reader


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """A check of the reconciler: opened when first needed, and its last results."""

    stage: str
    make: Callable[[], Check]
    check: Check | None = None
    failing: tuple[float, str] | None = None
    """Since when it cannot be compared, and why."""
    found: tuple[Discrepancy, ...] = ()


class Reconciler:
    """The checks of a pipeline, run in turns. One thread calls `turn`; any thread may read the results."""

    def __init__(
        self,
        checks: Sequence[Callable[[], Check]],
        stages: Sequence[str],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = [_Slot(stage, check) for stage, check in zip(stages, checks, strict=True)]
        self._elapsed = elapsed
        self.discrepancies: tuple[Discrepancy, ...] = ()
        self.doubts: tuple[Doubt, ...] = ()
        self._publish()

    def turn(self) -> None:
        """Run one turn of each check. A store that cannot be read does not stop the other checks."""
        for slot in self._slots:
            try:
                check = slot.check = slot.check or slot.make()
                try:
                    check.turn()
                finally:
                    slot.found = check.discrepancies()
                slot.failing = None
            except Exception as error:  # Only this store is not compared.
                if not isinstance(error, PenstockError):
                    log.exception("%s cannot be compared", slot.stage)
                slot.failing = slot.failing[0] if slot.failing else self._elapsed(), str(error)
                if isinstance(error, Unaccounted) and slot.check is not None:
                    # The channel has removed the next entries: it is read again from its beginning.
                    slot.check.close()
                    slot.check, slot.found = None, ()
        self._publish()

    def close(self) -> None:
        for slot in self._slots:
            if slot.check is not None:
                slot.check.close()

    def _publish(self) -> None:
        doubts = []
        for slot in self._slots:
            if slot.failing is not None and self._elapsed() - slot.failing[0] > TIMEOUT:
                text = f"{slot.stage} cannot be compared with its channel: {slot.failing[1]}"
                doubts.append(_doubt(slot.stage, text))
            elif slot.check is None or not slot.check.complete:
                doubts.append(_doubt(slot.stage, f"{slot.stage} is not yet compared with its channel"))
        self.discrepancies = tuple(one for slot in self._slots for one in slot.found)
        self.doubts = tuple(doubts)


def _doubt(stage: str, text: str) -> Doubt:
    return Doubt("channel" if stage.startswith("channel:") else "store", stage, text)
