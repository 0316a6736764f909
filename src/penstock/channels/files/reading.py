"""Out of files: many logs at once, by looking at their marks, often while something comes and seldom while nothing."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.channels.checks import beyond
from penstock.channels.files import segments, topics
from penstock.channels.files.cursor import Cursor
from penstock.channels.files.folder import answering
from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, Entry, Offsets
from penstock.core.errors import PenstockError, Unaccounted

_SOON, _SELDOM = 0.001, 0.02
"""Seconds between two looks: at first, and after a while without anything."""
_NOTICE = 0.5
"""Seconds between two looks for new partitions."""
_PLENTY = 1 << 19
"""So many bytes are not kept waiting."""


class FilesReader:
    def __init__(
        self, root: Path, start: Mapping[str, Offsets], linger: float, only: Collection[ChannelPartition] | None
    ) -> None:
        self._root, self._linger, self._only = root, linger, only
        self._start = {channel: dict(positions) for channel, positions in start.items()}
        self._ids = {channel: topics.known(root, channel).id for channel in start}
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._cursors: dict[ChannelPartition, Cursor] = {}
        self._ended: dict[ChannelPartition, float] = {}
        self._turn = 0
        self._noticed = 0.0
        try:
            self._notice()
        except BaseException:
            self.close()
            raise

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        with answering(self._root):
            until = time.monotonic() + wait
            if self._linger:
                self._let_gather(until)
            pause = _SOON
            while True:
                if found := self._take(most):
                    return found
                if (left := until - time.monotonic()) <= 0:
                    return []
                time.sleep(min(left, pause))
                pause = min(2 * pause, _SELDOM)

    def positions(self, channel: str) -> Offsets:
        return {partition: cursor.offset for (name, partition), cursor in self._cursors.items() if name == channel}

    def age(self) -> float:
        now = time.monotonic()
        with answering(self._root):
            for place, cursor in self._cursors.items():
                if not cursor.waiting():
                    self._ended[place] = now
        return max((now - self._ended.get(place, float("-inf")) for place in self._cursors), default=0.0)

    def close(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()

    def _take(self, most: int) -> list[Entry]:
        if time.monotonic() - self._noticed > _NOTICE:
            self._notice()
        found: list[Entry] = []
        places = list(self._cursors)
        # Another one is the first each time: none has to wait until the others have nothing more.
        self._turn += 1
        for turn in range(len(places)):
            place = places[(turn + self._turn) % len(places)]
            try:
                found += self._cursors[place].take(most - len(found))
            except (PenstockError, OSError):
                if found:
                    break  # What the others had is not lost for it. It is said when this one is the first.
                raise
            if len(found) >= most:
                break
            self._ended[place] = time.monotonic()
        return found

    def _let_gather(self, until: float) -> None:
        """Wait while there is little, for as long as it may linger, from when there is something."""
        pause = min(_SELDOM, self._linger / 4)
        seen = None
        while (now := time.monotonic()) < until:
            waiting = sum(cursor.bytes_left() for cursor in self._cursors.values())
            if waiting and seen is None:
                seen = now
            if waiting >= _PLENTY or (seen is not None and now - seen >= self._linger):
                return
            time.sleep(min(pause, until - now))

    def _notice(self) -> None:
        """Begin with partitions that are new, at their beginning."""
        self._noticed = time.monotonic()
        for channel, positions in self._start.items():
            stamp = topics.stamp(self._root, channel)
            if stamp is None or stamp == self._stamps.get(channel):
                continue  # That a channel is gone is found out at its marks.
            known = topics.known(self._root, channel)
            if known.id != self._ids[channel]:
                continue
            for place in self._wanted(channel, known.topic.partitions):
                if place not in self._cursors:
                    folder = topics.partition(self._root, *place)
                    self._cursors[place] = Cursor(folder, *place, positions.get(place[1]))
            for partition, stands in positions.items():
                wanted = self._only is None or (channel, partition) in self._only
                if partition >= known.topic.partitions and stands > 0 and wanted:
                    raise beyond(channel, partition, stands, 0)
            self._stamps[channel] = stamp

    def _wanted(self, channel: str, partitions: int) -> Iterator[ChannelPartition]:
        for partition in range(partitions):
            if self._only is None or (channel, partition) in self._only:
                yield channel, partition


def since(folder: Path, timestamp: Micros) -> int:
    """The offset of the first entry of a log that was appended at this moment or later; its end, if there is none."""
    while True:
        known = segments.bases(folder)
        try:
            return _since(folder, known, timestamp)
        except (FileNotFoundError, Unaccounted):
            if segments.bases(folder) == known:
                raise  # Otherwise retention has taken a segment away from under us: look again.


def _since(folder: Path, known: Sequence[int], timestamp: Micros) -> int:
    cursor = Cursor(folder, str(folder), 0, None)
    try:
        end = cursor.mark().end
        for base in reversed(known):
            first = segments.first_appended(folder, base)
            if first is not None and first < timestamp:
                with segments.opened(folder, base) as fd:
                    cursor.offset = segments.before_moment(folder, base, fd, timestamp, end)
                break
        while entries := cursor.take(1_000):
            for entry in entries:
                if entry.appended >= timestamp:
                    return entry.offset
        return cursor.offset
    finally:
        cursor.close()
