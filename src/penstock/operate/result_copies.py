"""The copies of a result's rows: its channel, the feed of its clients, and the stores that it is loaded into."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from penstock.analysis.query import Query
from penstock.analysis.replay import Row, Table, key_of
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.scan import scan
from penstock.deliver.feed import Feed
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.graph import store_node
from penstock.pipeline.stores import make_store
from penstock.stores.base import Contents, Stored


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
