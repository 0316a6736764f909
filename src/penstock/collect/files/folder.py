"""Files on disk: their state and their content. Everything here blocks and runs in a thread."""

import fnmatch
import gzip
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from penstock.collect.files.progress import File, FileStat, checksum
from penstock.core.errors import Misconfigured, Unavailable

MAX_FILES = 100_000
MAX_OPEN = 32
"""How many files stay open: one that is removed while it is read is still read to its end."""
SKIP_STEP = 4 << 20


class CorruptFile(Exception):
    """Raised when compressed data is corrupt. `early`: it only ends too early, and may still grow."""

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
        """Move to the offset, or closer to it. Return whether it was reached."""

    def read(self, most: int) -> bytes:
        """The next bytes, up to the size that the file had when it was opened."""


class PlainFile:
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


class CompressedFile:
    """The content of a .gz file, read with bounded memory."""

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
        return missing <= 0 or not self.read(min(missing, SKIP_STEP)) or self._zip.tell() >= offset

    def read(self, most: int) -> bytes:
        try:
            return self._zip.read(most)
        except EOFError as error:
            raise CorruptFile("its compressed data ends in the middle", early=True) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise CorruptFile(f"its compressed data is damaged: {error}", early=False) from error

    def close(self) -> None:
        self._zip.close()
        self._raw.close()


@dataclass
class Folder:
    """A folder and its selected files: all, those that match a pattern, or one."""

    source: str
    path: Path
    pattern: str
    one: bool
    compared: int
    """How many of its first bytes identify a file."""
    descriptors: dict[int, int] = field(default_factory=dict)
    """By inode; the file that was read last comes last."""
    _compressed: CompressedFile | None = None

    def list_files(self, tracked: Callable[[int, str], bool]) -> list[FileStat]:
        """The selected files, and known files that were renamed. Regular files only."""
        found: list[FileStat] = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if self._is_selected(entry.name) or tracked(entry.inode(), entry.name):
                        info = self._stat(entry.name)
                        if info is not None:
                            found.append(info)
                    if len(found) > MAX_FILES:
                        fix = "move away files that were read, or select fewer with a pattern"
                        raise Misconfigured(
                            f"source {self.source}", f"{self.path} has more than {MAX_FILES} files", fix
                        )
        except OSError as error:
            raise Unavailable(str(self.path), error.strerror or str(error)) from error
        return found

    def _is_selected(self, name: str) -> bool:
        if self.one:
            return name == self.pattern
        return fnmatch.fnmatchcase(name, self.pattern) and name.startswith(".") == self.pattern.startswith(".")

    def _stat(self, name: str) -> FileStat | None:
        try:
            # A single file may be a symlink. In a folder, symlinks are ignored.
            found = (self.path / name).stat(follow_symlinks=self.one and name == self.pattern)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return FileStat(name, found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size)

    def open_info(self, file: File) -> FileStat | None:
        """The state of a removed file that is still open."""
        descriptor = self.descriptors.get(file.info.inode)
        if descriptor is None:
            return None
        found = os.fstat(descriptor)
        return file.info._replace(written=found.st_mtime_ns, size=found.st_size)

    def content(self, info: FileStat) -> Content | None:
        """Open the file; None if it was just replaced. Raises OSError if it cannot be read."""
        inode = info.inode
        if inode not in self.descriptors:
            follow = self.one and info.name == self.pattern
            flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
            descriptor = os.open(self.path / info.name, flags)
            found = os.fstat(descriptor)
            if found.st_ino != inode or not stat.S_ISREG(found.st_mode):
                os.close(descriptor)
                return None
            self.descriptors[inode] = descriptor
        self.descriptors[inode] = self.descriptors.pop(inode)
        while len(self.descriptors) > MAX_OPEN:
            self.close_file(next(iter(self.descriptors)))
        if self._compressed is not None:
            self._compressed.close()
            self._compressed = None
        if info.name.endswith(".gz"):
            self._compressed = CompressedFile(self.descriptors[inode])
            return self._compressed
        return PlainFile(self.descriptors[inode])

    def same(self, info: FileStat, file: File) -> bool:
        """Whether the file on disk has the first bytes of the known file, up to its offset."""
        try:
            content = self.content(info)
            return content is not None and self.begins_same(content, file)
        except CorruptFile:
            return file.flag == "bad"
        except OSError:
            return False

    def begins_same(self, content: Content, file: File) -> bool:
        if isinstance(content, PlainFile) and content.size < file.offset:
            return False
        return file.check is None or checksum(content.begins(self.compared), file.offset) == file.check

    def close_file(self, inode: int) -> None:
        if (descriptor := self.descriptors.pop(inode, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        if self._compressed is not None:
            self._compressed.close()
            self._compressed = None
        for inode in list(self.descriptors):
            self.close_file(inode)
