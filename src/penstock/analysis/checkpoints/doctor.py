"""The checkpoint doctor: before each start, a query as it is now against what its checkpoint holds.

What may change between two starts is for Spark to say; what Spark does not look at is for us: other topics, an older
checkpoint, a sum that would go on as the sum of something else. What fits goes on. What does not is refused with a way
out, before a record is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from penstock.analysis.checkpoints.batches import covered, on_disk, told
from penstock.analysis.checkpoints.integrity import Written, written
from penstock.analysis.checkpoints.note import Fingerprint, Note, Operator, next_life, note_of
from penstock.audit.account import Account
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured

_SHUFFLE = "spark.sql.shuffle.partitions"

Planned = Callable[[Path, Written], str | None]
"""What Spark's own planner has against going on there."""
Fault = tuple[str, str]
"""What is wrong, and the ways out."""


class Fit(StrEnum):
    NEW = "new"
    FITS = "fits"
    UNSEEN = "not seen from here"
    """It lies where this machine cannot look: Spark decides alone."""
    REFUSED = "does not fit"


@dataclass(frozen=True)
class Known:
    """What is known of a query beside its checkpoint: as much of it as could be asked for."""

    topics: Mapping[str, str] = field(default_factory=dict)
    """The ids of the topics that it touches."""
    bounds: Mapping[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """What the channels hold that it reads: per partition, from which offset up to which."""
    account: Account | None = None
    """What it last said of itself."""
    setting: Callable[[str], str | None] = lambda _: None
    """What the session has set, by its name in Spark; None when it does not say."""
    skip_lost: bool = False
    """What was removed unread is to be passed over."""


@dataclass(frozen=True)
class Diagnosis:
    fit: Fit
    place: str
    note: Note
    problem: str = ""
    fix: str = ""
    remarks: tuple[str, ...] = ()
    in_batches_only: str | None = None
    """Why the query cannot go on in real time."""

    def __str__(self) -> str:
        """As `penstock plan` shows it."""
        if self.fit is Fit.REFUSED:
            return f"{self.fit}: {self.problem}; {self.fix}"
        return "; ".join([str(self.fit), *self.remarks])

    def require(self) -> Note:
        """The note to be left with the checkpoint when the query starts; Misconfigured when it must not."""
        if self.fit is Fit.REFUSED:
            raise Misconfigured(self.place, self.problem, self.fix)
        return self.note


def examine(name: str, folder: str, now: Fingerprint, known: Known, planned: Planned = lambda *_: None) -> Diagnosis:
    """Look at a checkpoint before its query starts. Nothing is changed by it."""
    place, path = f"query {name}, checkpoint {folder}", on_disk(folder)
    if path is None:
        return Diagnosis(Fit.UNSEEN, place, Note())
    try:
        note, found = note_of(folder), written(path)
    except Misconfigured as damaged:
        return Diagnosis(Fit.REFUSED, place, Note(), damaged.problem, _back_or_anew(name, "the file"))
    case = _Case(name, folder, note, known)
    faults = case.at_its_beginning() if found is None else case.faults(found, now, lambda: planned(path, found))
    if (fault := next(faults, None)) is not None:
        return Diagnosis(Fit.REFUSED, place, note, *fault)
    kept = note.touching(known.topics, now)
    if found is None:
        if known.bounds and note.began is None:
            lows = {name: {at: low for at, (low, _) in bounds.items()} for name, bounds in known.bounds.items()}
            kept = replace(kept, began=lows)
        if note.query in (None, now):
            return Diagnosis(Fit.NEW, place, kept)
        # In real time, rows are written before the first batch has ended: those of the query as it was are there.
        remark = "it has changed before it had finished a batch: its rows begin another life"
        try:
            return Diagnosis(
                Fit.NEW, place, replace(kept, generation=next_life(name, note.generation)), remarks=(remark,)
            )
        except Misconfigured as ended:
            return Diagnosis(Fit.REFUSED, place, note, ended.problem, ended.fix)
    remarks = tuple(_remarks(note.query, now, found, known.setting))
    why = "its checkpoint was begun in a format that Spark takes in micro-batches only" if found.numbered else None
    return Diagnosis(Fit.FITS, place, kept, remarks=remarks, in_batches_only=why)


def readable(name: str, folder: str) -> Note:
    """The note of a query's checkpoint; Misconfigured with the ways out when it cannot be read."""
    try:
        return note_of(folder)
    except Misconfigured as damaged:
        place = f"query {name}, checkpoint {folder}"
        raise Misconfigured(place, damaged.problem, _back_or_anew(name, "the file")) from damaged


def begin_anew(name: str) -> str:
    """The way out that there always is."""
    places = "beginning|MOMENT|CHANNEL:PARTITION=OFFSET,…"
    return f"begin anew: penstock run FILE --new-checkpoint {name} --from {places}"


def _back_or_anew(name: str, what: str) -> str:
    return f"bring {what} back from a copy, or {begin_anew(name)}"


@dataclass(frozen=True)
class _Case:
    name: str
    folder: str
    note: Note
    known: Known

    @cached_property
    def ends(self) -> Mapping[str, Offsets]:
        """How far the last committed batch has read."""
        return covered(self.folder) or {}

    def at_its_beginning(self) -> Iterator[Fault]:
        """What speaks against a start where no batch was begun yet."""
        yield from self._of_topics()
        yield from self._of_lives(None)

    def faults(self, found: Written, now: Fingerprint, planned: Callable[[], str | None]) -> Iterator[Fault]:
        """What speaks against going on, the plainest first."""
        changed = f"keep it as it was and give what is new another name, or {begin_anew(self.name)}"
        before = self.note.query
        yield from self._of_topics()
        if before is not None and before.into != now.into:
            problem = f"it wrote into {before.into}; {now.into} would hold only what changes from now on"
            yield problem, changed
        yield from ((problem, changed) for problem in _of_sources(found, before, now))
        yield from self._of_lives(found)
        yield from self._of_places()
        if before is not None:
            yield from ((problem, changed) for problem in _of_state(before.operators, now.operators))
        if (objection := planned()) is not None:
            yield objection, changed

    def _of_lives(self, found: Written | None) -> Iterator[Fault]:
        """Whether this is the checkpoint that the query has last told of, and whether it is as far."""
        account = self.known.account
        if account is None or self.note.generation > account.number:
            return
        ways = _back_or_anew(self.name, "the one that it had")
        if self.note.generation < account.number:
            # In real time, rows of that one are there before it has told of a batch.
            what = "its checkpoint is gone" if found is None else "the query has had another one since"
            yield f"{what}: its rows would pass for older than those of life {account.number}, for ever", ways
        elif not account.step:
            return
        elif found is None:
            yield f"its checkpoint is gone, and it has covered {_told(account)}: all would be counted again", ways
        elif found.id == account.generation:
            for channel, share in account.shares.items():
                stands = self.ends.get(channel, {})
                if behind := [at for at, until in share.until.items() if stands.get(at, 0) < until]:
                    covers = f"it stands at {told(stands)}" if stands else "nothing of it is committed"
                    problem = f"it is an older one: {covers} in {channel}, and the query has covered {_told(account)}"
                    yield f"{problem} (partition {_list(map(str, behind))})", ways
        elif self.note.query is not None:
            yield f"the query has had another one since, and has covered {_told(account)} with that", ways

    def _of_topics(self) -> Iterator[Fault]:
        for topic, known in self.note.topics.items():
            if self.known.topics.get(topic, known) != known:
                problem = f"it belongs to another topic {topic} than the one that is there now"
                yield problem, begin_anew(self.name)

    def _of_places(self) -> Iterator[Fault]:
        """Whether the channels still have the places where it stands."""
        anew = begin_anew(self.name)
        for channel, positions in self.ends.items():
            bounds = self.known.bounds.get(channel)
            if bounds is None:
                continue
            if gone := sorted(positions.keys() - bounds.keys()):
                yield f"it has read partition {_list(map(str, gone))} of {channel}, which has {len(bounds)} now", anew
            for partition in sorted(positions.keys() & bounds.keys()):
                stands, (first, end) = positions[partition], bounds[partition]
                where = f"{channel}, partition {partition}"
                if stands > end:
                    problem = f"it stands at {stands} of {where}, which ends at {end}"
                    yield f"{problem}: this is another channel of that name, or it has lost its end", anew
                if stands < first and not self.known.skip_lost:
                    problem = f"the offsets {stands}–{first - 1} of {where} were removed before it read them"
                    yield problem, f'pass them over by [channels] lost = "skip", or {anew}'


def _of_sources(found: Written, before: Fingerprint | None, now: Fingerprint) -> Iterator[str]:
    """Spark knows its sources by their place in the plan."""
    was = list(found.sources)
    if before is not None and len(before.sources) == len(was):
        was = [told or known for told, known in zip(was, before.sources, strict=True)]
    change = f"it has read {_list(one or '?' for one in was)}, and is to read {_list(now.sources)} now"
    if len(was) != len(now.sources):
        yield f"{change}: the number of its sources may not change"
    elif any(one not in (None, other) for one, other in zip(was, now.sources, strict=True)):
        same = None not in was and sorted(map(str, was)) == sorted(now.sources)
        yield f"{change}: {'their order' if same else 'what they are'} may not change"


def _of_state(before: tuple[Operator, ...], now: tuple[Operator, ...]) -> Iterator[str]:
    """What state there is, and what it means, has to stay."""
    had, has = ([one.kind for one in some] for some in (before, now))
    if had != has:
        yield f"its state is that of {_list(had) or 'nothing'}, and would be that of {_list(has) or 'nothing'}"
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
    """What is another now, and goes on all the same."""
    for name, kept in sorted((found.metadata.get("conf") or {}).items()):
        if (asked := setting(name)) not in (None, kept):
            other = "penstock state rescale changes it" if name == _SHUFFLE else "that takes a new checkpoint"
            yield f"it goes on with {name} = {kept} of its checkpoint, not with {asked}: {other}"
    if before is None:
        return
    if before.output != now.output:
        when = "whenever they change" if now.output == "update" else "once, when they are final"
        yield f"from now on its rows are written {when}"
    if before.plan != now.plan:
        yield "it has changed, but not its state: what comes from now on is affected, what it has counted is not"


def _told(account: Account) -> str:
    return _list(f"{channel} up to {told(share.until)}" for channel, share in account.shares.items())


def _list(some: Iterable[str]) -> str:
    return ", ".join(some)
