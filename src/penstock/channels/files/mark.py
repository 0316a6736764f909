"""The mark of a partition: up to where its records are acknowledged. It is also the lock of those who append.

Readers look no further than the mark. It is raised when what lies before it is safe, so what lies behind it was
promised to nobody. The mark itself is not synced: after a power cut it may lag, and whoever comes next raises it again.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from zlib import crc32

from penstock.core.clock import Micros

NAME = "mark"
_BODY = Struct("<qqqq")
_SUM = Struct("<I")
_SIZE = _BODY.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Mark:
    base: int
    """The segment that is appended to: its first offset."""
    position: int
    """Where the next record will lie in it."""
    end: int
    """The offset of that record."""
    appended: Micros
    """The time of the one before it."""


def read(fd: int) -> Mark | None:
    """The mark; None when there is none that is whole."""
    for _ in range(50):
        told = os.pread(fd, _SIZE, 0)
        if len(told) == _SIZE and crc32(told[: _BODY.size]) == _SUM.unpack_from(told, _BODY.size)[0]:
            return Mark(*_BODY.unpack_from(told))
        if not any(told):
            return None
        time.sleep(0.0001)  # It is being written.
    return None


def write(fd: int, mark: Mark) -> None:
    body = _BODY.pack(mark.base, mark.position, mark.end, mark.appended)
    os.pwrite(fd, body + _SUM.pack(crc32(body)), 0)


def path(folder: Path) -> Path:
    return folder / NAME


def gone(fd: int) -> bool:
    """The channel was removed: what is written to it now would be nowhere."""
    return os.fstat(fd).st_nlink == 0
