"""The files of a partition: segments of records, named by their first offsets, and a sparse index beside each.

An index is an aid and no truth: an entry counts only when the record lies where it says. It is never synced, and who
finds none begins at the beginning of the segment.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct

from penstock.channels.files.frames import FRONT, Damaged, Outline, body_of, needed, outline
from penstock.core.clock import Micros

HEADER = 8
CHUNK = 1 << 18
EVERY = 1 << 16
"""An entry in the index about every so many bytes."""
_MAGIC = b"penlog\x01"
_WHOLE, _COMPACTED = b"\x00", b"\x01"
_NAME = re.compile(r"(\d{20})\.log")
_INDEX = Struct("<qqq")


def path(folder: Path, base: int) -> Path:
    return folder / f"{base:020d}.log"


def index_path(folder: Path, base: int) -> Path:
    return folder / f"{base:020d}.index"


def bases(folder: Path) -> list[int]:
    """The first offsets of the segments that are there, in order."""
    return sorted(int(match[1]) for one in folder.iterdir() if (match := _NAME.fullmatch(one.name)))


def header(compacted: bool = False) -> bytes:
    return _MAGIC + (_COMPACTED if compacted else _WHOLE)


def is_compacted(fd: int) -> bool:
    """Whether offsets may be missing in it. Damaged when it is no segment."""
    told = os.pread(fd, HEADER, 0)
    if told[:-1] != _MAGIC or told[-1:] not in (_WHOLE, _COMPACTED):
        raise Damaged(0, "it does not begin as a segment does")
    return told[-1:] == _COMPACTED


@contextmanager
def opened(folder: Path, base: int) -> Iterator[int]:
    fd = os.open(path(folder, base), os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def load(fd: int, position: int, limit: int) -> bytes:
    """A chunk that begins with a whole record, if one lies there; Damaged when it would reach over the limit."""
    chunk = os.pread(fd, min(CHUNK, limit - position), position)
    if (size := needed(chunk)) > len(chunk):
        if position + size > limit:
            raise Damaged(position, "it is torn")
        chunk = os.pread(fd, size, position)
        if len(chunk) < size:
            raise Damaged(position, "the file ends before it does")
    return chunk


def walk(fd: int, position: int, limit: int) -> Iterator[Outline]:
    """The records from a position to a limit, each checked. Damaged at what is no record."""
    while position < limit:
        chunk, start = load(fd, position, limit), position
        while (body := body_of(chunk, position - start, start)) is not None:
            found = outline(body, position)
            position = found.stop
            yield found


def reach(fd: int, offset: int, position: int, limit: int) -> tuple[int, int]:
    """Of the first record from a position on that has this offset or a later one, both; the end, if there is none."""
    at = offset
    try:
        for record in walk(fd, position, limit):
            if record.offset >= offset:
                return record.offset, record.position
            at, position = record.offset + 1, record.stop
    except Damaged as damage:
        # What is damaged before it is no matter of who begins behind it.
        if (found := _find(fd, offset, damage.position, limit)) is None:
            raise
        return offset, found
    return at, position


def _find(fd: int, offset: int, position: int, limit: int) -> int | None:
    """The position of the record with this offset, by its looks: behind damage, lengths lead nowhere."""
    looks = offset.to_bytes(8, "little")
    rest = os.pread(fd, limit - position, position)
    at = rest.find(looks, FRONT)
    while at >= 0:
        start = position + at - FRONT
        with suppress(Damaged):
            if next(walk(fd, start, limit)).offset == offset:
                return start
        at = rest.find(looks, at + 1)
    return None


def last_behind(fd: int, offset: int, position: int, limit: int) -> Outline | None:
    """The last whole record from a position on that has this offset or a later one, by its looks."""
    rest = os.pread(fd, limit - position, position)
    found = None
    for start in candidates(rest, offset):
        if found is None or position + start >= found.stop:
            with suppress(Damaged):
                body = body_of(rest, start, position)
                if body is not None and (record := outline(body, position + start)).offset >= offset:
                    found = record
    return found


def candidates(rest: bytes, offset: int) -> Iterator[int]:
    """Where a record may begin whose number is not far behind this one."""
    most = offset + len(rest) // FRONT
    same = 8 - ((most - offset).bit_length() + 7) // 8
    highest = {number.to_bytes(8, "little")[8 - same :] for number in (offset, most)}
    looks = b"|".join(re.escape(high) for high in sorted(highest))
    # Each byte may be the first; no record is empty, as what was never written would say.
    for match in re.finditer(rb"(?s)(?=(?!\0{4}).{%d}(?:%s))" % (FRONT + 8 - same, looks), rest):
        yield match.start()


def entry(offset: int, appended: Micros, position: int) -> bytes:
    """What an index says about one record."""
    return _INDEX.pack(offset, appended, position)


def note(folder: Path, base: int, offset: int, appended: Micros, position: int) -> None:
    """Write down where a record lies."""
    fd = os.open(index_path(folder, base), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(fd, entry(offset, appended, position), os.fstat(fd).st_size // _INDEX.size * _INDEX.size)
    finally:
        os.close(fd)


def before_offset(folder: Path, base: int, fd: int, offset: int) -> int:
    """A position before which this offset does not lie."""
    return _known(fd, base, [told for told in _index(folder, base) if told[0] <= offset])[1]


def before_moment(folder: Path, base: int, fd: int, timestamp: Micros, end: int) -> int:
    """An offset before the end, before which nothing was appended at this moment or later."""
    return _known(fd, base, [told for told in _index(folder, base) if told[1] < timestamp and told[0] < end])[0]


def _known(fd: int, base: int, entries: list[tuple[int, int, int]]) -> tuple[int, int]:
    if entries:
        offset, appended, position = max(entries)
        try:
            record = next(walk(fd, position, os.fstat(fd).st_size), None) if position >= HEADER else None
        except Damaged:
            record = None
        if record and (record.offset, record.appended) == (offset, appended):
            return offset, position
    return base, HEADER


def _index(folder: Path, base: int) -> Iterator[tuple[int, int, int]]:
    try:
        told = index_path(folder, base).read_bytes()
    except FileNotFoundError:
        return iter(())
    return _INDEX.iter_unpack(told[: len(told) // _INDEX.size * _INDEX.size])


def first_appended(folder: Path, base: int) -> Micros | None:
    """The time of the first record of a segment; None when it has none that is whole."""
    with opened(folder, base) as fd, suppress(Damaged):
        record = next(walk(fd, HEADER, os.fstat(fd).st_size), None)
        return record.appended if record else None
    return None


def last_appended(folder: Path, base: int) -> Micros | None:
    """The time of the last record of a closed segment; None when it has none."""
    with opened(folder, base) as fd:
        last = None
        for record in walk(fd, before_offset(folder, base, fd, 1 << 62), os.fstat(fd).st_size):
            last = record.appended
        return last


def holding(known: list[int], offset: int) -> int:
    """Of segments, in order, the one in which an offset lies; it is not before the first of them."""
    return known[bisect_right(known, offset) - 1]
