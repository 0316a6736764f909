"""The lock of a log, and what its next holder does about a tail that the last one left behind."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.channels.files import mark as marks
from penstock.channels.files import segments
from penstock.channels.files.folder import settle
from penstock.channels.files.frames import Damaged
from penstock.channels.files.mark import Mark
from penstock.channels.files.segments import CHUNK, HEADER
from penstock.core.errors import Unaccounted, Unavailable

Sync = Callable[[int], None]


@contextmanager
def held(folder: Path, fd: int, sync: Sync, wait: bool = True) -> Iterator[Mark]:
    """Hold the lock of a log, by its open mark. BlockingIOError when somebody else has it and we do not wait."""
    with locked(fd, wait):
        if marks.gone(fd):
            raise Unavailable(f"channels in {folder}", "the channel was removed")
        mark = marks.read(fd)
        if mark is None or untidy(folder, mark):
            mark = recover(folder, mark, sync)
            marks.write(fd, mark)
        yield mark


@contextmanager
def locked(fd: int, wait: bool = True) -> Iterator[None]:
    fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def tidy(folder: Path, wait: bool) -> None:
    """See to a tail, for somebody who only reads; nothing happens where we may not, or somebody is at it."""
    try:
        fd = os.open(marks.path(folder), os.O_RDWR)
    except OSError:
        return
    try:
        with suppress(BlockingIOError), held(folder, fd, os.fdatasync, wait):
            pass
    finally:
        os.close(fd)


def untidy(folder: Path, mark: Mark) -> bool:
    """Something lies behind the mark, or not all before it."""
    try:
        if segments.path(folder, mark.base).stat().st_size != mark.position:
            return True
    except FileNotFoundError:
        return True
    return mark.end != mark.base and segments.path(folder, mark.end).exists()


def recover(folder: Path, mark: Mark | None, sync: Sync) -> Mark:
    """Settle the tail of a log; its mark. All segments but the last were settled when the next one began."""
    known = segments.bases(folder)
    if not known or (mark is not None and mark.base > known[-1]):
        # Somebody has taken files away. Numbers are never given twice: a reader may stand behind them.
        return begin(folder, mark.end if mark else 0, mark.appended if mark else 0)
    base = known[-1]
    if mark is None or mark.base != base:
        mark = Mark(base, HEADER, base, mark.appended if mark else _appended_before(folder, known))
    fd = os.open(segments.path(folder, base), os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        if size < HEADER and mark.end == base:
            os.pwrite(fd, segments.header(), 0)
            size = HEADER
        if size < mark.position:
            # What was acknowledged is not there. It stays as it is, for people to look at; readers will say it.
            return begin(folder, mark.end, mark.appended)
        found = _whole(folder, fd, mark, size)
        behind = segments.last_behind(fd, found.end, found.position, size)
        stop = behind.stop if behind else found.position
        _write_again(fd, mark.position, stop)
        os.ftruncate(fd, stop)
        sync(fd)
        # With a whole record behind it, damage is no torn tail: what follows may be acknowledged. Readers will say it.
        return begin(folder, behind.offset + 1, behind.appended) if behind else found
    finally:
        os.close(fd)


def begin(folder: Path, base: int, appended: int) -> Mark:
    """A new segment, that is there after a power cut too."""
    path = segments.path(folder, base)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.pwrite(fd, segments.header(), 0)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    settle(folder)
    return Mark(base, HEADER, base, appended)


def _whole(folder: Path, fd: int, mark: Mark, size: int) -> Mark:
    """The mark behind the last whole record."""
    try:
        compacted = segments.is_compacted(fd)
    except Damaged as error:
        raise unaccounted(str(folder), folder, mark.base, error, mark.end) from error
    position, end, appended = mark.position, mark.end, mark.appended
    with suppress(Damaged):
        for record in segments.walk(fd, position, size):
            if record.offset != end and (record.offset < end or not compacted):
                break
            position, end, appended = record.stop, record.offset + 1, record.appended
    return Mark(mark.base, position, end, appended)


def _write_again(fd: int, start: int, stop: int) -> None:
    """After a sync that failed the kernel takes pages for clean that are not on disk; so they are made dirty again."""
    for position in range(start, stop, CHUNK):
        os.pwrite(fd, os.pread(fd, min(CHUNK, stop - position), position), position)


def _appended_before(folder: Path, known: list[int]) -> int:
    with suppress(Damaged):
        return (segments.last_appended(folder, known[-2]) if len(known) > 1 else None) or 0
    return 0


def unaccounted(channel: str, folder: Path, base: int, damage: Damaged, offset: int) -> Unaccounted:
    why = (
        f"{segments.path(folder, base)} is damaged at byte {damage.position}, where the offset {offset} should lie: "
        f"{damage.why}; readers stop there. Stop the pipeline and run penstock repair: it takes out what is damaged"
    )
    return Unaccounted(channel, (), why)
