"""Recompute a query as a batch over the retained log, and compare the rows with its result.

Live results change during the comparison. So the order of reading bounds them: first the committed offsets of the
query, then the rows, then the end offsets of the log. A row must lie between the batches up to both.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.checkpoints.doctor import begin_anew
from penstock.analysis.checkpoints.note import Note, note_of
from penstock.analysis.engine import Engine, OffsetRanges
from penstock.analysis.query import Query
from penstock.analysis.replay import (
    Comparison,
    Excuse,
    Expected,
    How,
    Row,
    Until,
    Verdict,
    bare,
    comes_when_final,
    compare,
    kept,
    named,
    recomputed,
    require_repeatable,
)
from penstock.audit.account import Account, Outcome
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.record import generation_and_count
from penstock.operate.comparison import Gone, Judged, Report
from penstock.operate.result_copies import Holder, Written, copies_of_result
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.run.accounts import last_accounts

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
        judged.append(_judged(holder, expected, _excuse(holder, written, final, now, note.generation), late, missing))
    marks = _marks(judged)
    if marks:
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
    _require_same(query, found, ends())
    return found


def _require_same(query: Query, found: Until, ends: Until) -> None:
    """Raise Misconfigured if the checkpoint is ahead of its channel: it belongs to another one of that name."""
    for name, until in found.items():
        for partition, offset in until.items():
            if offset > ends[name][partition]:
                raise Misconfigured(
                    f"query {query.name}",
                    f"it has covered {name} up to {offset} in partition {partition}, which ends at "
                    f"{ends[name][partition]}: this is another channel of the same name",
                    begin_anew(query.name),
                )


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


def _judged(
    holder: Holder, expected: Expected, excuse: Excuse, late: "_Late", missing: Mapping[bytes, int] | None
) -> Judged:
    found = compare(holder.rows, expected, excuse)
    explained = late.explains(found) and (
        missing is None or all(missing.get(one.key) == one.short for one in found.differences)
    )
    return Judged(holder.name, found.counts, found.differences, explained)


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
        if not all(short) or not any(short):
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


def _marks(judged: Sequence[Judged]) -> list[int]:
    """Return the checksums of the first rows that differ by one record; each once, also if several copies differ."""
    marks = (one.mark for holder in judged for one in holder.differences)
    return [mark for mark in dict.fromkeys(marks) if mark is not None][:_NAMED]
