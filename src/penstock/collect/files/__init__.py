"""Records from files: what is written to them, and what comes into a folder."""

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

from penstock.collect.files.folder import Content, Folder, Spoilt
from penstock.collect.files.progress import GONE, File, Progress, TooYoung, checksum, tail
from penstock.collect.framing import KEPT, Found, Lines
from penstock.collect.ingest import BATCH_BYTES, BATCH_RECORDS
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured, Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

CHUNK = 256 << 10
COMPARED = 1 << 10
"""So many of its first bytes tell a file of lines from others."""


@dataclass(frozen=True)
class FilesSource:
    """Reads `file://PATH`: a file, the files in a folder, or those that a pattern in the last part of the path fits.

    `follow`: go on with what is appended and with what comes; otherwise it is done at the end. `format`: "lines", or
    "whole" for a record in each file, taken once that was not written for `settled`. `every`: how often it looks.
    `closed_after`: of many files, those that were not written for so long may be taken for done. Files that end with
    `.gz` are read as what they hold.
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
        place = f"source {self.name}"
        path = self.url.partition("://")[2]
        if not Path(path).name or "\0" in path:
            raise Misconfigured(place, "its address tells no path", "write file://PATH, such as file://data/in")
        if _is_pattern(str(Path(path).parent)):
            problem = "only the last part of a path may be a pattern"
            raise Misconfigured(place, problem, "write it like file://data/in/*.log")
        if self.format not in ("lines", "whole"):
            raise Misconfigured(f"{place}, format", f'"{self.format}" is not known', "it is one of lines, whole")
        if self.max_size < 1:
            raise Misconfigured(f"{place}, max_size", "it is less than one")
        if self.every <= timedelta():
            raise Misconfigured(f"{place}, every", "it is no time at all", 'write it like "1 s"')

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        return "it goes on behind the last record that the channel holds, as long as files only grow or are new"

    def with_context(self, home: SourceContext) -> "FilesSource":
        """The same source, whose relative path is one from the folder in which its pipeline lies."""
        return replace(self, url=f"file://{home.folder.absolute().parent / self._path}")

    @property
    def _path(self) -> Path:
        return Path(self.url.partition("://")[2])

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        path = self._path
        whole = self.format == "whole"
        compared = self.max_size + 1 if whole else COMPARED
        if _is_pattern(path.name):
            folder = Folder(self.name, path.parent, path.name, False, compared)
        elif await asyncio.to_thread(path.is_dir):
            folder = Folder(self.name, path, "*", False, compared)
        elif taken.cursor is not None or await asyncio.to_thread(path.exists):
            # If it was read before, it may have another name by now, and an unread rest.
            folder = Folder(self.name, path.parent, path.name, True, compared)
        else:
            raise Unavailable(str(path), "there is no such file or folder")
        closed_after = timedelta() if whole else self.closed_after
        progress = Progress(self.name, taken.cursor, closed_after.total_seconds(), folder.pattern != "*")
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
        self._under_way = 0
        self._landed = asyncio.Event()

    async def intakes(self) -> AsyncGenerator[Intake, None]:
        try:
            async with aclosing(self._intakes()) as intakes:
                async for intake in intakes:
                    yield intake
        except Unavailable:
            # It is opened again after what is safe. What is still on its way would come again, and maybe behind others
            # that were written meanwhile: their cursors would not tell of it.
            while self._under_way:
                self._landed.clear()
                await self._landed.wait()
            raise

    async def _intakes(self) -> AsyncGenerator[Intake, None]:
        while True:
            news, waiting = await _aside(self._look)
            try:
                for file, last in news:
                    async with aclosing(self._read(file, last)) as intakes:
                        async for intake in intakes:
                            yield intake
            except TooYoung:
                waiting = True
            if not self._source.follow and not waiting:
                for name, why in self._unreadable.items():
                    raise Unavailable(str(self._folder.path / name), why)
                return
            await asyncio.sleep(self._source.every.total_seconds())

    def _look(self) -> tuple[list[tuple[File, bool]], bool]:
        """Which files are to be read, and whether for the last time; and whether others have to wait."""
        now, progress = time.time(), self._progress
        changed = progress.meet(self._folder.sights(progress.knows), now, self._folder.same)
        ended = [file for file in progress.files.values() if file.gone is not None and self._is_over(file, now)]
        # What nobody can see any more is finished before what may have come in its place.
        changed.sort(key=lambda file: file.gone is None)
        ready = [file for file in changed if file not in ended and not self._is_unsettled(file, now)]
        waiting = len(ready) < len([file for file in changed if file not in ended])
        return [(file, True) for file in ended] + [(file, not self._source.follow) for file in ready], waiting

    def _is_over(self, file: File, now: float) -> bool:
        """Whether a file that has gone was quiet for long enough. As long as it is open it can still grow."""
        sight = self._folder.held_sight(file)
        if sight is not None and sight != file.sight:
            file.sight, file.gone = sight, now
        return not self._source.follow or now - (file.gone or now) > GONE

    def _is_unsettled(self, file: File, now: float) -> bool:
        return self._whole and abs(now - file.sight.written / 1e9) < self._source.settled.total_seconds()

    async def _read(self, file: File, last: bool) -> AsyncGenerator[Intake, None]:
        gone = last and file.gone is not None
        try:
            head = self._progress.begin(file, time.time())
            content = await _aside(partial(self._folder.content, file.sight))
            if content is not None:
                read = self._one(file, content, head, last) if self._whole else self._lines(file, content, head, last)
                async with aclosing(read) as intakes:
                    async for intake in intakes:
                        yield intake
            self._unreadable.pop(file.name, None)
        except OSError as error:
            self._trouble(file, error, gone)
        finally:
            self._progress.end(file)
        if gone:
            self._folder.let_go(file.sight.inode)
            self._progress.drop(file)

    def _trouble(self, file: File, error: OSError, gone: bool) -> None:
        why = error.strerror or str(error)
        if file.gone is not None:
            if gone and file.has_news():
                log.warning("%s: %s was removed before it was read to its end", self._source.name, file.name)
            return
        if self._unreadable.get(file.name) != why:
            log.warning("%s: %s cannot be read: %s", self._source.name, file.name, why)
        self._unreadable[file.name] = why

    async def _lines(self, file: File, content: Content, head: str, last: bool) -> AsyncGenerator[Intake, None]:
        if file.flag == "bad" and file.visited is None:
            file.visited, file.complete = (content.size, content.written), True
            return
        try:
            if not await _aside(partial(self._folder.begins_same, content, file)):
                log.warning("%s: %s is not what it was; it is read from its beginning", self._source.name, file.name)
                self._progress.anew(file)
                head = self._progress.begin(file, time.time())
            begins = await _aside(partial(content.begins, COMPARED))
            while not await _aside(partial(content.seek, file.offset)):
                pass
            lines = Lines(self._source.max_size, file.offset, file.flag == "skip")
            while data := await _aside(partial(content.read, CHUNK)):
                for intake in self._taken(file, lines.push(data), begins, head):
                    yield intake
            # Nothing is appended to what is compressed.
            if last or file.name.endswith(".gz"):
                for intake in self._taken(file, lines.end(), begins, head):
                    yield intake
            file.complete = not lines.midway
        except Spoilt as spoilt:
            file.complete = not (spoilt.early and not last)
            if file.complete:
                yield self._spoilt(file, spoilt, head)
        file.visited = content.size, content.written

    def _taken(self, file: File, found: list[Found], begins: bytes, head: str) -> Iterator[Intake]:
        """The intakes that these make, none of them too large."""
        whole = checksum(begins, COMPARED)
        arrivals: list[Arrival] = []
        size = 0
        for value, place, why in found:
            check = whole if place >= COMPARED else checksum(begins, place)
            flag = "skip" if why is not None else ""
            cursor, mark = head + tail(check, flag, place), file.mark(check, flag, place)
            arrivals.append(Arrival(value, cursor=cursor, refused=why, dedup_key=mark))
            file.offset, file.check, file.flag = place, check, flag
            size += len(value)
            if len(arrivals) >= BATCH_RECORDS or size >= BATCH_BYTES:
                yield self._intake(arrivals)
                arrivals, size = [], 0
        if arrivals:
            yield self._intake(arrivals)

    async def _one(self, file: File, content: Content, head: str, last: bool) -> AsyncGenerator[Intake, None]:
        most = self._source.max_size
        try:
            data = await _aside(partial(content.begins, most + 1))
        except Spoilt as spoilt:
            file.visited, file.complete = (content.size, content.written), not (spoilt.early and not last)
            if file.complete and file.flag != "bad":
                yield self._spoilt(file, spoilt, head)
            return
        size = len(data) if file.name.endswith(".gz") else content.size
        check = checksum(data, len(data))
        if (size, check) != (file.offset, file.check):
            why = f"the file is larger than the {most} bytes that a record may have" if len(data) > most else None
            value = data if why is None else data[:KEPT]
            file.offset, file.check, file.flag = size, check, ""
            # It may come to hold again what it held before: that is another record.
            mark = file.mark(check, str(content.written), size)
            yield self._intake([Arrival(value, cursor=head + tail(check, "", size), refused=why, dedup_key=mark)])
        file.visited, file.complete = (content.size, content.written), True

    def _spoilt(self, file: File, spoilt: Spoilt, head: str) -> Intake:
        file.flag = "bad"
        why = f"{file.name} cannot be read on behind byte {file.offset}: {spoilt.why}"
        place = file.check or 0, "bad", file.offset
        return self._intake([Arrival(b"", cursor=head + tail(*place), refused=why, dedup_key=file.mark(*place))])

    def _intake(self, arrivals: list[Arrival]) -> Intake:
        self._under_way += 1
        return Intake(arrivals, self._settle)

    async def _settle(self, error: Exception | None) -> None:
        """Nobody is told: what was not taken is read again at the next opening."""
        self._under_way -= 1
        self._landed.set()


def _is_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")


async def _aside(work: Callable[[], T]) -> T:
    """In a thread. Who is cancelled waits for it: nothing is closed under its hands."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
