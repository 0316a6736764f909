"""Records from files: lines that are appended, and new files in a folder."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.collect.files.folder import Content, CorruptFile, Folder
from penstock.collect.files.progress import REMOVED_AFTER, File, Progress, TooRecent, checksum, tail
from penstock.collect.ingest import BATCH_BYTES, BATCH_RECORDS
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.framing import KEPT, Found, Lines

T = TypeVar("T")
log = logging.getLogger(__name__)

CHUNK = 256 << 10
COMPARED = 1 << 10
"""How many of its first bytes identify a file of lines."""


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
        if self.max_size < 1:
            raise Misconfigured(f"{location}, max_size", "it must be at least 1")
        if self.every <= timedelta():
            raise Misconfigured(f"{location}, every", "it must be more than 0", 'write it like "1 s"')

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
        self._in_flight = 0
        self._settled_event = asyncio.Event()

    async def intakes(self) -> AsyncGenerator[Intake, None]:
        try:
            async with aclosing(self._intakes()) as intakes:
                async for intake in intakes:
                    yield intake
        except Unavailable:
            # The next opening resumes after what is durable. Records in flight would be repeated, perhaps after newer
            # ones whose cursors do not include them.
            while self._in_flight:
                self._settled_event.clear()
                await self._settled_event.wait()
            raise

    async def _intakes(self) -> AsyncGenerator[Intake, None]:
        while True:
            news, waiting = await _in_thread(self._scan)
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
            content = await _in_thread(partial(self._folder.content, file.info))
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
            if not await _in_thread(partial(self._folder.begins_same, content, file)):
                log.warning("%s: %s was replaced; it is read from its beginning", self._source.name, file.name)
                self._progress.reset(file)
                head = self._progress.begin(file, time.time())
            begins = await _in_thread(partial(content.begins, COMPARED))
            while not await _in_thread(partial(content.seek, file.offset)):
                pass
            lines = Lines(self._source.max_size, file.offset, file.flag == "skip")
            while data := await _in_thread(partial(content.read, CHUNK)):
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
                yield self._intake(arrivals)
                arrivals, size = [], 0
        if arrivals:
            yield self._intake(arrivals)

    async def _whole_file(self, file: File, content: Content, head: str, last: bool) -> AsyncGenerator[Intake, None]:
        most = self._source.max_size
        try:
            data = await _in_thread(partial(content.begins, most + 1))
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
            yield self._intake([Arrival(value, cursor=head + tail(check, "", size), refused=why, dedup_key=dedup_key)])
        file.visited, file.complete = (content.size, content.written), True

    def _corrupt(self, file: File, corrupt: CorruptFile, head: str) -> Intake:
        file.flag = "bad"
        why = f"{file.name} cannot be read after byte {file.offset}: {corrupt.why}"
        location = file.check or 0, "bad", file.offset
        return self._intake(
            [Arrival(b"", cursor=head + tail(*location), refused=why, dedup_key=file.dedup_key(*location))]
        )

    def _intake(self, arrivals: list[Arrival]) -> Intake:
        self._in_flight += 1
        return Intake(arrivals, self._settle)

    async def _settle(self, error: Exception | None) -> None:
        """Files need no acknowledgement: what was not stored is read again at the next opening."""
        self._in_flight -= 1
        self._settled_event.set()


def _is_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")


async def _in_thread(work: Callable[[], T]) -> T:
    """Run in a thread. A cancelled caller waits for its end, so that nothing is closed while it is used."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
