"""The files of a query's checkpoint: batches with their offsets and watermarks, abandoned batches, excluded records.

`written` checks that the files are complete, including damage that Spark would ignore.

The files are read directly, without Spark. Remote file systems cannot be read.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import TypeAdapter

from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    watermark: int
    """In milliseconds since 1970; 0 when there is none."""
    ends: Mapping[str, Offsets]
    """Per channel, the end offsets."""


def on_disk(folder: str) -> Path | None:
    """The local path of a folder; None when it is on a remote file system."""
    return None if "://" in folder and not folder.startswith("file://") else Path(folder.removeprefix("file://"))


def numbers(log: Path) -> list[int]:
    """The numbers of the batches that have a file in a folder, in order."""
    return sorted(int(file.name) for file in log.glob("[0-9]*") if file.name.isdigit())


def format_offsets(positions: Offsets) -> str:
    return ", ".join(f"{partition}={offset}" for partition, offset in sorted(positions.items()))


def _listed(folder: str, log: str) -> list[int]:
    """The batches that have a file in a log of a checkpoint; none when it is remote."""
    path = on_disk(folder)
    return [] if path is None else numbers(path / log)


def unfinished(folder: str) -> int | None:
    """The batch that was started and not committed; None when there is none, or the checkpoint is remote."""
    begun = max(_listed(folder, "offsets"), default=None)
    # Read after the offsets: a batch that ends in between counts as ended.
    finished = last_commit(folder)
    return begun if begun is not None and (finished is None or finished < begun) else None


def last_commit(folder: str) -> int | None:
    """The last committed batch; None when there is none, or the checkpoint is remote."""
    return max(_listed(folder, "commits"), default=None)


def covered(folder: str) -> Mapping[str, Offsets] | None:
    """Per channel, the end offsets of the last committed batch; None when there is none."""
    if (finished := last_commit(folder)) is None:
        return None
    try:
        return _batch(folder, finished).ends
    except (OSError, ValueError, AttributeError) as error:
        problem = f"its offsets cannot be read: {error}"
        raise Misconfigured(f"checkpoint {folder}", problem, "see whether its files are whole") from error


def batches(folder: str, begun: bool = False) -> list[Batch]:
    """The committed batches that the checkpoint still holds, in order; none when it is remote.

    With `begun`, also the batch that is not committed.
    """
    found = []
    for number in _listed(folder, "offsets" if begun else "commits"):
        try:
            found.append(_batch(folder, number))
        except (OSError, ValueError, AttributeError):
            found.clear()  # Spark removes old batches concurrently: batches before a gap are useless.
    return found


def ends_of(folder: str, number: int, channel: str) -> Offsets:
    """The end offsets of a started batch in a channel."""
    return _batch(folder, number).ends[channel]


def _batch(folder: str, number: int) -> Batch:
    metadata, sources = read_offsets(on_disk(folder) or Path(folder), number)
    ends: dict[str, Offsets] = {}
    for source in sources:
        for channel, offsets in parse_offsets(source).items():
            # A query may read a channel twice: what both have read is covered.
            other = ends.get(channel, {})
            ends[channel] = {**other, **{at: min(end, other.get(at, end)) for at, end in offsets.items()}}
    return Batch(number, int(metadata.get("batchWatermarkMs", 0)), ends)


def read_offsets(path: Path, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The offsets file of a batch: Spark's metadata, and the end offsets of each source; none before its first read.

    Raises OSError or ValueError when it cannot be read.
    """
    lines = _versioned(path / "offsets" / str(number))
    metadata, *sources = [{} if line == "-" else json.loads(line) for line in lines]
    if not all(isinstance(one, dict) for one in (metadata, *sources)):
        raise ValueError("it has no settings, or no offsets")
    return metadata, sources


def _versioned(file: Path) -> list[str]:
    """The lines of a file of Spark, after the line of its version."""
    version, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    if not version.startswith("v"):
        raise ValueError(f"it begins with {version[:20]!r}")
    return lines


def parse_offsets(fields: Mapping[str, Mapping[Any, Any]]) -> dict[str, Offsets]:
    """Offsets per channel and partition, from the JSON form of checkpoints."""
    return {
        channel: {int(partition): int(offset) for partition, offset in offsets.items()}
        for channel, offsets in fields.items()
    }


_ABANDONED = "given-up"
_FIRST_COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'


def abandon_batch(folder: str) -> int | None:
    """Abandon the unfinished batch of a checkpoint; return its number. Only for a query without state.

    Spark writes the offsets of a batch before the batch, and a commit after it. A batch without a commit may have
    written some of its rows. To abandon it, its commit is written: no row is written twice.
    """
    path, left = on_disk(folder), unfinished(folder)
    if path is None or left is None:
        return None
    (path / _ABANDONED).mkdir(exist_ok=True)
    # In this order: otherwise, after a crash in between, the batch would look complete.
    (path / _ABANDONED / str(left)).touch()
    finished = last_commit(folder)
    note = _FIRST_COMMIT if finished is None else (path / "commits" / str(finished)).read_text(encoding="utf-8")
    (path / "commits").mkdir(exist_ok=True)
    written = path / _ABANDONED / "commit"
    written.write_text(note, encoding="utf-8")
    written.replace(path / "commits" / str(left))
    return left


def resume_batch(folder: str) -> None:
    """Undo the abandonment of a batch that is still unfinished: it will be repeated."""
    if (path := on_disk(folder)) is not None:
        finished = last_commit(folder)
        for number in abandoned_batches(folder):
            if finished is None or number > finished:
                (path / _ABANDONED / str(number)).unlink()


def abandoned_batches(folder: str) -> frozenset[int]:
    return frozenset(_listed(folder, _ABANDONED))


EXCLUDED_FILE = "excluded.json"
_EXCLUDED_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Excluded:
    """A record that makes the query fail, and the error."""

    channel: str
    partition: int
    offset: int
    error: str


_EXCLUDED = TypeAdapter(list[Excluded])


def excluded(folder: str) -> list[Excluded]:
    """The records that the query of a checkpoint skips; Misconfigured when the file cannot be read."""
    path = on_disk(folder)
    if path is None or not (path / EXCLUDED_FILE).exists():
        return []
    try:
        fields = json.loads((path / EXCLUDED_FILE).read_text(encoding="utf-8"))
        if fields["format"] != _EXCLUDED_FORMAT:
            raise ValueError(f"it has format {fields['format']}")
        return _EXCLUDED.validate_python(fields["records"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"its list of excluded records, {EXCLUDED_FILE}, cannot be read: {error!r}"
        fix = "bring it back from a copy, or remove it: the records in it are then found again"
        raise Misconfigured(f"checkpoint {folder}", problem, fix) from error


def exclude(folder: str, records: Iterable[Excluded]) -> None:
    """Add records to the excluded ones; they are on disk when this returns."""
    path = on_disk(folder)
    if path is None:
        raise Misconfigured(f"checkpoint {folder}", "records cannot be excluded there", "keep it in a local folder")
    everything = {(one.channel, one.partition, one.offset): one for one in [*excluded(folder), *records]}
    written = path / f"{EXCLUDED_FILE}.new"
    with written.open("w", encoding="utf-8") as file:
        json.dump({"format": _EXCLUDED_FORMAT, "records": [asdict(one) for one in everything.values()]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path / EXCLUDED_FILE)


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
        _checked(path, path / "offsets" / str(number))
        try:
            metadata, sources = read_offsets(path, number)
        except (OSError, ValueError) as error:
            raise _damaged(path, f"offsets/{number} cannot be read: {error}") from error
    ids: set[str] = set()
    if finished:
        ids = _committed(path, finished[-1])
        _state(path, finished[-1] + 1, ids)
    numbered = bool(finished) and not ids and any(path.glob("state/[0-9]*"))
    channels = tuple(next(iter(source), None) for source in sources)
    return Written(identity, last, finished[-1] if finished else None, metadata, channels, numbered)


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
        metadata, *_ = _versioned(path / "commits" / str(number))
        unique: dict[str, list[list[str]]] = json.loads(metadata).get("stateUniqueIds") or {}
        return {one for partitions in unique.values() for stores in partitions for one in stores}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise _damaged(path, f"commits/{number} cannot be read: {error}") from error


def _state(path: Path, version: int, ids: set[str]) -> None:
    """Check the files from which Spark loads a version: the last snapshot before it, and each later change."""
    for store in _stores(path):
        there = [match for file in store.iterdir() if (match := _STATE.fullmatch(file.name))]
        # Files of an interrupted batch have another id.
        mine = [match for match in there if int(match[1]) != version or not ids or match[2] in ids]
        steps = {int(match[1]): store / match[0] for match in mine if match[3] in _STEPS}
        snapshots = {int(match[1]): store / match[0] for match in mine if match[3] not in _STEPS}
        last = max((number for number in snapshots if number <= version), default=0)
        needed = [snapshots[last]] if last in snapshots else []
        where = store.relative_to(path)
        for number in range(last + 1, version + 1) if there else ():
            if number not in steps:
                raise _damaged(path, f"{where} has no changelog of version {number} of the state")
            needed.append(steps[number])
        for file in needed:
            if not file.stat().st_size:
                raise _damaged(path, f"{where}/{file.name} is empty")
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
