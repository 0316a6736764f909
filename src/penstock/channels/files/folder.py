"""What happens to files and folders: in our words when it fails, and so that it lasts when it should."""

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import Misconfigured, PenstockError, Unavailable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BARRED = {errno.EACCES, errno.EPERM, errno.EROFS}


def in_words(folder: Path, error: OSError) -> PenstockError:
    place = f"channels in {folder}"
    if error.errno in _FULL:
        return Unavailable(place, f"there is no room: {error.strerror}")
    if error.errno in _BARRED:
        fix = "let this user write there, or tell another folder"
        return Misconfigured(place, f"{error.filename or folder}: {error.strerror}", fix)
    if error.errno == errno.ENOTDIR:
        return Misconfigured(place, "it is no folder", "tell a folder")
    return Unavailable(place, f"{error.filename or folder}: {error.strerror}")


@contextmanager
def answering(folder: Path) -> Iterator[None]:
    """What the operating system raises, in our words."""
    try:
        yield
    except OSError as error:
        raise in_words(folder, error) from error


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else is in here that names the same file: no thread, and no process."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def replace(path: Path, content: bytes, lasting: bool = True) -> None:
    """Put a file there: whoever looks sees the old one or the new one, whole, after a power cut too."""
    new = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    if lasting:
        settle(path.parent)


def settle(folder: Path) -> None:
    """The names in a folder survive a power cut from now on."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
