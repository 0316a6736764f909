"""One log: records in order, with numbers of their own, in checksummed segments on disk, for many processes at once.

Who appends holds the lock of the log from the first byte until the sync has returned and the mark is raised. So nobody
ever writes behind bytes of which nobody knows whether they are safe:

- A process that dies in between leaves a tail behind the mark. Who comes next keeps its whole records, writes them once
  more, syncs them and raises the mark; what is torn it cuts off. Nobody was told that they are safe, and none is lost.
- A sync that fails is final. The kernel may have dropped the pages and taken them for clean, so a second sync would
  lie. What was written is cut off before the lock is given back, no reader has seen it, and this log takes no more.
- A disk that is full fails the write, not the sync: what was written is cut off, and the next call may find room.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from penstock.channels.files import mark as marks
from penstock.channels.files import segments
from penstock.channels.files.cursor import Cursor
from penstock.channels.files.folder import answering, settle
from penstock.channels.files.frames import pack
from penstock.channels.files.mark import Mark
from penstock.channels.files.recovery import Sync, begin, held
from penstock.channels.files.segments import EVERY, HEADER
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Entry
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.record import Record

SEGMENT = 64 << 20
_ROOM = 1 << 20


class Log:
    """A log in a folder. One thread at a time uses it; other threads and processes have their own of the same folder.

    `sync` makes a file safe; without one, records are acknowledged from the memory of the operating system.
    A segment ends when it has `segment` bytes, or is `turn` old.
    """

    def __init__(
        self,
        folder: Path,
        segment: int = SEGMENT,
        sync: Sync | None = os.fdatasync,
        turn: timedelta | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.folder = folder
        self._segment, self._sync = segment, sync
        self._turn = round(turn.total_seconds() * 1e6) if turn else None
        self._clock = clock or SystemClock()
        self._failed: PenstockError | None = None
        self._base, self._fd, self._born = -1, -1, 0
        self._cursor: Cursor | None = None
        self.rolled = False
        """A segment was closed since somebody has set this back: there may be something to clean."""
        with answering(folder):
            self._mark = os.open(marks.path(folder), os.O_RDWR)

    @staticmethod
    def make(folder: Path) -> None:
        """Make an empty log, unless there is one."""
        with answering(folder):
            folder.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                os.close(os.open(marks.path(folder), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
            settle(folder)
        with Log(folder) as log:
            log.tidy()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, records: Sequence[Record]) -> range:
        """Append in order; the offsets that they got. When this returns they are safe.

        Refused when one of them cannot be: none is in the log then. Unavailable when they could not be written, of
        which some may be in the log all the same.
        """
        if not records:
            return range(0)
        with self._alone() as mark:
            ahead = mark
            # Time never steps back within a log, whatever the clock does.
            now = max(self._clock.now(), mark.appended)
            # All of it before the first byte is written: where one is refused, nothing was appended.
            packed = list(_packed(records, mark.end, now))
            try:
                for some, count in packed:
                    if self._full(ahead):
                        self._make_safe(ahead)
                        ahead = self._roll(ahead)
                    ahead = self._write(ahead, some, count, now)
                self._make_safe(ahead)
            except BaseException:
                self._cut()
                raise
            return range(mark.end, ahead.end)

    def sync(self) -> None:
        """All that was appended is on disk when this returns, whoever appended it."""
        with self._alone():
            self._synced(self._fd)

    def read(self, offset: int, most_bytes: int = 1 << 20) -> Sequence[Entry]:
        """Entries from this offset on, of about so many bytes together; none when there are none yet.

        Quick for who goes on where the last call ended. Unaccounted when the offset is not kept, or is damaged.
        """
        if self._cursor is None or self._cursor.offset != offset:
            self._close_cursor()
            self._cursor = Cursor(self.folder, str(self.folder), 0, offset)
        with answering(self.folder):
            return self._cursor.take(1 << 62, most_bytes)

    def tidy(self) -> None:
        """See to what a process has left behind that died while it appended."""
        with self._alone():
            pass

    def bounds(self) -> tuple[int, int]:
        """The first offset that is kept, and the one that the next record will get."""
        with self._alone() as mark:
            return segments.bases(self.folder)[0], mark.end

    def close(self) -> None:
        self._close_cursor()
        for fd in (self._fd, self._mark):
            if fd >= 0:
                os.close(fd)
        self._fd = self._mark = -1

    # --- with the lock

    @contextmanager
    def _alone(self) -> Iterator[Mark]:
        if self._failed is not None:
            raise self._failed
        with answering(self.folder), held(self.folder, self._mark, self._synced) as mark:
            self._open(mark.base)
            yield mark

    def _open(self, base: int) -> None:
        if base == self._base:
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._base, self._fd = -1, -1
        self._fd = os.open(segments.path(self.folder, base), os.O_RDWR)
        self._base, self._born = base, 0

    def _write(self, ahead: Mark, packed: bytearray, count: int, now: Micros) -> Mark:
        stop = ahead.position + len(packed)
        left = memoryview(packed)
        while left:
            left = left[os.pwrite(self._fd, left, stop - len(left)) :]
        if ahead.position // EVERY != stop // EVERY:
            with suppress(OSError):
                segments.note(self.folder, self._base, ahead.end, now, ahead.position)
        return Mark(self._base, stop, ahead.end + count, now)

    def _make_safe(self, ahead: Mark) -> None:
        if self._sync is not None:
            self._synced(self._fd)
        marks.write(self._mark, ahead)

    def _synced(self, fd: int) -> None:
        try:
            (self._sync or os.fdatasync)(fd)
        except OSError as error:
            why = f"it could not be synced, which is final: {error.strerror or error}; see to the disk, and start again"
            self._failed = Unavailable(f"log {self.folder}", why)
            raise self._failed from error

    def _full(self, mark: Mark) -> bool:
        if mark.position <= HEADER:
            return False
        if self._turn is not None:
            self._born = self._born or segments.first_appended(self.folder, self._base) or 0
            if self._clock.now() - self._born > self._turn:
                return True
        return mark.position >= self._segment

    def _roll(self, mark: Mark) -> Mark:
        """Begin a new segment. The old one is synced, whatever the sender asks for: nobody will come back to it."""
        if self._sync is None:
            self._synced(self._fd)
        mark = begin(self.folder, mark.end, mark.appended)
        marks.write(self._mark, mark)
        self._open(mark.base)
        self.rolled = True
        return mark

    def _cut(self) -> None:
        """Take away what is behind the mark. Where that fails too, who comes next finds it there and sees to it."""
        with suppress(OSError):
            mark = marks.read(self._mark)
            if mark is not None and mark.base == self._base:
                os.ftruncate(self._fd, mark.position)

    def _close_cursor(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


def _packed(records: Sequence[Record], offset: int, now: Micros) -> Iterator[tuple[bytearray, int]]:
    done = 0
    while done < len(records):
        some, count = pack(records, done, offset + done, now, _ROOM)
        yield some, count
        done += count
