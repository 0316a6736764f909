"""How far the files of a folder were read, and the cursor that holds this. Bounded for any number of files. No I/O.

The cursor of a record has, for each file that may still grow, the offset up to which it was read. The other files are
described by a time: a file that was last changed before it, and is not listed, was read to its end.
"""

import json
import logging
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.core.errors import Misconfigured

log = logging.getLogger(__name__)

CURSOR_TARGET = 1 << 10
"""Bytes of a cursor. Above it, files that were read to their end are removed from the list."""
MAX_CURSOR = 8 << 10
"""The limit of a cursor: each record has one in its headers."""
REMOVED_AFTER = 10.0
"""Seconds until a missing file counts as removed: during a rename, it is missing for a moment."""
TICK = 1.0
"""The resolution of file times in seconds, on coarse file systems."""

Key = tuple[int, str]
"""When the inode of a file was last changed, in nanoseconds, and its name."""


class FileStat(NamedTuple):
    """The state of a file on disk."""

    name: str
    inode: int
    changed: int
    written: int
    size: int

    @property
    def key(self) -> Key:
        return self.changed, self.name


@dataclass(slots=True, eq=False)
class File:
    """A file, also after a rename: it has the same first bytes, and the same inode or the same name."""

    info: FileStat
    first_inode: int
    """The inode that it had when it was first seen."""
    generation: int = 0
    """Distinguishes it from an earlier file with this inode: each record needs its own dedup key."""
    offset: int = 0
    """The offset after the last record that was read."""
    check: int | None = 0
    """The checksum of its first bytes, up to the offset; None if it is unknown."""
    flag: str = ""
    """`skip`: the offset is in a line that is too long. `bad`: the rest is corrupt."""
    visited: tuple[int, int] | None = None
    """Its size and its modification time, when it was last read."""
    complete: bool = False
    """It was read to its end."""
    forgotten: bool = False
    missing_at: float | None = None
    """Since when it is missing and was not written."""
    from_cursor: bool = False
    """Known from the cursor, and not seen yet by this process."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def unread(self) -> bool:
        return self.visited is None and not self.offset and not self.flag

    def has_news(self) -> bool:
        return self.info.size > 0 and self.visited != (self.info.size, self.info.written)

    def entry(self) -> str:
        document = [*self.begins(), self.check, self.flag, self.offset]
        return json.dumps(document, separators=(",", ":"))

    def begins(self) -> list[object]:
        """The first fields of its entry."""
        inode = self.info.inode
        return [self.name, inode, self.generation if self.first_inode == inode else [self.first_inode, self.generation]]

    def dedup_key(self, check: int, state: str, offset: int) -> str:
        """The dedup key of the record before the offset. It does not change with a rename or with other files."""
        return f"{self.first_inode}/{self.generation}/{check}/{state}/{offset}"


class Progress:
    """`renamed`: a file can get a name that the pattern does not match. Then unread files are listed, too."""

    def __init__(self, source: str, cursor: str | None, closed_after: float, renamed: bool = False) -> None:
        self.files: dict[int, File] = {}
        self._renamed = renamed
        self._source, self._closed_after = source, closed_after
        self._done: Key | None = None
        self._generation = 0
        self._listed: dict[int, str] = {}
        """The entries of the cursor, by inode; the file that was read last comes last."""
        self._unread: list[Key] = []
        self._first = True
        self._scanned_at = 0.0
        if cursor is not None:
            self._remember(cursor)

    def _remember(self, cursor: str) -> None:
        try:
            document: Any = json.loads(cursor)
            if document["done"] is not None:
                self._done = int(document["done"][0]), str(document["done"][1])
            self._generation = int(document["life"])
            for name, inode, generation, check, flag, offset in document["files"]:
                if int(offset) < 0 or "/" in str(name) or "\0" in str(name):
                    raise ValueError(name)
                info = FileStat(str(name), int(inode), 0, 0, 0)
                first_inode, generation = generation if isinstance(generation, list) else (inode, generation)
                checksum = None if check is None else int(check)
                file = File(info, int(first_inode), int(generation), int(offset), checksum, str(flag), from_cursor=True)
                self.files[file.info.inode] = file
                self._listed[file.info.inode] = file.entry()
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            problem = "the channel has records of another kind of source with this name"
            raise Misconfigured(f"source {self._source}", problem, "give it another name") from error

    def is_tracked(self, inode: int, name: str) -> bool:
        """Whether this file was seen before, perhaps with another name."""
        if (file := self.files.get(inode)) is None:
            return False
        # For an unread file, only the name shows that the inode was not reused.
        return not (file.from_cursor and file.unread) or _stem(name) == _stem(file.name)

    def update(
        self, list_files: Iterable[FileStat], now: float, is_same: Callable[[FileStat, File], bool]
    ) -> list[File]:
        """The files with something to read: first known ones, then new ones by time.

        `now`: when the scan started. `is_same`: whether the file on disk has the first bytes of the known file.
        """
        self._scanned_at = now
        seen = {info.inode: info for info in list_files}
        missing = {file.name: file for inode, file in self.files.items() if inode not in seen}
        for file in list(self.files.values()):
            info = seen.get(file.info.inode)
            # After a restart, the inode may have been reused.
            if info is not None and file.visited is None and not file.unread and not is_same(info, file):
                self.drop(file)
                missing[file.name] = file
                if info.name == file.name:
                    log.warning("%s: %s was replaced; it is read from its beginning", self._source, file.name)
        for inode, info in seen.items():
            self._seen(self.files.get(inode) or self._returned(info, missing, is_same) or self._new(info), info)
        for inode, file in list(self.files.items()):
            if inode not in seen and file.missing_at is None:
                file.missing_at = now
        self._first = False
        self._unread = sorted(file.info.key for file in self.files.values() if file.unread and file.info.size)
        for key in self._unread[: bisect_left(self._unread, self._done or (0, ""))]:
            # Its time is before the end time of the cursor: a clock was set back.
            file = next(one for one in self.files.values() if one.info.key == key)
            self._listed[file.info.inode] = file.entry()
        if self._renamed:
            self._list_unread()
        news = [file for file in self.files.values() if file.has_news()]
        return sorted(news, key=lambda file: (file.unread, file.info.key))

    def _list_unread(self) -> None:
        """List unread files while there is space: they may be renamed, and this process may crash."""
        room = CURSOR_TARGET - sum(map(len, self._listed.values()))
        for file in sorted(self.files.values(), key=lambda file: file.info.key):
            entry = file.entry()
            if file.unread and file.info.size and file.info.inode not in self._listed and len(entry) <= room:
                self._listed[file.info.inode] = entry
                room -= len(entry)

    def _returned(
        self, info: FileStat, missing: dict[str, File], is_same: Callable[[FileStat, File], bool]
    ) -> File | None:
        """The known file with another inode: copied back, rewritten by an editor, or compressed."""
        names = [info.name] if info.name in missing else []
        if info.name.endswith(".gz"):
            names += [name for name in missing if _stem(name) == _stem(info.name) and name != info.name]
        for name in names:
            file = missing[name]
            if file.offset and is_same(info, file):
                del missing[name]
                self.drop(file)
                file.visited = None
                self.files[info.inode] = file
                return file
        return None

    def _new(self, info: FileStat) -> File:
        file = self.files[info.inode] = File(info, info.inode, self._generation)
        if self._first and self._done is not None and info.key <= self._done:
            file.visited = info.size, info.written
            file.complete = file.forgotten = True
            if not info.name.endswith(".gz"):
                file.offset, file.check = info.size, None
        return file

    def _seen(self, file: File, info: FileStat) -> None:
        before, file.info, file.missing_at, file.from_cursor = file.info, info, None, False
        # After a restart, a file with a newer time would look like a new one.
        file.forgotten = file.forgotten and info.key == before.key
        if not file.forgotten and (file.offset or file.flag):
            self._listed[info.inode] = file.entry()

    def drop(self, file: File) -> None:
        """Forget a file: its inode may be reused."""
        self._advance_generation(file)
        if self.files.get(file.info.inode) is file:
            del self.files[file.info.inode]
            self._listed.pop(file.info.inode, None)

    def reset(self, file: File) -> None:
        """Read a file from its beginning: it was truncated or replaced."""
        self._advance_generation(file)
        file.first_inode, file.generation = file.info.inode, self._generation
        file.offset, file.check, file.flag = 0, 0, ""

    def _advance_generation(self, file: File) -> None:
        # Not a counter: a restart that sees the same changes in another order must give the same generation.
        self._generation = max(self._generation, file.generation + 1)

    def begin(self, file: File, now: float) -> str:
        """Start to read a file. Return the start of the cursors of its records; `tail` is the end."""
        at = bisect_left(self._unread, file.info.key)
        if self._unread[at : at + 1] == [file.info.key]:
            del self._unread[at]
        if not file.offset and not file.flag:
            # A restart does not know when the file was first seen.
            file.generation = self._generation
        self._listed.pop(file.info.inode, None)
        self._forget(now)
        others = "".join(f"{entry}," for entry in self._listed.values())
        done = json.dumps(self._done, separators=(",", ":"))
        this = json.dumps(file.begins(), separators=(",", ":"))[:-1]
        return f'{{"done":{done},"life":{self._generation},"files":[{others}{this},'

    def end(self, file: File) -> None:
        """Finish reading a file."""
        file.forgotten = False
        if file.offset or file.flag:
            self._listed[file.info.inode] = file.entry()
        elif file.unread:
            insort(self._unread, file.info.key)

    def _forget(self, now: float) -> None:
        size = sum(map(len, self._listed.values()))
        waiting = False
        for inode in list(self._listed):
            if size <= CURSOR_TARGET:
                return
            file = self.files[inode]
            if not file.complete or file.missing_at is not None or now - file.info.written / 1e9 < self._closed_after:
                continue
            if self._unread and self._unread[0] <= file.info.key:
                continue
            # A file that was created after the scan started must not count as read.
            if self._scanned_at - file.info.changed / 1e9 < TICK:
                waiting = True
                continue
            size -= len(self._listed.pop(inode))
            file.forgotten = True
            self._done = max(self._done or file.info.key, file.info.key)
        if size > MAX_CURSOR:
            if waiting:
                raise TooRecent
            problem = f"{len(self._listed)} files may still grow, too many for the cursor"
            fix = 'set closed_after = "1 s" if files are complete when they appear, or select fewer files'
            raise Misconfigured(f"source {self._source}", problem, fix)


def _stem(name: str) -> str:
    """The common part of the names of a rotated log file."""
    return name.removesuffix(".gz").rstrip("0123456789.-_")


class TooRecent(Exception):
    """Raised when so many files are new that their times cannot distinguish them yet."""


def tail(check: int, flag: str, offset: int) -> str:
    return f'{check},"{flag}",{offset}]]}}'


def checksum(begins: bytes, offset: int) -> int:
    """The checksum of the first bytes of a file, up to the offset."""
    return zlib.crc32(begins[:offset])
