"""What need not stay goes: old segments as a whole, and of closed segments of a compacted channel what was replaced.

Only closed segments are touched, so nobody who appends has to wait; one cleans at a time. Offsets stay as they are.
Readers hold open what they read, and find it whole however long they take.
"""

import fcntl
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise, takewhile
from pathlib import Path

from penstock.channels.files import mark as marks
from penstock.channels.files import segments
from penstock.channels.files.folder import replace, settle
from penstock.channels.files.frames import Damaged
from penstock.channels.files.segments import CHUNK, EVERY, HEADER
from penstock.core.clock import Micros

_KEYS = 1_000_000
"""About how many keys are looked at in one go: this is what compaction needs of memory."""
_TOMBSTONES = timedelta(days=1)
"""How long the record that deletes a key stays, so that slow readers hear of it."""

_NEVER: Micros = 1 << 62


def clean(folder: Path, now: Micros, keep: timedelta | None, compact_after: timedelta | None) -> None:
    """Clean a log, unless somebody is at it. OSError and Damaged leave it as it was, or partly cleaned: it is right."""
    with _cleaning(folder) as ours:
        if not ours:
            return
        for rest in folder.glob(".*.new"):
            rest.unlink()
        if keep is not None:
            _retire(folder, now - _micros(keep))
        if compact_after is not None:
            _compact(folder, now - _micros(compact_after), now - _micros(_TOMBSTONES))


def forget(folder: Path, before: int) -> None:
    """Take away the closed segments in which all offsets are smaller, unless somebody is at it."""
    with _cleaning(folder) as ours:
        if ours:
            for base, following in pairwise(segments.bases(folder)):
                if following > before:
                    return
                _take_away(folder, base)


def _retire(folder: Path, oldest: Micros) -> None:
    for base in _older(folder, oldest):
        _take_away(folder, base)


def _take_away(folder: Path, base: int) -> None:
    # The segment first: an index without one does no harm.
    segments.path(folder, base).unlink()
    segments.index_path(folder, base).unlink(missing_ok=True)


def _compact(folder: Path, oldest: Micros, tombstones: Micros) -> None:
    old = _older(folder, oldest)
    dirty = [base for base in old if not _is_compacted(folder, base)]
    while dirty:
        taken, last = _last_of_each_key(folder, dirty)
        # The older ones first: a segment counts as compacted only when nothing before it is replaced by it any more,
        # and so a record that deletes its key can go one day, without what it deletes coming back.
        for base in takewhile(lambda base: base <= taken[-1], old):  # noqa: B023
            _rewrite(folder, base, last, tombstones)
        dirty = dirty[len(taken) :]
    # A hole is a hole, with an empty segment or without; but the first one says where the log begins.
    for base in [base for base in old[1:] if segments.path(folder, base).stat().st_size <= HEADER]:
        _take_away(folder, base)


def _last_of_each_key(folder: Path, dirty: Sequence[int]) -> tuple[list[int], dict[bytes, int]]:
    taken: list[int] = []
    last: dict[bytes, int] = {}
    for base in dirty:
        with segments.opened(folder, base) as fd:
            for record in segments.walk(fd, HEADER, os.fstat(fd).st_size):
                if record.key is not None:
                    last[record.key] = record.offset
        taken.append(base)
        if len(last) >= _KEYS:
            break
    return taken, last


def _rewrite(folder: Path, base: int, last: Mapping[bytes, int], tombstones: Micros) -> None:
    with segments.opened(folder, base) as fd:
        size = os.fstat(fd).st_size
        runs: list[list[int]] = []
        index = bytearray()
        position = noted = HEADER
        for record in segments.walk(fd, HEADER, size):
            replaced = record.key is not None and last.get(record.key, record.offset) > record.offset
            if replaced or (record.deletes and record.key is not None and record.appended < tombstones):
                continue
            if runs and runs[-1][1] == record.position:
                runs[-1][1] = record.stop
            else:
                runs.append([record.position, record.stop])
            if position - noted >= EVERY:
                index += segments.entry(record.offset, record.appended, position)
                noted = position
            position += record.stop - record.position
        if position == size and segments.is_compacted(fd):
            return
        new = folder / f".{uuid.uuid4().hex}.new"
        try:
            with new.open("wb") as file:
                file.write(segments.header(compacted=True))
                for start, stop in runs:
                    for at in range(start, stop, CHUNK):
                        file.write(os.pread(fd, min(CHUNK, stop - at), at))
                file.flush()
                os.fsync(file.fileno())
            new.replace(segments.path(folder, base))
        finally:
            new.unlink(missing_ok=True)
        settle(folder)
        replace(segments.index_path(folder, base), bytes(index), lasting=False)


def _older(folder: Path, oldest: Micros) -> list[int]:
    """The closed segments, from the first on, in which nothing is younger than this."""
    with marks.path(folder).open("rb") as file:
        mark = marks.read(file.fileno())
    known = [base for base in segments.bases(folder) if mark is not None and base <= mark.base]
    return [base for base, _ in takewhile(lambda pair: _last(folder, *pair) <= oldest, pairwise(known))]


def _last(folder: Path, base: int, following: int) -> Micros:
    try:
        return segments.last_appended(folder, base) or 0
    except Damaged:
        return segments.first_appended(folder, following) or _NEVER  # It was not later than that.


def _is_compacted(folder: Path, base: int) -> bool:
    with segments.opened(folder, base) as fd:
        return segments.is_compacted(fd)


@contextmanager
def _cleaning(folder: Path) -> Iterator[bool]:
    fd = os.open(folder / "cleaning", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _micros(span: timedelta) -> Micros:
    return round(span.total_seconds() * 1e6)
