"""How a collector knows, after a crash, what its channel holds already.

A bookmark says which numbers were taken, and up to which positions of the channel this is complete. What the channel
holds beyond them is read from the channel itself. So the answer is exact, however old the bookmark is: the channel is
the truth, and a bookmark only saves reading all of it.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from penstock.collect.cursors import Finding, Trail, mark_in
from penstock.collect.numbers import Numbers
from penstock.collect.sorting import shed_by
from penstock.collect.sought import Sought
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Refused
from penstock.core.record import Origin, Record
from penstock.core.scan import Bounds, scan

log = logging.getLogger(__name__)


@dataclass
class Bookmark:
    """How far a collector is.

    Every record that lies before `positions` is in `numbers`, and every number in `numbers` survives a crash.
    `incarnation` is the collector's last life that may have numbered records; `heard`, when the last record came that
    survives a crash.
    """

    numbers: Numbers = field(default_factory=Numbers)
    positions: Mapping[str, Offsets] = field(default_factory=dict)
    incarnation: int = 0
    heard: Micros | None = None
    duplicates: int = 0
    """How many arrivals were there already, in all lives of the collector."""
    last: int = 0
    """The last number of that incarnation that survives a crash, together with all before it."""
    trail: Trail = field(default_factory=Trail)
    """How far the source is, where its records have cursors."""

    def add(self, source: str, origin: Origin | None) -> None:
        """A record of this origin is safe; the collector has the name of its source where it numbers itself."""
        if origin is None:
            return
        if origin.sender == source:
            if origin.epoch < 2**63 - 1:  # The next life has a number, too: somebody made this one up.
                self.incarnation = max(self.incarnation, origin.epoch)
            self.heard = max(self.heard or 0, origin.time)
        else:
            self.numbers.add(origin.sender, origin.epoch, origin.seq)

    def record(self, source: str) -> Record:
        """As it lies in the bookmarks channel."""
        runs: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for sender, epoch, found in self.numbers:
            runs.setdefault(sender, {})[str(epoch)] = list(found)
        document = {
            "incarnation": self.incarnation,
            "heard": self.heard,
            "duplicates": self.duplicates,
            "last": self.last,
            "cursor": self.trail.cursor,
            "recent": self.trail.recent,
            "beyond": self.trail.beyond,
            "positions": {
                channel: {str(partition): offset for partition, offset in positions.items()}
                for channel, positions in self.positions.items()
            },
            "runs": runs,
        }
        return Record(_dumped(document), key=source.encode())

    @classmethod
    def of(cls, value: bytes) -> "Bookmark":
        """Refused when it cannot be read."""
        try:
            document = _loaded(value)
            numbers = Numbers()
            for sender, epochs in document["runs"].items():
                # What is no text cannot be the name of a sender.
                sender.encode()
                for epoch, runs in epochs.items():
                    for first, last in runs:
                        numbers.add(sender, _number(int(epoch)), _number(first), _number(last))
            positions = {
                channel: {_number(int(partition)): _number(offset) for partition, offset in offsets.items()}
                for channel, offsets in document["positions"].items()
            }
            heard = document["heard"]
            return cls(
                numbers,
                positions,
                _number(document["incarnation"]),
                None if heard is None else _number(heard),
                _number(document.get("duplicates", 0)),
                _number(document.get("last", 0)),
                Trail.of(document),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Refused("a bookmark", f"it cannot be read: {error!r}") from error


def _number(told: object) -> int:
    """As an origin may hold it: what lies beyond could be read, but never be written again."""
    if type(told) is not int or not -(2**63) <= told < 2**63:
        raise ValueError(f"{told!r} is no number of 64 bits")
    return told


def _dumped(document: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(document)
    except TypeError:
        # A cursor may be any text, such as half of a pair of surrogates.
        return json.dumps(document).encode()


def _loaded(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.loads(value)


def recover(
    channels: Channels,
    bookmarks: str,
    source: str,
    watched: Sequence[str],
    waiting: Iterable[tuple[str, Record]] = (),
    heartbeats: str | None = None,
    sought: Sought | None = None,
) -> Bookmark:
    """The last bookmark of the source, brought up to the end of the channels that it fills. It blocks.

    `waiting` are records that are safe elsewhere, on their way into channels. `heartbeats`: the channel that tells
    which numbers were dropped on purpose before the first of these channels. They lie nowhere, and are no gap.
    `sought` is told what the channels hold beyond the bookmark.

    A bookmark that cannot be read, or that claims more than a channel holds (it was made anew, or lost its end), is not
    believed: then the whole channels are read.
    """
    bookmark = _last(channels, bookmarks, source)
    bounds = {channel: channels.bounds(channel) for channel in watched}
    if not _fits(bookmark.positions, bounds):
        log.warning("the bookmark of %s claims more than its channel holds: reading the whole channel", source)
        # Where the source was is believed all the same: what the channel lost, it would not give again by itself.
        bookmark = replace(bookmark, numbers=Numbers(), positions={}, last=0)
    finding = Finding(bookmark.trail, bookmark.incarnation, bookmark.last)
    for channel in watched:
        for entry in scan(channels, channel, bookmark.positions.get(channel), bounds[channel]):
            origin = Origin.read(entry.headers)
            bookmark.add(source, origin)
            if origin is not None and sought is not None:
                sought.see(channel, origin)
            if origin is not None and origin.sender == source:
                finding.add(origin.epoch, origin.seq, mark_in(entry.headers, entry.value))
    if heartbeats is not None:
        bounds[heartbeats] = channels.bounds(heartbeats)
        for entry in scan(channels, heartbeats, bookmark.positions.get(heartbeats), bounds[heartbeats]):
            _pass_over(shed_by(source, watched[0], entry.value), bookmark, finding)
    for channel, record in waiting:
        if channel in watched:
            bookmark.add(source, record.origin)
            if record.origin is not None and record.origin.sender == source:
                finding.add(record.origin.epoch, record.origin.seq, mark_in(record.extra, record.value))
        elif channel == heartbeats:
            _pass_over(shed_by(source, watched[0], record.value), bookmark, finding)
    finding.end()
    bookmark.positions = {
        channel: {partition: end for partition, (_, end) in partitions.items()}
        for channel, partitions in bounds.items()
    }
    return bookmark


def _pass_over(dropped: Iterable[tuple[int, int]], bookmark: Bookmark, finding: Finding) -> None:
    for epoch, seq in dropped:
        bookmark.incarnation = max(bookmark.incarnation, epoch)
        finding.add(epoch, seq)


def _last(channels: Channels, bookmarks: str, source: str) -> Bookmark:
    value: bytes | None = None
    for entry in scan(channels, bookmarks):
        if entry.key == source.encode():
            value = entry.value
    if value is None:
        return Bookmark()
    try:
        return Bookmark.of(value)
    except Refused as refused:
        log.warning("the bookmark of %s is not used, the whole channel is read: %s", source, refused)
        return Bookmark()


def _fits(positions: Mapping[str, Offsets], bounds: Mapping[str, Bounds]) -> bool:
    return all(
        offset <= bounds[channel].get(partition, (0, 0))[1]
        for channel, offsets in positions.items()
        if channel in bounds
        for partition, offset in offsets.items()
    )
