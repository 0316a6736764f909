"""Recompute a query as a batch over the retained log, and compare the rows with its result.

Live results change during the comparison. So the order of reading bounds them: first the committed offsets of the
query, then the rows, then the end offsets of the log. A row must lie between the batches up to both.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.checkpoints.doctor import begin_anew
from penstock.analysis.checkpoints.note import Note, note_of
from penstock.analysis.engine import Engine, OffsetRanges
from penstock.analysis.query import Query
from penstock.analysis.replay import (
    Comparison,
    Difference,
    Excuse,
    Expected,
    Found,
    How,
    Row,
    Table,
    Until,
    Verdict,
    bare,
    comes_when_final,
    compare,
    kept,
    key_of,
    named,
    read,
    recomputed,
    require_repeatable,
)
from penstock.audit.account import Account, Outcome
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.record import generation_and_count
from penstock.core.scan import scan
from penstock.deliver.feed import Feed
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.graph import store_node
from penstock.pipeline.stores import make_store
from penstock.run.accounts import last_accounts
from penstock.stores.base import Contents, Stored


@dataclass(frozen=True, slots=True)
class Gone:
    """Offsets first–last of a log that the query has read and that retention has removed."""

    channel: str
    partition: int
    first: int
    last: int


@dataclass(frozen=True)
class Judged:
    """The result of the comparison for one copy of the rows."""

    holder: str
    counts: Counter[Verdict]
    differences: tuple[Difference, ...]
    late: bool = False
    """All differences can be late records, which the stream drops: it is not known which."""

    @property
    def compared(self) -> int:
        return self.counts[Verdict.EXACT] + self.counts[Verdict.BOUNDED]


@dataclass(frozen=True)
class Report:
    query: str
    result: str
    covered: Mapping[str, Offsets]
    ends: Mapping[str, Offsets]
    gone: tuple[Gone, ...]
    judged: tuple[Judged, ...]
    records: Mapping[int, Found] = field(default_factory=dict)
    """By checksum: the records that make the difference, if they were searched and found."""
    late: int = 0
    """How many records were late, by the account of the query."""
    late_runs: Mapping[str, Mapping[str, list[tuple[int, int]]]] = field(default_factory=dict)
    """The first of them by sender and epoch."""
    late_left_out: bool = False
    """The offsets of all late records are known, and they were not recomputed: they explain no difference."""

    @property
    def equal(self) -> bool:
        return not any(one.differences for one in self.judged)

    @property
    def maybe_late(self) -> bool:
        """Rows differ by no more than the late records; but it is not known which records these were."""
        return not self.equal and all(one.late or not one.differences for one in self.judged)

    @property
    def conclusive(self) -> bool:
        """Whether rows could be compared, if there are any, and each difference is certain."""
        skipped = any(one.counts[Verdict.UNKNOWN] for one in self.judged)
        return not self.maybe_late and (not skipped or any(one.compared or one.differences for one in self.judged))

    @property
    def code(self) -> int:
        """0: equal, 1: rows differ, 2: not conclusive."""
        return 2 if not self.conclusive else 0 if self.equal else 1

    def record_of(self, difference: Difference) -> str:
        """Describe the one record that makes a difference; empty if it is not a single known record."""
        record = self._record(difference)
        if record is None:
            return ""
        sender, epoch, seq, copies = record
        verb = "counts twice" if difference.how is How.EXCEEDS else "lacks"
        late = any(first <= seq <= last for first, last in self.late_runs.get(sender, {}).get(str(epoch), ()))
        # Of several copies, one may not have been late.
        why = f", a duplicate: the log holds it {copies} times" if copies > 1 else ", which was late" if late else ""
        return f"{verb} {sender}/{epoch}: {seq}{why}"

    def _record(self, difference: Difference) -> Found | None:
        return None if difference.mark is None else self.records.get(difference.mark)

    def to_json(self) -> dict[str, Any]:
        return {
            "query": self.query,
            "result": self.result,
            "equal": self.equal,
            "conclusive": self.conclusive,
            "covered": self.covered,
            "ends": self.ends,
            "gone": [asdict(one) for one in self.gone],
            "late": self.late,
            "late_left_out": self.late_left_out,
            "holders": [
                {
                    "holder": one.holder,
                    **{verdict: one.counts[verdict] for verdict in Verdict},
                    "maybe_late": one.late,
                    "differences": [self._difference(difference) for difference in one.differences],
                }
                for one in self.judged
            ],
        }

    def _difference(self, one: Difference) -> dict[str, Any]:
        record = self._record(one)
        return {
            "key": read(one.key),
            "how": one.how,
            "held": one.held and read(one.held.value),
            "recomputed": one.recomputed and read(one.recomputed.value),
            "columns": {name: {"held": a, "recomputed": b} for name, (a, b) in one.columns.items()},
            "record": record and record._asdict(),
        }


@dataclass(frozen=True, slots=True)
class Written:
    """The newest row of a key in a channel, deleted or not, and the position of the key's last entry."""

    row: Row
    partition: int
    offset: int
    appended: Micros


@dataclass(frozen=True)
class Holder:
    name: str
    """As in the graph: `channel:by_country`, `feed:by_country`, `store:redis/by_country`."""
    rows: Table
    ttl: timedelta | None = None
    """How long a row is kept after its last entry; None: without limit."""
    filled: Offsets | None = None
    """The offsets of a store; None for a copy that has read everything."""


Say = Callable[[str], None]

_LOOK_EVERY = 0.5
_LOADING = 10.0
_NAMED = 20
"""Maximum rows for which the one record that makes the difference is searched."""
_MARGIN = 5_000_000
"""Tolerated difference between the clocks of stores and of this machine, in microseconds."""
_SHORT = (How.MISSING, How.FEWER, How.OTHERS)
_CLOSED = (Verdict.EXACT, Verdict.DIFFERENT, Verdict.EARLIER)
"""A row of these hides no late record: it was compared exactly, or belongs to an earlier generation."""


def recompute(
    engine: Engine,
    channels: Channels,
    description: Description,
    config: Config,
    query: Query,
    say: Say = lambda _: None,
    wait: float = 70.0,
    clock: Clock | None = None,
) -> Report:
    """Recompute a query and compare. Waits for a commit that covers the log, while nothing is added to it."""
    require_repeatable(engine, query)
    until = _covered(channels, engine, description, query, say, wait)
    say(f"reading {query.into} and its copies")
    found, written = copies_of_result(channels, description, config, query, min(wait, _LOADING))
    account = _account_of(channels, description, query, until, min(wait, _LOADING))
    bounds = {name: channels.bounds(name) for name in query.inputs}
    ends = {name: {one: end for one, (_, end) in bounds[name].items()} for name in query.inputs}
    begins = {name: {one: begin for one, (begin, _) in bounds[name].items()} for name in query.inputs}
    # Offsets that were removed after they were covered are gone, too.
    until = {name: {one: max(at, begins[name][one]) for one, at in until[name].items()} for name in query.inputs}
    note = note_of(engine.checkpoint(query.name))
    since = {
        name: {one: max(at, (note.since or {}).get(name, {}).get(one, at)) for one, at in begins[name].items()}
        for name in query.inputs
    }
    gone = _gone(query, begins, note, account)
    thinned = any(
        _thinned(engine, query, name, since[name], until[name])
        for name in query.inputs
        if description.channels[name].result_of or description.channels[name].compacted
    )
    late = _Late.of(account, until)
    say(f"recomputing {query.name} up to its committed offsets")
    least = recomputed(engine, query, until, since, late.left_out)
    most = least
    if ends != until:
        say("recomputing it up to the end of the log")
        most = recomputed(engine, query, ends, since, late.left_out)
    if thinned:
        say("compaction has removed rows of its tables: rows are compared without their record counts")
        least, most = bare(least), bare(most)
        found = [replace(holder, rows=bare(holder.rows)) for holder in found]
    expected = Expected(least, most, bool(gone))
    final = comes_when_final(engine, query)
    now = (clock or SystemClock()).now()
    judged: list[Judged] = []
    for holder in found:
        # The channel is the first of them: only records that are missing in it can have been late.
        missing = {one.key: one.short for one in judged[0].differences} if judged else None
        compared = compare(holder.rows, expected, _excuse(holder, written, final, now, note.generation))
        explained = late.explains(compared) and (
            missing is None or all(missing.get(one.key) == one.short for one in compared.differences)
        )
        judged.append(Judged(holder.name, compared.counts, compared.differences, explained))
    # Each once, also if several copies differ.
    differing = dict.fromkeys(one.mark for holder in judged for one in holder.differences)
    if marks := [mark for mark in differing if mark is not None][:_NAMED]:
        say("searching the records that make the difference")
    records = named(engine, query, marks, ends)
    left_out = late.left_out is not None
    return Report(query.name, query.into, until, ends, gone, tuple(judged), records, late.records, late.runs, left_out)


def _covered(
    channels: Channels, engine: Engine, description: Description, query: Query, say: Say, wait: float
) -> dict[str, dict[int, int]]:
    """Return the committed offsets of the query; wait until they reach the ends while nothing is added."""

    def look() -> dict[str, dict[int, int]] | None:
        offsets = covered(f"{engine.checkpoints}/{query.name}")
        if offsets is None and (account := _account(channels, description, query)):
            offsets = {name: share.until for name, share in account.shares.items()}
        if offsets is None or not all(name in offsets for name in query.inputs):
            return None
        return {name: {one: offsets[name].get(one, 0) for one in first[name]} for name in query.inputs}

    def ends() -> dict[str, dict[int, int]]:
        return {name: {one: end for one, (_, end) in channels.bounds(name).items()} for name in query.inputs}

    until, first = time.monotonic() + wait, ends()
    if (found := look()) != first:
        say(f"waiting for a commit of {query.name}, {wait:g} s at most, while nothing is added")
    # Always wait for a first commit: before it there is nothing to compare.
    while found != first and time.monotonic() < until and (found is None or ends() == first):
        time.sleep(_LOOK_EVERY)
        found = look()
    if found is None:
        raise Misconfigured(
            f"query {query.name}", "it has committed nothing yet", "let it run for a minute, and try again"
        )
    for name, last in ends().items():
        for partition, offset in found[name].items():
            if offset > last[partition]:
                raise Misconfigured(
                    f"query {query.name}",
                    f"it has covered {name} up to {offset} in partition {partition}, which ends at "
                    f"{last[partition]}: this is another channel of the same name",
                    begin_anew(query.name),
                )
    return found


def _account(channels: Channels, description: Description, query: Query) -> Account | None:
    """Return the last account of the query; None if there is no readable one."""
    return last_accounts(channels, description.bookmarks).get(f"query:{query.name}")


def _account_of(
    channels: Channels, description: Description, query: Query, until: Until, wait: float
) -> Account | None:
    """Return the account of the query; wait for one that covers these offsets."""
    latest = time.monotonic() + wait
    while (account := _account(channels, description, query)) is not None:
        if _accounted(account, until) or time.monotonic() >= latest:
            break
        time.sleep(_LOOK_EVERY)
    return account


def _accounted(account: Account, until: Until) -> bool:
    shares = account.shares
    return all(
        name in shares and all(shares[name].until.get(one, 0) >= at for one, at in offsets.items())
        for name, offsets in until.items()
    )


def _gone(query: Query, begins: Until, note: Note, account: Account | None) -> tuple[Gone, ...]:
    found = []
    for name in query.inputs:
        share = account.shares.get(name) if account else None
        began = (note.since or {}).get(name) or (share.since if share else {})
        for partition, begin in begins[name].items():
            # Offsets that were removed before the query started are in neither of the two.
            since = began.get(partition, 0)
            if begin > since:
                found.append(Gone(name, partition, since, begin - 1))
    return tuple(found)


def _thinned(engine: Engine, query: Query, channel: str, since: Offsets, until: Offsets) -> bool:
    """Whether compaction has removed rows that the query has read.

    A table made of tables is still correct then: only outdated rows are gone. For other queries raise Misconfigured.
    """
    due = sum(at - since[partition] for partition, at in until.items())
    if (there := kept(engine, channel, until, since)) >= due:
        return False
    if engine.shapes[channel].table and engine.result(query).table:
        return True
    raise Misconfigured(
        f"channel {channel}",
        f"compaction has removed {due - there} of its {due} rows: they cannot be read again",
        "recompute the query that makes it, if one does",
    )


@dataclass(frozen=True)
class _Late:
    """How many records were late, and whether each of them would have been in exactly one row."""

    records: int
    conserved: bool
    runs: Mapping[str, Mapping[str, list[tuple[int, int]]]] = field(default_factory=dict)
    """The named ones, by sender and epoch."""
    left_out: Mapping[str, OffsetRanges] | None = None
    """The offsets of all of them: they are not recomputed. None if not known."""
    guessed: bool = False
    """Some may have been late without being counted."""

    @classmethod
    def of(cls, account: Account | None, until: Until) -> "_Late":
        if account is None:
            return cls(0, False)
        shares = account.shares.values()
        named: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for sender, epochs in (one for share in shares for one in share.late.items()):
            for epoch, runs in epochs.items():
                named.setdefault(sender, {}).setdefault(epoch, []).extend(runs)
        left_out = None
        if not account.guessed and _accounted(account, until) and all(share.all_late_at for share in shares):
            left_out = {name: share.late_at for name, share in account.shares.items()}
        late = sum(share.outcomes.get(Outcome.LATE, 0) for share in shares)
        return cls(late, account.conserved, named, left_out, account.guessed)

    def explains(self, found: Comparison) -> bool:
        """Whether late records can explain all differences; this is not a proof."""
        if self.left_out is not None or not found.differences:
            return False
        if self.guessed:
            return True
        short = [one.short if one.how in _SHORT else 0 for one in found.differences]
        if not all(short):
            return False
        if not self.conserved:
            return max(short) <= self.records
        # Other late records can belong to rows that do not exist, or that were not compared exactly.
        elsewhere = any(count for verdict, count in found.counts.items() if verdict not in _CLOSED)
        return sum(short) == self.records or (elsewhere and sum(short) < self.records)


def _excuse(holder: Holder, written: Mapping[bytes, Written], final: bool, now: Micros, generation: int) -> Excuse:
    def excuse(key: bytes, row: Row | None, due: Row | None) -> Verdict | None:
        last = written.get(key)
        if holder.filled is not None and last and last.offset >= holder.filled.get(last.partition, 0):
            return Verdict.WAITING
        if (
            due is None
            and last
            and last.row.version is not None
            and generation_and_count(last.row.version)[0] < generation
        ):
            return Verdict.EARLIER
        if row is not None and row.value is not None:
            return None
        if final and last is None:
            return Verdict.WAITING
        at = last.appended if last else due.time if due else None
        if holder.ttl is not None and (at is None or at + holder.ttl.total_seconds() * 1e6 < now + _MARGIN):
            return Verdict.PERISHED
        return None

    return excuse


def copies_of_result(
    channels: Channels, description: Description, config: Config, query: Query, timeout: float
) -> tuple[list[Holder], Mapping[bytes, Written]]:
    """Return the copies of a query's result, and the rows as written in its channel.

    Stores have `timeout` seconds to load the channel.
    """
    channel = description.channels[query.into]
    feed = Feed(channel.name, channels.topic_id(channel.name), channel.retention)
    written: dict[bytes, Written] = {}
    ends: dict[int, int] = {}
    for entry in scan(channels, channel.name):
        feed.push([entry])
        ends[entry.partition] = entry.offset + 1
        _note(written, entry)
    kept = next(topic.retention for topic in topics(description) if topic.name == channel.name)
    delivered = {
        change.key: _row(written, change.key, change.row, change.version)
        for change in feed.join().rows
        if change.row is not None
    }
    found = [
        Holder(f"channel:{channel.name}", {key: one.row for key, one in written.items()}, kept),
        Holder(f"feed:{channel.name}", _with_deletions(delivered, written), channel.retention),
    ]
    until = time.monotonic() + timeout
    for spec in description.stores:
        if spec.channel == channel.name:
            store = make_store(spec, description, config)
            filled = _filled(store, ends, until)
            rows = _with_deletions(_stored(store, written), written)
            found.append(Holder(store_node(spec.url, channel.name), rows, spec.ttl, filled))
    return found, written


def _note(written: dict[bytes, Written], entry: Entry) -> None:
    """Apply an entry as feeds and stores do: a version that is not newer does not change the row."""
    key = key_of(entry.key or b"")
    row, before = Row.of(entry.value, entry.headers), written.get(key)
    if before and row.version is not None and before.row.version is not None and row.version <= before.row.version:
        row = before.row
    written[key] = Written(row, entry.partition, entry.offset, entry.appended)


def _with_deletions(rows: Table, written: Mapping[bytes, Written]) -> dict[bytes, Row]:
    """Add the deleted rows of the channel to a copy that does not keep deletions."""
    deleted = {key: one.row for key, one in written.items() if one.row.value is None}
    return {**deleted, **rows}


def _row(written: Mapping[bytes, Written], key: bytes, value: bytes, version: int | None) -> Row:
    """Return a row of a copy; the checksum of its records is only in the channel."""
    last = written.get(key)
    same = last is not None and last.row.version == version
    return Row(value, version, last.row.mark if last and same else None)


def _filled(store: Contents, ends: Offsets, until: float) -> Offsets:
    """Return the offsets of a store; wait until they reach these ends."""
    filled = store.stands()
    while any(filled.get(one, 0) < end for one, end in ends.items()) and time.monotonic() < until:
        time.sleep(0.2)
        filled = store.stands()
    return filled


def _stored(store: Contents, written: Mapping[bytes, Written]) -> dict[bytes, Row]:
    """Return the newest row of each key in a store, without deleted ones."""
    newest: dict[bytes, Stored] = {}
    for one in store.rows():
        key = key_of(one.key or b"")
        before = newest.get(key)
        if before is None or before.version is None or one.version is None or one.version > before.version:
            newest[key] = one
    return {key: _row(written, key, one.row, one.version) for key, one in newest.items() if one.row is not None}
