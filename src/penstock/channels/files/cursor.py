"""Where one reader stands in one log: it goes on from there, over the ends of segments and over holes."""

import os
from pathlib import Path

from penstock.channels.checks import beyond, overtaken
from penstock.channels.files import mark as marks
from penstock.channels.files import segments
from penstock.channels.files.frames import Damaged, Run, unpack
from penstock.channels.files.mark import Mark
from penstock.channels.files.recovery import tidy, unaccounted, untidy
from penstock.channels.files.segments import HEADER
from penstock.core.contracts import Entry
from penstock.core.errors import PenstockError, Unavailable

_AT_ONCE = 256


class Cursor:
    """Reads a log in the name of a channel and a partition. Holds open what it reads, so that cleaning hurts nobody."""

    def __init__(self, folder: Path, channel: str, partition: int, offset: int | None) -> None:
        """Stand at an offset; None is the beginning."""
        self._folder, self._channel, self._partition = folder, channel, partition
        self._mark_fd = os.open(marks.path(folder), os.O_RDONLY)
        self._fd, self._base, self._following = -1, -1, -1
        self._chunk, self._start, self._at = b"", 0, 0
        self._run = Run(0, whole=True)
        self._took = 0
        try:
            mark = marks.read(self._mark_fd)
            if mark is None or untidy(folder, mark):
                tidy(folder, wait=mark is None)
            self.offset = next(iter(segments.bases(folder)), 0) if offset is None else offset
            """The next to be read."""
        except BaseException:
            self.close()
            raise

    def mark(self) -> Mark:
        """Up to where the log is acknowledged, now."""
        found = marks.read(self._mark_fd)
        if found is None:
            tidy(self._folder, wait=True)
            found = marks.read(self._mark_fd)
        if found is None:
            raise Unavailable(f"log {self._folder}", "it has no mark, and we may not write one")
        return found

    def waiting(self) -> bool:
        """There is something to read."""
        return self.offset < self.mark().end

    def bytes_left(self) -> int:
        """About how much there is to read."""
        mark = self.mark()
        if self.offset >= mark.end:
            return 0
        return max(1, mark.position - self._start - self._at) if self._base == mark.base else segments.CHUNK

    def take(self, most: int, most_bytes: int = 1 << 62) -> list[Entry]:
        """Up to `most` entries, of about so many bytes together; none when there are none."""
        found: list[Entry] = []
        try:
            while len(found) < most and most_bytes > 0 and (some := self._some(min(most - len(found), _AT_ONCE))):
                found += some
                most_bytes -= self._took
        except (PenstockError, OSError):
            if not found:
                raise
            # It stands there, and the next call says it: what came before is not lost for it.
        return found

    def _some(self, most: int) -> list[Entry]:
        mark = self.mark()
        if self.offset >= mark.end:
            self._check_end(mark)
            return []
        try:
            return self._take(mark, most)
        except Damaged as error:
            if self.mark().base != mark.base:
                # The segment was closed meanwhile, and may be another file: it was held against an older mark.
                self._leave()
                return self._some(most)
            # It stays where it is: each further call says the same.
            offset = max(self._run.offset, self.offset)
            self._leave()
            raise unaccounted(self._channel, self._folder, self._base, error, offset) from error
        except BaseException:
            self._leave()  # Half-way somewhere: the next call seeks anew.
            raise

    def close(self) -> None:
        self._leave()
        os.close(self._mark_fd)

    def _take(self, mark: Mark, most: int) -> list[Entry]:
        while self._fd < 0:
            self._seek(mark)
        while self.offset < mark.end:
            began, place = self._at, (self._channel, self._partition)
            entries, self._at = unpack(self._chunk, began, self._start, most, self._run, *place)
            if entries:
                self._took = self._at - began
                self.offset = entries[-1].offset + 1
                return entries
            position = self._start + self._at
            if position < (limit := self._limit(mark)):
                self._chunk, self._start, self._at = segments.load(self._fd, position, limit), position, 0
            else:
                self._next_segment(mark)
        return []

    def _seek(self, mark: Mark) -> None:
        """Open the segment in which the offset lies, and stand at it; at the first behind it, if it lies in a hole."""
        known = segments.bases(self._folder)
        if not known or self.offset < known[0]:
            raise overtaken(self._channel, self._partition, self.offset, known[0] if known else mark.end)
        base = segments.holding(known, self.offset)
        self._open(base)
        if self._fd >= 0:
            near = segments.before_offset(self._folder, base, self._fd, self.offset)
            self._run.offset, self._start = segments.reach(self._fd, self.offset, near, self._limit(mark))

    def _limit(self, mark: Mark) -> int:
        return mark.position if mark.base == self._base else os.fstat(self._fd).st_size

    def _open(self, base: int) -> None:
        self._leave()
        self._base = base
        self._following = _after(segments.bases(self._folder), base)
        try:
            self._fd = os.open(segments.path(self._folder, base), os.O_RDONLY)
        except FileNotFoundError:
            self._check_there()
            return  # Retention was quicker; the next look at what is there tells.
        self._check_there()
        self._chunk, self._start, self._at = b"", HEADER, 0
        self._run = Run(base, whole=True)
        self._run.whole = not segments.is_compacted(self._fd)

    def _next_segment(self, mark: Mark) -> None:
        """Go over to the next segment; Damaged when there should be one, or more in this one."""
        position, expected = self._start + self._at, self._run.offset
        if self._base == mark.base:
            raise Damaged(position, f"the log is acknowledged up to {mark.end}, and ends before it")
        known = segments.bases(self._folder)
        self._check_there()
        following = _after(known, self._base)
        if following < 0:
            raise Damaged(position, f"the log is acknowledged up to {mark.end}, and the next segment is gone")
        if following != (expected if self._run.whole else self._following) and known[0] > self._base:
            raise overtaken(self._channel, self._partition, self.offset, following)
        if self._run.whole and following != expected and not self._emptied(known):
            raise Damaged(position, f"the segment ends before it, and the next one begins at {following}")
        self._open(following)
        self.offset = max(self.offset, following)
        while self._fd < 0:
            self._seek(mark)

    def _emptied(self, known: list[int]) -> bool:
        """Compaction has left nothing of what should lie here, and took the empty segment away."""
        try:
            with segments.opened(self._folder, segments.holding(known, self.offset)) as fd:
                return segments.is_compacted(fd)
        except FileNotFoundError:
            return True  # Retention is here by now, and was not when the empty one was gone already.

    def _leave(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._chunk = b""

    def _check_there(self) -> None:
        """By now another channel may have our name and folder: what was opened there is none of ours."""
        if marks.gone(self._mark_fd):
            raise Unavailable(f"channel {self._channel}", "it was removed while it was read")

    def _check_end(self, mark: Mark) -> None:
        self._check_there()
        if self.offset > mark.end:
            # After a power cut the mark may lag behind what is on disk.
            tidy(self._folder, wait=True)
            if self.offset > (end := self.mark().end):
                raise beyond(self._channel, self._partition, self.offset, end)


def _after(known: list[int], base: int) -> int:
    """The segment that follows; -1, when there is none."""
    return next((other for other in known if other > base), -1)


def bounds_of(folder: Path) -> tuple[int, int]:
    """The first offset of a log that is kept, and the one that the next record will get."""
    cursor = Cursor(folder, str(folder), 0, None)
    try:
        return cursor.offset, cursor.mark().end
    finally:
        cursor.close()
