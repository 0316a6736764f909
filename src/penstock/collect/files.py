"""Records from files: lines that are appended, and new files in a folder."""

import asyncio
import fnmatch
import gzip
import logging
import os
import stat
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from penstock.collect.file_progress import REMOVED_AFTER, File, FileStat, Progress, TooRecent, checksum, tail
from penstock.collect.ingest import BATCH_BYTES, BATCH_RECORDS
from penstock.collect.registry import check_positive
from penstock.collect.spool import in_thread
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.framing import KEPT, Found, Lines

log = logging.getLogger(__name__)

CHUNK = 256 << 10
COMPARED = 1 << 10
"""How many of its first bytes identify a file of lines."""
MAX_FILES = 100_000
MAX_OPEN = 32
"""How many files stay open: one that is removed while it is read is still read to its end."""
SKIP_STEP = 4 << 20


class CorruptFile(Exception):
    """Raised when compressed data is corrupt. `early`: it only ends too early, and may still grow."""

    def __init__(self, why: str, early: bool) -> None:
        super().__init__(why, early)
        self.why, self.early = why, early


class Content:
    """An open file, decompressed with bounded memory if it is compressed."""

    def __init__(self, descriptor: int, compressed: bool) -> None:
        found = os.fstat(descriptor)
        self.inode, self.size, self.written = found.st_ino, found.st_size, found.st_mtime_ns
        self.compressed = compressed
        self._raw = os.fdopen(os.dup(descriptor), "rb")
        self._raw.seek(0)
        self._file = gzip.GzipFile(fileobj=self._raw, mode="rb") if compressed else self._raw

    def begins(self, most: int) -> bytes:
        """Its first bytes."""
        self._file.seek(0)
        data = b""
        while len(data) < most and (more := self.read(most - len(data))):
            data += more
        self._file.seek(0)
        return data

    def seek(self, offset: int) -> bool:
        """Move to the offset, or closer to it. Return whether it was reached."""
        if not self.compressed:
            return self._file.seek(offset) == offset
        missing = offset - self._file.tell()
        return missing <= 0 or not self.read(min(missing, SKIP_STEP)) or self._file.tell() >= offset

    def read(self, most: int) -> bytes:
        """The next bytes; of a file that is not compressed, up to the size that it had when it was opened."""
        if not self.compressed:
            return self._file.read(max(0, min(most, self.size - self._file.tell())))
        try:
            return self._file.read(most)
        except EOFError as error:
            raise CorruptFile("its compressed data ends in the middle", early=True) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise CorruptFile(f"its compressed data is damaged: {error}", early=False) from error

    def close(self) -> None:
        self._file.close()
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
    _content: Content | None = None

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
        if self._content is not None:
            self._content.close()
        self._content = Content(self.descriptors[inode], info.name.endswith(".gz"))
        return self._content

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
        if not content.compressed and content.size < file.offset:
            return False
        return file.check is None or checksum(content.begins(self.compared), file.offset) == file.check

    def close_file(self, inode: int) -> None:
        if self._content is not None and self._content.inode == inode:
            self._content.close()
            self._content = None
        if (descriptor := self.descriptors.pop(inode, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        if self._content is not None:
            self._content.close()
            self._content = None
        for inode in list(self.descriptors):
            self.close_file(inode)


@dataclass(frozen=True)
class FilesSource:
    """Reads `file://PATH`: a file, the files in a folder, or those that match a pattern in the last part of the path.

    `follow`: continue with appended data and new files; otherwise the source ends. `format`: "lines", or "whole" for
    one record per file, which is read when it was not written for `settled`. `every`: how often to scan.
    `closed_after`: with many files, those that were not written for this time count as complete. Files that end with
    `.gz` are decompressed.
    """

    url: str
    name: str
    follow: bool = True
    format: str = "lines"
    every: timedelta = timedelta(seconds=1)
    settled: timedelta = timedelta(seconds=1)
    closed_after: timedelta = timedelta(hours=1)
    max_size: int = 900_000

    def __post_init__(self) -> None:
        location = f"source {self.name}"
        path = self.url.partition("://")[2]
        if not Path(path).name or "\0" in path:
            raise Misconfigured(location, "the address has no path", "write file://PATH, such as file://data/in")
        if _is_pattern(str(Path(path).parent)):
            problem = "only the last part of a path may be a pattern"
            raise Misconfigured(location, problem, "write it like file://data/in/*.log")
        if self.format not in ("lines", "whole"):
            raise Misconfigured(f"{location}, format", f'unknown value "{self.format}"', "use one of lines, whole")
        check_positive(self, "max_size", "every")

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        return "it resumes after the last durable record, if files are only appended to or added"

    def with_context(self, context: SourceContext) -> "FilesSource":
        """The same source, with a path relative to the folder of its pipeline."""
        return replace(self, url=f"file://{context.folder.absolute().parent / self._path}")

    @property
    def _path(self) -> Path:
        return Path(self.url.partition("://")[2])

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        path = self._path
        whole = self.format == "whole"
        compared = self.max_size + 1 if whole else COMPARED
        if _is_pattern(path.name):
            folder = Folder(self.name, path.parent, path.name, False, compared)
        elif await asyncio.to_thread(path.is_dir):
            folder = Folder(self.name, path, "*", False, compared)
        elif resume.cursor is not None or await asyncio.to_thread(path.exists):
            # A file that was read before may have been renamed, with an unread rest.
            folder = Folder(self.name, path.parent, path.name, True, compared)
        else:
            raise Unavailable(str(path), "there is no such file or folder")
        closed_after = timedelta() if whole else self.closed_after
        progress = Progress(self.name, resume.cursor, closed_after.total_seconds(), folder.pattern != "*")
        reading = _Reading(self, folder, progress)
        try:
            async with aclosing(reading.intakes()) as intakes:
                yield intakes
        finally:
            folder.close()


class _Reading:
    """The files of one opening."""

    def __init__(self, source: FilesSource, folder: Folder, progress: Progress) -> None:
        self._source, self._folder, self._progress = source, folder, progress
        self._whole = source.format == "whole"
        self._unreadable: dict[str, str] = {}

    async def intakes(self) -> AsyncGenerator[Intake, None]:
        while True:
            news, waiting = await in_thread(self._scan)
            try:
                for file, last in news:
                    async with aclosing(self._read(file, last)) as intakes:
                        async for intake in intakes:
                            yield intake
            except TooRecent:
                waiting = True
            if not self._source.follow and not waiting:
                for name, why in self._unreadable.items():
                    raise Unavailable(str(self._folder.path / name), why)
                return
            await asyncio.sleep(self._source.every.total_seconds())

    def _scan(self) -> tuple[list[tuple[File, bool]], bool]:
        """The files to read, each with whether it is the last time; and whether other files must wait."""
        now, progress = time.time(), self._progress
        changed = progress.update(self._folder.list_files(progress.is_tracked), now, self._folder.same)
        ended = [
            file for file in progress.files.values() if file.missing_at is not None and self._is_finished(file, now)
        ]
        # Read removed files before those that may replace them.
        changed.sort(key=lambda file: file.missing_at is None)
        ready = [file for file in changed if file not in ended and not self._is_unsettled(file, now)]
        waiting = len(ready) < len([file for file in changed if file not in ended])
        return [(file, True) for file in ended] + [(file, not self._source.follow) for file in ready], waiting

    def _is_finished(self, file: File, now: float) -> bool:
        """Whether a missing file was unchanged for long enough. A process can still write to it."""
        info = self._folder.open_info(file)
        if info is not None and info != file.info:
            file.info, file.missing_at = info, now
        return not self._source.follow or now - (file.missing_at or now) > REMOVED_AFTER

    def _is_unsettled(self, file: File, now: float) -> bool:
        return self._whole and abs(now - file.info.written / 1e9) < self._source.settled.total_seconds()

    async def _read(self, file: File, last: bool) -> AsyncGenerator[Intake, None]:
        missing_at = last and file.missing_at is not None
        try:
            head = self._progress.begin(file, time.time())
            content = await in_thread(self._folder.content, file.info)
            if content is not None:
                read = (
                    self._whole_file(file, content, head, last)
                    if self._whole
                    else self._lines(file, content, head, last)
                )
                async with aclosing(read) as intakes:
                    async for intake in intakes:
                        yield intake
            self._unreadable.pop(file.name, None)
        except OSError as error:
            self._report_error(file, error, missing_at)
        finally:
            self._progress.end(file)
        if missing_at:
            self._folder.close_file(file.info.inode)
            self._progress.drop(file)

    def _report_error(self, file: File, error: OSError, missing_at: bool) -> None:
        why = error.strerror or str(error)
        if file.missing_at is not None:
            if missing_at and file.has_news():
                log.warning("%s: %s was removed before it was read completely", self._source.name, file.name)
            return
        if self._unreadable.get(file.name) != why:
            log.warning("%s: %s cannot be read: %s", self._source.name, file.name, why)
        self._unreadable[file.name] = why

    async def _lines(self, file: File, content: Content, head: str, last: bool) -> AsyncGenerator[Intake, None]:
        if file.flag == "bad" and file.visited is None:
            file.visited, file.complete = (content.size, content.written), True
            return
        try:
            if not await in_thread(self._folder.begins_same, content, file):
                log.warning("%s: %s was replaced; it is read from its beginning", self._source.name, file.name)
                self._progress.reset(file)
                head = self._progress.begin(file, time.time())
            begins = await in_thread(content.begins, COMPARED)
            while not await in_thread(content.seek, file.offset):
                pass
            lines = Lines(self._source.max_size, file.offset, file.flag == "skip")
            while data := await in_thread(content.read, CHUNK):
                for intake in self._arrivals(file, lines.push(data), begins, head):
                    yield intake
            # Nothing is appended to a compressed file.
            if last or file.name.endswith(".gz"):
                for intake in self._arrivals(file, lines.end(), begins, head):
                    yield intake
            file.complete = not lines.midway
        except CorruptFile as corrupt:
            file.complete = not (corrupt.early and not last)
            if file.complete:
                yield self._corrupt(file, corrupt, head)
        file.visited = content.size, content.written

    def _arrivals(self, file: File, found: list[Found], begins: bytes, head: str) -> Iterator[Intake]:
        """Make intakes of limited size."""
        whole = checksum(begins, COMPARED)
        arrivals: list[Arrival] = []
        size = 0
        for value, location, why in found:
            check = whole if location >= COMPARED else checksum(begins, location)
            flag = "skip" if why is not None else ""
            cursor, dedup_key = head + tail(check, flag, location), file.dedup_key(check, flag, location)
            arrivals.append(Arrival(value, cursor=cursor, refused=why, dedup_key=dedup_key))
            file.offset, file.check, file.flag = location, check, flag
            size += len(value)
            if len(arrivals) >= BATCH_RECORDS or size >= BATCH_BYTES:
                yield Intake(arrivals)
                arrivals, size = [], 0
        if arrivals:
            yield Intake(arrivals)

    async def _whole_file(self, file: File, content: Content, head: str, last: bool) -> AsyncGenerator[Intake, None]:
        most = self._source.max_size
        try:
            data = await in_thread(content.begins, most + 1)
        except CorruptFile as corrupt:
            file.visited, file.complete = (content.size, content.written), not (corrupt.early and not last)
            if file.complete and file.flag != "bad":
                yield self._corrupt(file, corrupt, head)
            return
        size = len(data) if file.name.endswith(".gz") else content.size
        check = checksum(data, len(data))
        if (size, check) != (file.offset, file.check):
            why = f"the file has more than {most} bytes, the limit of a record" if len(data) > most else None
            value = data if why is None else data[:KEPT]
            file.offset, file.check, file.flag = size, check, ""
            # If it has its former content again, that is another record.
            dedup_key = file.dedup_key(check, str(content.written), size)
            yield Intake([Arrival(value, cursor=head + tail(check, "", size), refused=why, dedup_key=dedup_key)])
        file.visited, file.complete = (content.size, content.written), True

    def _corrupt(self, file: File, corrupt: CorruptFile, head: str) -> Intake:
        file.flag = "bad"
        why = f"{file.name} cannot be read after byte {file.offset}: {corrupt.why}"
        location = file.check or 0, "bad", file.offset
        return Intake([Arrival(b"", cursor=head + tail(*location), refused=why, dedup_key=file.dedup_key(*location))])


def _is_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")
