"""How far the files of a folder are read, and the cursor that tells it: bounded, however many files there are. No I/O.

The cursor of a record tells, for each file that may still grow, how far it was read when the record was taken. What it
need not tell file by file it tells by a moment: whatever was last changed before that, and is not listed, is done.
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

ROOMY = 1 << 10
"""So many bytes of a cursor may tell of files one by one; beyond that, those are forgotten that are done for."""
MOST = 8 << 10
"""A cursor lies beside each record: no one is ever longer."""
GONE = 10.0
"""Seconds until a file that is no longer there is given up: one that is just being renamed is seen nowhere."""
TICK = 1.0
"""Seconds by which the clocks of file systems may be coarse."""

Key = tuple[int, str]
"""When a file was last changed in any way, in nanoseconds, and its name."""


class Sight(NamedTuple):
    """A file as it lies there."""

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
    """A file, under whatever name: it is what begins with the same bytes, and has the same inode or the same name."""

    sight: Sight
    home: int
    """The inode that it had when it was met."""
    generation: int = 0
    """Tells it from another one that had this inode before: no two records may have the same mark."""
    offset: int = 0
    """The place behind the last record that was taken."""
    check: int | None = 0
    """The checksum of its first bytes, as far as they lie before the offset; None where it was forgotten."""
    flag: str = ""
    """`skip`: the offset lies in a line that is too long. `bad`: it cannot be read on."""
    visited: tuple[int, int] | None = None
    """Its size and when it was written, when it was last read."""
    complete: bool = False
    """Nothing in it was left when it was last read."""
    forgotten: bool = False
    gone: float | None = None
    """Since when it was neither seen nor written to."""
    recalled: bool = False
    """A former life has met it, and this one has not yet."""

    @property
    def name(self) -> str:
        return self.sight.name

    @property
    def unread(self) -> bool:
        return self.visited is None and not self.offset and not self.flag

    def has_news(self) -> bool:
        return self.sight.size > 0 and self.visited != (self.sight.size, self.sight.written)

    def entry(self) -> str:
        told = [*self.begins(), self.check, self.flag, self.offset]
        return json.dumps(told, separators=(",", ":"))

    def begins(self) -> list[object]:
        """How its entry begins."""
        inode = self.sight.inode
        return [self.name, inode, self.generation if self.home == inode else [self.home, self.generation]]

    def mark(self, check: int, state: str, offset: int) -> str:
        """That of its record before the offset: where it lies, whatever becomes of other files and of its name."""
        return f"{self.home}/{self.generation}/{check}/{state}/{offset}"


class Progress:
    """`renamed`: a file can get a name by which nobody would look for it. Then those that wait are listed, too."""

    def __init__(self, source: str, cursor: str | None, closed_after: float, renamed: bool = False) -> None:
        self.files: dict[int, File] = {}
        self._renamed = renamed
        self._source, self._closed_after = source, closed_after
        self._done: Key | None = None
        self._life = 0
        self._listed: dict[int, str] = {}
        """What the cursor tells, by inode; the file that was read last comes last."""
        self._unread: list[Key] = []
        self._first = True
        self._looked = 0.0
        if cursor is not None:
            self._remember(cursor)

    def _remember(self, cursor: str) -> None:
        try:
            told: Any = json.loads(cursor)
            if told["done"] is not None:
                self._done = int(told["done"][0]), str(told["done"][1])
            self._life = int(told["life"])
            for name, inode, generation, check, flag, offset in told["files"]:
                if int(offset) < 0 or "/" in str(name) or "\0" in str(name):
                    raise ValueError(name)
                sight = Sight(str(name), int(inode), 0, 0, 0)
                home, generation = generation if isinstance(generation, list) else (inode, generation)
                known = None if check is None else int(check)
                file = File(sight, int(home), int(generation), int(offset), known, str(flag), recalled=True)
                self.files[file.sight.inode] = file
                self._listed[file.sight.inode] = file.entry()
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            problem = "under its name the channel holds records of another source, not of files"
            raise Misconfigured(f"source {self._source}", problem, "give it another name") from error

    def knows(self, inode: int, name: str) -> bool:
        """Whether this is a file that was met before, under whatever name."""
        if (file := self.files.get(inode)) is None:
            return False
        # Of one that was not read, nothing but its name tells that its inode is not another file's by now.
        return not (file.recalled and file.unread) or _stem(name) == _stem(file.name)

    def meet(self, sights: Iterable[Sight], now: float, same: Callable[[Sight, File], bool]) -> list[File]:
        """Those that have something to read: first those that are known, then new ones, as they came.

        `now` is when it was begun to look. `same` tells whether what lies there begins as the file did.
        """
        self._looked = now
        seen = {sight.inode: sight for sight in sights}
        absent = {file.name: file for inode, file in self.files.items() if inode not in seen}
        for file in list(self.files.values()):
            sight = seen.get(file.sight.inode)
            # After a new start, the inode may be another file's.
            if sight is not None and file.visited is None and not file.unread and not same(sight, file):
                self.drop(file)
                absent[file.name] = file
                if sight.name == file.name:
                    log.warning("%s: %s is not what it was; it is read from its beginning", self._source, file.name)
        for inode, sight in seen.items():
            self._see(self.files.get(inode) or self._returned(sight, absent, same) or self._new(sight), sight)
        for inode, file in list(self.files.items()):
            if inode not in seen and file.gone is None:
                file.gone = now
        self._first = False
        self._unread = sorted(file.sight.key for file in self.files.values() if file.unread and file.sight.size)
        for key in self._unread[: bisect_left(self._unread, self._done or (0, ""))]:
            # By its time it seems to be done: a clock was set back.
            file = next(one for one in self.files.values() if one.sight.key == key)
            self._listed[file.sight.inode] = file.entry()
        if self._renamed:
            self._list_unread()
        news = [file for file in self.files.values() if file.has_news()]
        return sorted(news, key=lambda file: (file.unread, file.sight.key))

    def _list_unread(self) -> None:
        """As many as there is room for: before their turn comes they may be renamed, and this life may end."""
        room = ROOMY - sum(map(len, self._listed.values()))
        for file in sorted(self.files.values(), key=lambda file: file.sight.key):
            entry = file.entry()
            if file.unread and file.sight.size and file.sight.inode not in self._listed and len(entry) <= room:
                self._listed[file.sight.inode] = entry
                room -= len(entry)

    def _returned(self, sight: Sight, absent: dict[str, File], same: Callable[[Sight, File], bool]) -> File | None:
        """The file that this is under another inode: copied back, written anew by an editor, or compressed."""
        names = [sight.name] if sight.name in absent else []
        if sight.name.endswith(".gz"):
            names += [name for name in absent if _stem(name) == _stem(sight.name) and name != sight.name]
        for name in names:
            file = absent[name]
            if file.offset and same(sight, file):
                del absent[name]
                self.drop(file)
                file.visited = None
                self.files[sight.inode] = file
                return file
        return None

    def _new(self, sight: Sight) -> File:
        file = self.files[sight.inode] = File(sight, sight.inode, self._life)
        if self._first and self._done is not None and sight.key <= self._done:
            file.visited = sight.size, sight.written
            file.complete = file.forgotten = True
            if not sight.name.endswith(".gz"):
                file.offset, file.check = sight.size, None
        return file

    def _see(self, file: File, sight: Sight) -> None:
        before, file.sight, file.gone, file.recalled = file.sight, sight, None, False
        # One that is changed in any way would look like a new one to a new start.
        file.forgotten = file.forgotten and sight.key == before.key
        if not file.forgotten and (file.offset or file.flag):
            self._listed[sight.inode] = file.entry()

    def drop(self, file: File) -> None:
        """It is gone from its inode, which may soon be another file's."""
        self._outlive(file)
        if self.files.get(file.sight.inode) is file:
            del self.files[file.sight.inode]
            self._listed.pop(file.sight.inode, None)

    def anew(self, file: File) -> None:
        """It was cut, or is another one."""
        self._outlive(file)
        file.home, file.generation = file.sight.inode, self._life
        file.offset, file.check, file.flag = 0, 0, ""

    def _outlive(self, file: File) -> None:
        # Not simply the next number: a new start that learns of the same changes in another order has to give the same.
        self._life = max(self._life, file.generation + 1)

    def begin(self, file: File, now: float) -> str:
        """The file is read now: the cursors of its records begin with this, and end with `tail`."""
        at = bisect_left(self._unread, file.sight.key)
        if self._unread[at : at + 1] == [file.sight.key]:
            del self._unread[at]
        if not file.offset and not file.flag:
            # When it was met is nothing that a new start could know.
            file.generation = self._life
        self._listed.pop(file.sight.inode, None)
        self._forget(now)
        others = "".join(f"{entry}," for entry in self._listed.values())
        done = json.dumps(self._done, separators=(",", ":"))
        this = json.dumps(file.begins(), separators=(",", ":"))[:-1]
        return f'{{"done":{done},"life":{self._life},"files":[{others}{this},'

    def end(self, file: File) -> None:
        """It was read, as far as its offset tells."""
        file.forgotten = False
        if file.offset or file.flag:
            self._listed[file.sight.inode] = file.entry()
        elif file.unread:
            insort(self._unread, file.sight.key)

    def _forget(self, now: float) -> None:
        size = sum(map(len, self._listed.values()))
        waiting = False
        for inode in list(self._listed):
            if size <= ROOMY:
                return
            file = self.files[inode]
            if not file.complete or file.gone is not None or now - file.sight.written / 1e9 < self._closed_after:
                continue
            if self._unread and self._unread[0] <= file.sight.key:
                continue
            # What has come since the look began may have escaped it, and must not seem to be done.
            if self._looked - file.sight.changed / 1e9 < TICK:
                waiting = True
                continue
            size -= len(self._listed.pop(inode))
            file.forgotten = True
            self._done = max(self._done or file.sight.key, file.sight.key)
        if size > MOST:
            if waiting:
                raise TooYoung
            problem = f"{len(self._listed)} of its files may still grow, more than it can keep in mind"
            fix = 'say closed_after = "1 s" if they are complete when they come, or take fewer of them'
            raise Misconfigured(f"source {self._source}", problem, fix)


def _stem(name: str) -> str:
    """What the names of a log have in common, whose files are renamed before they are compressed."""
    return name.removesuffix(".gz").rstrip("0123456789.-_")


class TooYoung(Exception):
    """Raised when so many files have just come that it takes a moment until they can be told by their time."""


def tail(check: int, flag: str, offset: int) -> str:
    return f'{check},"{flag}",{offset}]]}}'


def checksum(begins: bytes, offset: int) -> int:
    """Of a file's first bytes, as far as they were taken: what follows may not have been written yet."""
    return zlib.crc32(begins[:offset])
