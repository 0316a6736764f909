"""Check that the files of a checkpoint are complete, including damage that Spark would ignore."""

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
    """The contents of a checkpoint with at least one started batch."""

    id: str
    """Spark's id of the query."""
    begun: int
    """The last started batch."""
    finished: int | None
    """The last committed batch."""
    metadata: dict[str, Any]
    """Spark's metadata of that batch: the watermark, and the settings of the checkpoint."""
    sources: tuple[str | None, ...]
    """The channel of each source, in Spark's order; None before its first read."""
    numbered: bool = False
    """Its state has format 1, whose files have only numbers. Real time needs format 2."""


def written(path: Path) -> Written | None:
    """Read a checkpoint; None when no batch was started; Misconfigured when something is missing or damaged."""
    begun, finished = numbers(path / "offsets"), numbers(path / "commits")
    if not begun and not finished:
        return None
    identity = _identity(path)
    if not begun or (finished and begun[-1] < finished[-1]):
        last = finished[-1]
        raise _damaged(path, f"batch {last} is committed, and its offsets (offsets/{last}) are missing")
    last = begun[-1]
    if last and last - 1 not in begun:
        raise _damaged(path, f"offsets/{last - 1} is missing, which Spark needs to continue")
    if last and (not finished or finished[-1] < last - 1):
        raise _damaged(path, f"batch {last} was started, and the previous one is not committed")
    for number in begun[-2:]:
        metadata, sources = offsets(path, number)
    ids: set[str] = set()
    if finished:
        ids = _committed(path, finished[-1])
        _state(path, finished[-1] + 1, ids)
    numbered = bool(finished) and not ids and any(path.glob("state/[0-9]*"))
    return Written(identity, last, finished[-1] if finished else None, metadata, sources, numbered)


def offsets(path: Path, number: int) -> tuple[dict[str, Any], tuple[str | None, ...]]:
    """Spark's metadata of a started batch, and the channel of each source."""
    file = path / "offsets" / str(number)
    _checked(path, file)
    try:
        version, metadata, *sources = file.read_text(encoding="utf-8").splitlines()
        if not version.startswith("v"):
            raise ValueError(f"it begins with {version[:20]!r}")
        noted = json.loads(metadata)
        if not isinstance(noted, dict):
            raise ValueError("it has no settings")
        return noted, tuple(_channel(line) for line in sources)
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(path, f"offsets/{number} cannot be read: {error}") from error


def _channel(line: str) -> str | None:
    parsed = {} if line == "-" else json.loads(line)
    return next(iter(parsed), None)


def _identity(path: Path) -> str:
    _checked(path, path / "metadata")
    try:
        return str(json.loads((path / "metadata").read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        raise _damaged(path, "its file metadata, with the id of the query, is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"its file metadata cannot be read: {error!r}") from error


def _committed(path: Path, number: int) -> set[str]:
    """The ids of the state files of a batch; none in format 1."""
    _checked(path, path / "commits" / str(number))
    try:
        version, parsed, *_ = (path / "commits" / str(number)).read_text(encoding="utf-8").splitlines()
        if not version.startswith("v"):
            raise ValueError(f"it begins with {version[:20]!r}")
        unique: dict[str, list[list[str]]] = json.loads(parsed).get("stateUniqueIds") or {}
        return {one for partitions in unique.values() for stores in partitions for one in stores}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _damaged(path, f"commits/{number} cannot be read: {error}") from error


def _state(path: Path, version: int, ids: set[str]) -> None:
    """Check the files from which Spark loads a version: the last snapshot before it, and each later change."""
    for store in _stores(path):
        there = [match for file in store.iterdir() if (match := _STATE.fullmatch(file.name))]
        # Files of an interrupted batch have another id.
        mine = [match for match in there if int(match[1]) != version or not ids or match[2] in ids]
        files = {(match[3], int(match[1])): store / match[0] for match in mine}
        if not there:
            continue
        whole = [number for kind, number in files if kind not in _STEPS and number <= version]
        snapshot = max(whole, default=0)
        steps = {number: file for (kind, number), file in files.items() if kind in _STEPS}
        due = [number for number in range(snapshot + 1, version + 1) if number not in steps]
        where = store.relative_to(path)
        if due:
            raise _damaged(path, f"{where} has no changelog of version {due[0]} of the state")
        needed = [steps[number] for number in range(snapshot + 1, version + 1)]
        needed += [file for (kind, number), file in files.items() if kind not in _STEPS and number == snapshot]
        if empty := [file.name for file in needed if not file.stat().st_size]:
            raise _damaged(path, f"{where}/{empty[0]} is empty")
        for file in needed:
            _checked(path, file)


def _stores(path: Path) -> Iterator[Path]:
    """The state folders: one for each operator and partition, and in it one for each named store."""
    for partition in sorted(path.glob("state/[0-9]*/[0-9]*")):
        yield partition
        yield from (named for named in sorted(partition.iterdir()) if named.is_dir() and named.name[0].isalpha())


def _checked(path: Path, file: Path) -> None:
    """Compare a file with Hadoop's checksums in `.NAME.crc`, if there are any.

    The format: four magic bytes, the chunk size, and the CRC-32 of each chunk.
    """
    try:
        parsed, data = file.with_name(f".{file.name}.crc").read_bytes(), file.read_bytes()
    except FileNotFoundError:
        return
    size = int.from_bytes(parsed[4:8])
    if parsed[:4] != _CHECKSUMS or size <= 0:
        raise _damaged(path, f"the checksum file of {file.relative_to(path)} is invalid: .{file.name}.crc")
    found = b"".join(crc32(data[at : at + size]).to_bytes(4) for at in range(0, len(data), size))
    if found != parsed[8:]:
        raise _damaged(path, f"the checksum of {file.relative_to(path)} does not match")


def _damaged(path: Path, problem: str) -> Misconfigured:
    return Misconfigured(f"checkpoint {path}", f"it is damaged: {problem}")
