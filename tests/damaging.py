"""Damage to files, done at random places: what tests of one part and the mutation suite in tests/soak share."""

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

Damage = Callable[[Path, random.Random], None]


def truncated(file: Path, chance: random.Random) -> None:
    """Cut the file within its second half."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(chance.randrange(size // 2, size))


def flipped(file: Path, chance: random.Random) -> None:
    """Change one bit, somewhere in the file."""
    at = chance.randrange(file.stat().st_size)
    _write(file, at, bytes([file.read_bytes()[at] ^ 1 << chance.randrange(8)]))


def overwritten(file: Path, chance: random.Random) -> None:
    """Write noise over a quarter of the file, in its middle."""
    size = file.stat().st_size
    _write(file, size * 3 // 8, chance.randbytes(max(1, size // 4)))


def emptied(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.truncate(0)


def deleted(file: Path, chance: random.Random) -> None:
    file.unlink()


def change(file: Path, at: int) -> None:
    """Change the lowest bit of one byte; once more, and it is as it was."""
    with file.open("rb") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
    _write(file, at, bytes([byte ^ 1]))


def _write(file: Path, at: int, content: bytes) -> None:
    """In place: a process that has the file open sees it."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


FILE_DAMAGES: tuple[Damage, ...] = (truncated, flipped, overwritten, emptied, deleted)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own at a folder, in memory."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "penstock-test", str(folder)], check=False
    )
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def filled(folder: Path, left: int = 0) -> Iterator[None]:
    """The disk of a folder has only so many bytes left."""
    filler, done = folder / "filler", False
    with filler.open("wb") as opened:
        while not done:
            room = os.statvfs(folder)
            # Others write to this disk meanwhile: what was free may be taken.
            with suppress(OSError):
                os.posix_fallocate(opened.fileno(), 0, max(1, room.f_bavail * room.f_frsize - left))
                done = True
    try:
        yield
    finally:
        filler.unlink()
