"""Damaged segments of channels in files: found while nothing runs, and written anew without what cannot be read."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.channels.files import mark as marks
from penstock.channels.files import segments
from penstock.channels.files.folder import settle
from penstock.channels.files.frames import Damaged, Outline, body_of, outline
from penstock.channels.files.mark import Mark
from penstock.channels.files.recovery import begin, locked
from penstock.channels.files.segments import HEADER


@dataclass(frozen=True)
class DamagedLog:
    """A segment that does not hold what was acknowledged."""

    file: Path
    position: int
    why: str

    @property
    def channel(self) -> str:
        return self.file.parent.parent.name

    def repair(self, aside: Path) -> tuple[Path, int]:
        """Write the segment anew without what cannot be read; its copy in the folder `aside`, and how many are left.

        Readers get over the offsets that are missing then, as after compaction.
        """
        folder, base = self.file.parent, int(self.file.stem)
        aside.mkdir(parents=True, exist_ok=True)
        copy = aside / f"{folder.parent.parent.name}-{self.channel}-{folder.name}-{self.file.name}"
        shutil.copy2(self.file, copy)
        data = self.file.read_bytes()
        kept = list(_salvaged(data, base))
        new = self.file.with_name(f".{self.file.name}.new")
        new.write_bytes(segments.header(compacted=True) + b"".join(data[one.position : one.stop] for one in kept))
        with marks.path(folder).open("r+b") as file, locked(file.fileno()):
            mark = marks.read(file.fileno())
            new.replace(self.file)
            segments.index_path(folder, base).unlink(missing_ok=True)
            if mark is not None and mark.base == base:
                end, appended = (kept[-1].offset + 1, kept[-1].appended) if kept else (base, mark.appended)
                if end == mark.end:
                    mark = Mark(base, self.file.stat().st_size, end, appended)
                else:
                    # Numbers are never given twice.
                    mark = begin(folder, mark.end, mark.appended)
                marks.write(file.fileno(), mark)
        settle(folder)
        return copy, len(kept)


def damaged_logs(root: Path) -> Iterator[DamagedLog]:
    """What is damaged in a folder of channels."""
    for folder in sorted(root.glob("[!.]*/[0-9]*")):
        mark = None
        with suppress(FileNotFoundError), marks.path(folder).open("rb") as file:
            mark = marks.read(file.fileno())
        known = segments.bases(folder)
        for base, following in zip(known, [*known[1:], None], strict=True):
            try:
                _check(folder, base, mark, following)
            except Damaged as error:
                yield DamagedLog(segments.path(folder, base), error.position, error.why)


def _check(folder: Path, base: int, mark: Mark | None, following: int | None) -> None:
    """Damaged when a record that was acknowledged is not what was written, or is gone."""
    with segments.opened(folder, base) as fd:
        whole = not segments.is_compacted(fd)
        size = os.fstat(fd).st_size
        limit, end = (mark.position, mark.end) if mark is not None and mark.base == base else (size, following)
        if limit > size:
            raise Damaged(size, "the file ends before what was acknowledged does")
        expected, position = base, HEADER
        for record in segments.walk(fd, HEADER, limit):
            if record.offset != expected and (whole or record.offset < expected):
                raise Damaged(record.position, f"{expected} should lie there, and {record.offset} does")
            expected, position = record.offset + 1, record.stop
        if whole and end is not None and expected < end:
            raise Damaged(position, f"{expected} should lie there, and nothing does")


def _salvaged(data: bytes, offset: int) -> Iterator[Outline]:
    """Every whole record, in order."""
    position = HEADER
    while position < len(data):
        try:
            body = body_of(data, position, 0)
            record = outline(body, position) if body is not None else None
        except Damaged:
            record = None
        if record is None or record.offset < offset:
            rest = data[position + 1 :]
            position = next((position + 1 + at for at in segments.candidates(rest, offset)), len(data))
            continue
        yield record
        position, offset = record.stop, record.offset + 1
