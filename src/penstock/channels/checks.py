"""Errors and differences that all binders report in the same way."""

from collections.abc import Collection, Iterator
from datetime import timedelta

from penstock.core.contracts import Topic
from penstock.core.errors import Unaccounted


def overtaken(channel: str, partition: int, stands: int, low: int) -> Unaccounted:
    why = (
        f"partition {partition} begins at offset {low}, and the reader is at {stands}: "
        f"retention has deleted {low - stands} offsets that it had not read"
    )
    return Unaccounted(channel, (), why)


def another(channel: str) -> Unaccounted:
    return Unaccounted(channel, (), "it was removed while it was read, and created again")


def beyond(channel: str, partition: int, stands: int, end: int) -> Unaccounted:
    why = (
        f"partition {partition} ends at offset {end}, and the reader is at {stands}: it is another channel, or it has "
        "lost records; to read it from its beginning, remove the store or ledger that reads it"
    )
    return Unaccounted(channel, (), why)


def differences(here: Topic, wanted: Topic, who: str, settings: Collection[str] = ()) -> Iterator[str]:
    """A sentence for each difference, for binders with one copy of each record; `settings` are those of the binder."""
    channel = f"channel {here.name}"
    if wanted.replicas is not None and wanted.replicas > 1:
        yield f"{channel} has 1 copy, and {wanted.replicas} replicas are declared"
    if here.partitions > wanted.partitions:
        yield f"{channel} has {here.partitions} partitions, and {wanted.partitions} are declared"
    if here.compacted != wanted.compacted:
        yield f"{channel} is {_compacted(here)}, and {_compacted(wanted)} is declared"
    if here.retention != wanted.retention:
        yield f"{channel} keeps its records {_kept(here)}, and {_kept(wanted)} is declared"
    for word in wanted.config:
        if word not in settings:
            yield f"{channel} has no {word}, which is declared: {who} knows {' and '.join(settings) or 'no settings'}"


def spelled(span: timedelta) -> str:
    """A duration in its largest whole unit."""
    for unit, size in _UNITS.items():
        if span >= size and not span % size:
            return f"{span // size} {unit}"
    return f"{span.total_seconds():f} s"


_UNITS = {
    "days": timedelta(days=1),
    "hours": timedelta(hours=1),
    "minutes": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def _compacted(topic: Topic) -> str:
    return "compacted" if topic.compacted else "not compacted"


def _kept(topic: Topic) -> str:
    return "forever" if topic.retention is None else f"for {spelled(topic.retention)}"
