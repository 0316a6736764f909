"""Whether the files of a checkpoint are whole: what Spark needs to go on, and what it would pass over in silence."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from penstock.analysis.checkpoints.batches import numbers
from penstock.core.errors import Misconfigured

_STATE = re.compile(r"(\d+)(?:_([^.]*))?\.(changelog|delta|zip|snapshot)")
_CHECKSUMS = b"crc\0"
_STEPS = ("changelog", "delta")


@dataclass(frozen=True, slots=True)
class Written:
    """What a checkpoint holds that has begun at least one batch."""

    id: str
    """That of the query, in Spark's words."""
    begun: int
    """The last batch of which the offsets are noted."""
    finished: int | None
    """The last batch that is committed."""
    metadata: dict[str, Any]
    """What Spark noted with the offsets for itself: the watermark, and the settings that hold for this checkpoint."""
    sources: tuple[str | None, ...]
    """The channel of each source, in Spark's order; None where nothing was read yet."""
    numbered: bool = False
    """Its state is of the first format, whose files are known by their number alone: real time takes no such."""


def written(path: Path) -> Written | None:
    """What lies there; None when no batch was begun; Misconfigured when something is missing or broken."""
    begun, finished = numbers(path / "offsets"), numbers(path / "commits")
    if not begun and not finished:
        return None
    identity = _identity(path)
    if not begun or (finished and begun[-1] < finished[-1]):
        last = finished[-1]
        raise _damaged(path, f"batch {last} is committed, and its offsets (offsets/{last}) are gone")
    last = begun[-1]
    if last and last - 1 not in begun:
        raise _damaged(path, f"offsets/{last - 1} is gone, which Spark needs to go on")
    if last and (not finished or finished[-1] < last - 1):
        raise _damaged(path, f"batch {last} was begun, and the one before it is not committed: commits has a hole")
    for number in begun[-2:]:
        metadata, sources = offsets(path, number)
    known: set[str] = set()
    if finished:
        known = _committed(path, finished[-1])
        _state(path, finished[-1] + 1, known)
    numbered = bool(finished) and not known and any(path.glob("state/[0-9]*"))
    return Written(identity, last, finished[-1] if finished else None, metadata, sources, numbered)


def offsets(path: Path, number: int) -> tuple[dict[str, Any], tuple[str | None, ...]]:
    """What Spark noted when it began a batch: for itself, and the channel of each source."""
    file = path / "offsets" / str(number)
    _checked(path, file)
    try:
        version, metadata, *sources = file.read_text(encoding="utf-8").splitlines()
        if not version.startswith("v"):
            raise ValueError(f"it begins with {version[:20]!r}")
        noted = json.loads(metadata)
        if not isinstance(noted, dict):
            raise ValueError("it tells nothing of its settings")
        return noted, tuple(_channel(line) for line in sources)
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(path, f"offsets/{number} cannot be read: {error}") from error


def _channel(line: str) -> str | None:
    told = {} if line == "-" else json.loads(line)
    return next(iter(told), None)


def _identity(path: Path) -> str:
    _checked(path, path / "metadata")
    try:
        return str(json.loads((path / "metadata").read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        raise _damaged(path, "its file metadata is gone, which tells whose checkpoint it is") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"its file metadata cannot be read: {error!r}") from error


def _committed(path: Path, number: int) -> set[str]:
    """The ids of the files of state that belong to the batch; none when files are known by their number alone."""
    _checked(path, path / "commits" / str(number))
    try:
        version, told, *_ = (path / "commits" / str(number)).read_text(encoding="utf-8").splitlines()
        if not version.startswith("v"):
            raise ValueError(f"it begins with {version[:20]!r}")
        unique: dict[str, list[list[str]]] = json.loads(told).get("stateUniqueIds") or {}
        return {one for partitions in unique.values() for stores in partitions for one in stores}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _damaged(path, f"commits/{number} cannot be read: {error}") from error


def _state(path: Path, version: int, known: set[str]) -> None:
    """Spark loads a version from the last snapshot before it, and each step from there."""
    for store in _stores(path):
        there = [match for file in store.iterdir() if (match := _STATE.fullmatch(file.name))]
        # What is left of a batch that was broken off has another id.
        mine = [match for match in there if int(match[1]) != version or not known or match[2] in known]
        files = {(match[3], int(match[1])): store / match[0] for match in mine}
        if not there:
            continue
        whole = [number for kind, number in files if kind not in _STEPS and number <= version]
        snapshot = max(whole, default=0)
        steps = {number: file for (kind, number), file in files.items() if kind in _STEPS}
        due = [number for number in range(snapshot + 1, version + 1) if number not in steps]
        where = store.relative_to(path)
        if due:
            raise _damaged(path, f"{where} lacks the step to version {due[0]} of the state")
        needed = [steps[number] for number in range(snapshot + 1, version + 1)]
        needed += [file for (kind, number), file in files.items() if kind not in _STEPS and number == snapshot]
        if empty := [file.name for file in needed if not file.stat().st_size]:
            raise _damaged(path, f"{where}/{empty[0]} is empty")
        for file in needed:
            _checked(path, file)


def _stores(path: Path) -> Iterator[Path]:
    """The folders of state: one for each operator and partition, and within it one for each store that has a name."""
    for partition in sorted(path.glob("state/[0-9]*/[0-9]*")):
        yield partition
        yield from (named for named in sorted(partition.iterdir()) if named.is_dir() and named.name[0].isalpha())


def _checked(path: Path, file: Path) -> None:
    """Compare a file with the checksums that Hadoop keeps beside it, where it does: `.NAME.crc`.

    These are four bytes that name them, the size of a chunk, and the CRC-32 of each chunk.
    """
    try:
        told, data = file.with_name(f".{file.name}.crc").read_bytes(), file.read_bytes()
    except FileNotFoundError:
        return
    size = int.from_bytes(told[4:8])
    if told[:4] != _CHECKSUMS or size <= 0:
        raise _damaged(path, f"the checksums of {file.relative_to(path)} are none: .{file.name}.crc")
    found = b"".join(crc32(data[at : at + size]).to_bytes(4) for at in range(0, len(data), size))
    if found != told[8:]:
        raise _damaged(path, f"{file.relative_to(path)} is not what was written: its checksum is another")


def _damaged(path: Path, problem: str) -> Misconfigured:
    return Misconfigured(f"checkpoint {path}", f"it is damaged: {problem}")
