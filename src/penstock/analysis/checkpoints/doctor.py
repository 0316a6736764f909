"""Compare a query with its checkpoint before each start.

Spark's planner checks the schemas of the state. This module checks the rest: recreated topics, an older checkpoint, a
sum that would continue as the sum of another column. A query that does not fit is refused before it reads a record.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path

from penstock.analysis.checkpoints.batches import Written, covered, format_offsets, on_disk, written
from penstock.analysis.checkpoints.note import Fingerprint, Note, Operator, next_generation, note_of
from penstock.audit.account import Account
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured

_SHUFFLE = "spark.sql.shuffle.partitions"

Planned = Callable[[Path, Written], str | None]
"""Returns the objection of Spark's planner."""
Fault = tuple[str, str]
"""The problem, and the fix."""


class Fit(StrEnum):
    NEW = "new"
    FITS = "fits"
    UNSEEN = "not seen from here"
    """It is on a remote file system: only Spark checks it."""
    REFUSED = "does not fit"


@dataclass(frozen=True)
class Facts:
    """Facts about a query from outside of its checkpoint, as far as they are available."""

    topics: Mapping[str, str] = field(default_factory=dict)
    """The ids of its topics."""
    bounds: Mapping[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """The first and end offsets of its input channels, per partition."""
    account: Account | None = None
    """Its last account."""
    setting: Callable[[str], str | None] = lambda _: None
    """Returns a setting of the Spark session; None when it is not set."""
    skip_lost: bool = False
    """Skip records that were removed unread."""


@dataclass(frozen=True)
class Diagnosis:
    fit: Fit
    location: str
    note: Note
    problem: str = ""
    fix: str = ""
    remarks: tuple[str, ...] = ()
    in_batches_only: str | None = None
    """Why the query cannot continue in real time."""

    def __str__(self) -> str:
        """The text for `penstock plan`."""
        if self.fit is Fit.REFUSED:
            return f"{self.fit}: {self.problem}; {self.fix}"
        return "; ".join([str(self.fit), *self.remarks])

    def require(self) -> Note:
        """The note to write when the query starts; Misconfigured when it must not start."""
        if self.fit is Fit.REFUSED:
            raise Misconfigured(self.location, self.problem, self.fix)
        return self.note


def examine(name: str, folder: str, now: Fingerprint, facts: Facts, planned: Planned = lambda *_: None) -> Diagnosis:
    """Compare a checkpoint with its query. Changes nothing."""
    location, path = f"query {name}, checkpoint {folder}", on_disk(folder)
    if path is None:
        return Diagnosis(Fit.UNSEEN, location, Note())
    try:
        note, found = note_of(folder), written(path)
    except Misconfigured as damaged:
        return Diagnosis(Fit.REFUSED, location, Note(), damaged.problem, _back_or_anew(name, "the file"))
    case = _Case(name, folder, note, facts)
    if (fault := next(case.faults(found, now, partial(planned, path)), None)) is not None:
        return Diagnosis(Fit.REFUSED, location, note, *fault)
    kept = replace(note, topics={**note.topics, **facts.topics}, query=now)
    if found is None:
        if facts.bounds and note.began is None:
            lows = {name: {at: low for at, (low, _) in bounds.items()} for name, bounds in facts.bounds.items()}
            kept = replace(kept, began=lows)
        if note.query in (None, now):
            return Diagnosis(Fit.NEW, location, kept)
        # In real time, rows are written before the first batch ends: rows of the previous version may exist.
        try:
            kept = replace(kept, generation=next_generation(name, note.generation))
        except Misconfigured as ended:
            return Diagnosis(Fit.REFUSED, location, note, ended.problem, ended.fix)
        remark = "it changed before its first commit: it starts a new generation"
        return Diagnosis(Fit.NEW, location, kept, remarks=(remark,))
    remarks = tuple(_remarks(note.query, now, found, facts.setting))
    why = "its checkpoint was begun in a format that Spark takes in micro-batches only" if found.numbered else None
    return Diagnosis(Fit.FITS, location, kept, remarks=remarks, in_batches_only=why)


def readable(name: str, folder: str) -> Note:
    """The note of a query's checkpoint; Misconfigured with a fix when it cannot be read."""
    try:
        return note_of(folder)
    except Misconfigured as damaged:
        location = f"query {name}, checkpoint {folder}"
        raise Misconfigured(location, damaged.problem, _back_or_anew(name, "the file")) from damaged


def begin_anew(name: str) -> str:
    """The fix that is always possible."""
    locations = "beginning|MOMENT|CHANNEL:PARTITION=OFFSET,…"
    return f"begin anew: penstock run FILE --new-checkpoint {name} --from {locations}"


def _back_or_anew(name: str, what: str) -> str:
    return f"bring {what} back from a copy, or {begin_anew(name)}"


@dataclass(frozen=True)
class _Case:
    name: str
    folder: str
    note: Note
    facts: Facts

    @cached_property
    def ends(self) -> Mapping[str, Offsets]:
        """The end offsets of the last committed batch."""
        return covered(self.folder) or {}

    def faults(
        self, found: Written | None, now: Fingerprint, planned: Callable[[Written], str | None]
    ) -> Iterator[Fault]:
        """The faults of a checkpoint, the clearest first; without batches, `found` is None."""
        changed = f"keep the query unchanged and give the new one another name, or {begin_anew(self.name)}"
        before = self.note.query
        yield from self._of_topics()
        if found is None:
            yield from self._of_generations(None)
            return
        if before is not None and before.into != now.into:
            problem = f"it wrote into {before.into}; {now.into} would hold only rows that change from now on"
            yield problem, changed
        yield from ((problem, changed) for problem in _of_sources(found, before, now))
        yield from self._of_generations(found)
        yield from self._of_locations()
        if before is not None:
            yield from ((problem, changed) for problem in _of_state(before.operators, now.operators))
        if (objection := planned(found)) is not None:
            yield objection, changed

    def _of_generations(self, found: Written | None) -> Iterator[Fault]:
        """Compare the checkpoint with the last account: the same generation, and not older."""
        account = self.facts.account
        if account is None or self.note.generation > account.number:
            return
        fix = _back_or_anew(self.name, "the one that it had")
        if self.note.generation < account.number:
            # In real time, rows of that generation exist before its first account.
            what = "its checkpoint is missing" if found is None else "the query has had a newer one"
            yield f"{what}: its rows would always count as older than those of generation {account.number}", fix
        elif not account.step:
            return
        elif found is None:
            yield (
                f"its checkpoint is missing, and it has read {_reached(account)}: all would be counted again",
                fix,
            )
        elif found.id == account.generation:
            for channel, share in account.shares.items():
                stands = self.ends.get(channel, {})
                if behind := [at for at, until in share.until.items() if stands.get(at, 0) < until]:
                    covers = f"it is at {format_offsets(stands)}" if stands else "it has no commit"
                    problem = f"it is an older one: {covers} in {channel}, and the query has read {_reached(account)}"
                    yield f"{problem} (partition {_list(map(str, behind))})", fix
        elif self.note.query is not None:
            yield f"the query has had a newer one, and has read {_reached(account)} with it", fix

    def _of_topics(self) -> Iterator[Fault]:
        for topic, recorded in self.note.topics.items():
            if self.facts.topics.get(topic, recorded) != recorded:
                problem = f"the topic {topic} was recreated after this checkpoint"
                yield problem, begin_anew(self.name)

    def _of_locations(self) -> Iterator[Fault]:
        """Check that the channels still have the offsets of the checkpoint."""
        anew = begin_anew(self.name)
        for channel, positions in self.ends.items():
            bounds = self.facts.bounds.get(channel)
            if bounds is None:
                continue
            if gone := sorted(positions.keys() - bounds.keys()):
                yield f"it has read partition {_list(map(str, gone))} of {channel}, which now has {len(bounds)}", anew
            for partition in sorted(positions.keys() & bounds.keys()):
                stands, (first, end) = positions[partition], bounds[partition]
                where = f"{channel}, partition {partition}"
                if stands > end:
                    problem = f"it is at offset {stands} of {where}, which ends at {end}"
                    yield f"{problem}: the channel was recreated, or has lost its last records", anew
                if stands < first and not self.facts.skip_lost:
                    problem = f"the offsets {stands}–{first - 1} of {where} were removed before it read them"
                    yield problem, f'skip them with [channels] lost = "skip", or {anew}'


def _of_sources(found: Written, before: Fingerprint | None, now: Fingerprint) -> Iterator[str]:
    """Spark identifies sources by their order in the plan."""
    was = list(found.sources)
    if before is not None and len(before.sources) == len(was):
        was = [channel or source for channel, source in zip(was, before.sources, strict=True)]
    change = f"it read {_list(one or '?' for one in was)}, and now reads {_list(now.sources)}"
    if len(was) != len(now.sources):
        yield f"{change}: the number of its sources may not change"
    elif any(one not in (None, other) for one, other in zip(was, now.sources, strict=True)):
        same = None not in was and sorted(map(str, was)) == sorted(now.sources)
        yield f"{change}: {'the order of sources' if same else 'its sources'} may not change"


def _of_state(before: tuple[Operator, ...], now: tuple[Operator, ...]) -> Iterator[str]:
    """The operators with state must stay the same."""
    had, has = ([one.kind for one in some] for some in (before, now))
    if had != has:
        yield f"its state is of {_list(had) or 'no operator'}, and would be of {_list(has) or 'no operator'}"
        return
    for one, other in zip(before, now, strict=True):
        if one.keys != other.keys:
            yield f"its state ({one.kind}) is kept by {_list(one.keys)}, and would be kept by {_list(other.keys)}"
        if one.values != other.values:
            yield f"its state ({one.kind}) {_otherwise(one.values, other.values)}"


def _otherwise(had: tuple[str, ...], has: tuple[str, ...]) -> str:
    gone, come = ([one for one in some if one not in others] for some, others in ((had, has), (has, had)))
    if gone and come:
        return f"holds {_list(gone)}, and would hold {_list(come)}"
    if gone:
        return f"holds {_list(gone)}, and would hold it no longer"
    return f"does not hold {_list(come)}, and would" if come else f"holds {_list(had)} in another order than it would"


def _remarks(
    before: Fingerprint | None, now: Fingerprint, found: Written, setting: Callable[[str], str | None]
) -> Iterator[str]:
    """Changes that do not prevent the start."""
    for name, kept in sorted((found.metadata.get("conf") or {}).items()):
        if (current := setting(name)) not in (None, kept):
            other = "penstock state rescale changes it" if name == _SHUFFLE else "a change needs a new checkpoint"
            yield f"it uses {name} = {kept} of its checkpoint, not {current}: {other}"
    if before is None:
        return
    if before.output != now.output:
        when = "whenever they change" if now.output == "update" else "once, when they are final"
        yield f"from now on its rows are written {when}"
    if before.plan != now.plan:
        yield "it has changed, but not its state: the change applies to new records only"


def _reached(account: Account) -> str:
    return _list(f"{channel} up to {format_offsets(share.until)}" for channel, share in account.shares.items())


def _list(some: Iterable[str]) -> str:
    return ", ".join(some)
