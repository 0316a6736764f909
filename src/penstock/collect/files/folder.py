"""Files as they lie on disk: what is there, and their bytes. All of it may block, and runs in a thread."""

import fnmatch
import gzip
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from penstock.collect.files.progress import File, Sight, checksum
from penstock.core.errors import Misconfigured, Unavailable

MOST_FILES = 100_000
OPEN = 32
"""So many files stay open: those that are removed while they are read are still read to their end."""
STEP = 4 << 20


class Spoilt(Exception):
    """Raised when compressed data cannot be read on; `early` when it only ends too early."""

    def __init__(self, why: str, early: bool) -> None:
        super().__init__(why, early)
        self.why, self.early = why, early


class Content(Protocol):
    """An open file."""

    size: int
    written: int

    def begins(self, most: int) -> bytes:
        """Its first bytes."""

    def seek(self, offset: int) -> bool:
        """Go on there, or somewhat nearer to it: whether it is reached."""

    def read(self, most: int) -> bytes:
        """What follows, up to the end that the file had when it was opened."""


class Plain:
    def __init__(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.size, self.written = found.st_size, found.st_mtime_ns
        self._descriptor, self._at = descriptor, 0

    def begins(self, most: int) -> bytes:
        return os.pread(self._descriptor, min(most, self.size), 0)

    def seek(self, offset: int) -> bool:
        self._at = offset
        return True

    def read(self, most: int) -> bytes:
        data = os.pread(self._descriptor, max(0, min(most, self.size - self._at)), self._at)
        self._at += len(data)
        return data


class Compressed:
    """What a .gz file holds. A step of it takes bounded memory, however much it becomes."""

    def __init__(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.size, self.written = found.st_size, found.st_mtime_ns
        self._raw: IO[bytes] = os.fdopen(os.dup(descriptor), "rb")
        self._raw.seek(0)
        self._zip = gzip.GzipFile(fileobj=self._raw, mode="rb")

    def begins(self, most: int) -> bytes:
        self._zip.seek(0)
        data = b""
        while len(data) < most and (more := self.read(most - len(data))):
            data += more
        self._zip.seek(0)
        return data

    def seek(self, offset: int) -> bool:
        missing = offset - self._zip.tell()
        return missing <= 0 or not self.read(min(missing, STEP)) or self._zip.tell() >= offset

    def read(self, most: int) -> bytes:
        try:
            return self._zip.read(most)
        except EOFError as error:
            raise Spoilt("its compressed data ends in the middle", early=True) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise Spoilt(f"its compressed data is damaged: {error}", early=False) from error

    def close(self) -> None:
        self._zip.close()
        self._raw.close()


@dataclass
class Folder:
    """A folder, and which of its files are meant: all, those that fit a pattern, or one."""

    source: str
    path: Path
    pattern: str
    one: bool
    compared: int
    """So many of its first bytes tell a file from others."""
    held: dict[int, int] = field(default_factory=dict)
    """Descriptors by inode; the file that was read last comes last."""
    _compressed: Compressed | None = None

    def sights(self, known: Callable[[int, str], bool]) -> list[Sight]:
        """The files that are meant, and those that are known and have another name by now. Regular files only."""
        found: list[Sight] = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if self._meant(entry.name) or known(entry.inode(), entry.name):
                        sight = self._sight(entry.name)
                        if sight is not None:
                            found.append(sight)
                    if len(found) > MOST_FILES:
                        fix = "move away what is done, or take fewer by a pattern"
                        raise Misconfigured(
                            f"source {self.source}", f"{self.path} holds more than {MOST_FILES} files", fix
                        )
        except OSError as error:
            raise Unavailable(str(self.path), error.strerror or str(error)) from error
        return found

    def _meant(self, name: str) -> bool:
        if self.one:
            return name == self.pattern
        return fnmatch.fnmatchcase(name, self.pattern) and name.startswith(".") == self.pattern.startswith(".")

    def _sight(self, name: str) -> Sight | None:
        try:
            # The one file that was asked for may be a link; in a folder, links lead to others or out of it.
            found = (self.path / name).stat(follow_symlinks=self.one and name == self.pattern)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return Sight(name, found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size)

    def held_sight(self, file: File) -> Sight | None:
        """A file that has no name any more, but is still open."""
        descriptor = self.held.get(file.sight.inode)
        if descriptor is None:
            return None
        found = os.fstat(descriptor)
        return file.sight._replace(written=found.st_mtime_ns, size=found.st_size)

    def content(self, sight: Sight) -> Content | None:
        """The file, opened; None when it has just become another one. OSError when it may not be read."""
        inode = sight.inode
        if inode not in self.held:
            follow = self.one and sight.name == self.pattern
            flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
            descriptor = os.open(self.path / sight.name, flags)
            found = os.fstat(descriptor)
            if found.st_ino != inode or not stat.S_ISREG(found.st_mode):
                os.close(descriptor)
                return None
            self.held[inode] = descriptor
        self.held[inode] = self.held.pop(inode)
        while len(self.held) > OPEN:
            self.let_go(next(iter(self.held)))
        if self._compressed is not None:
            self._compressed.close()
            self._compressed = None
        if sight.name.endswith(".gz"):
            self._compressed = Compressed(self.held[inode])
            return self._compressed
        return Plain(self.held[inode])

    def same(self, sight: Sight, file: File) -> bool:
        """Whether what lies there begins as the file did, as far as that was read."""
        try:
            content = self.content(sight)
            return content is not None and self.begins_same(content, file)
        except Spoilt:
            return file.flag == "bad"
        except OSError:
            return False

    def begins_same(self, content: Content, file: File) -> bool:
        if isinstance(content, Plain) and content.size < file.offset:
            return False
        return file.check is None or checksum(content.begins(self.compared), file.offset) == file.check

    def let_go(self, inode: int) -> None:
        if (descriptor := self.held.pop(inode, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        if self._compressed is not None:
            self._compressed.close()
            self._compressed = None
        for inode in list(self.held):
            self.let_go(inode)
