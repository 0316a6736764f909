"""What a query's checkpoint tells: the batches that Spark has finished, how far each has read, its watermark.

Also the batches that were given up, and the records that are excluded.

Read beside Spark, without it. A checkpoint on a shared file system cannot be looked into from here.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    watermark: int
    """In milliseconds since 1970; 0 when there is none yet."""
    ends: Mapping[str, Offsets]
    """Per channel, up to where it has read."""


def on_disk(folder: str) -> Path | None:
    """The folder, if this machine can look into it."""
    return None if "://" in folder and not folder.startswith("file://") else Path(folder.removeprefix("file://"))


def numbers(log: Path) -> list[int]:
    """The batches of which a folder holds a file each, in order."""
    return sorted(int(file.name) for file in log.glob("[0-9]*") if file.name.isdigit())


def told(positions: Offsets) -> str:
    """Positions in words."""
    return ", ".join(f"{partition}={offset}" for partition, offset in sorted(positions.items()))


def unfinished(folder: str) -> int | None:
    """The batch that was begun and has not ended; None when there is none, or this machine cannot look there."""
    path = on_disk(folder)
    if path is None or not (begun := numbers(path / "offsets")):
        return None
    # Looked up after those that were begun: one that ends meanwhile has ended.
    finished = numbers(path / "commits")
    return begun[-1] if not finished or finished[-1] < begun[-1] else None


def covered(folder: str) -> Mapping[str, Offsets] | None:
    """Per channel, the offsets up to which the last finished batch has read; None when there is none to be found."""
    path = on_disk(folder)
    if path is None or not (finished := numbers(path / "commits")):
        return None
    try:
        return _batch(path, finished[-1]).ends
    except (OSError, ValueError, AttributeError) as error:
        problem = f"its offsets cannot be read: {error}"
        raise Misconfigured(f"checkpoint {folder}", problem, "see whether its files are whole") from error


def batches(folder: str, begun: bool = False) -> list[Batch]:
    """The finished batches that the checkpoint still remembers, in order; none when it cannot be looked into.

    With `begun`, one that is not finished comes last.
    """
    if (path := on_disk(folder)) is None:
        return []
    found = []
    for number in numbers(path / ("offsets" if begun else "commits")):
        try:
            found.append(_batch(path, number))
        except (OSError, ValueError, AttributeError):
            found.clear()  # Spark removes old ones while we look; what lies before a hole is of no use.
    return found


def ends_of(folder: str, number: int, channel: str) -> Offsets:
    """Up to where a batch reads a channel, from when it has begun."""
    return _batch(Path(folder), number).ends[channel]


def _batch(path: Path, number: int) -> Batch:
    """By its note of offsets: a version, what Spark notes for itself, then a line for each source."""
    _, metadata, *sources = (path / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
    ends: dict[str, dict[int, int]] = {}
    for line in sources:
        told = json.loads(line) if line != "-" else {}
        for channel, offsets in told.items():
            known = ends.setdefault(channel, {})
            for partition, offset in offsets.items():
                # A query may read a channel twice; what both have read is covered.
                known[int(partition)] = min(int(offset), known.get(int(partition), int(offset)))
    return Batch(number, int(json.loads(metadata).get("batchWatermarkMs", 0)), ends)


_GIVEN_UP = "given-up"
_FIRST_COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'


def give_up(folder: str) -> int | None:
    """Give the unfinished batch of a checkpoint up, if there is one: its number. Only for a query without state.

    Spark notes what a batch will read before it reads it, and afterwards that it has finished. A batch with the first
    note alone may have written some of its rows. To give it up is to write the second note: nothing is written twice.
    """
    path, left = on_disk(folder), unfinished(folder)
    if path is None or left is None:
        return None
    (path / _GIVEN_UP).mkdir(exist_ok=True)
    # First that it is given up, then that it is over: otherwise a crash in between would pass for a batch well done.
    (path / _GIVEN_UP / str(left)).touch()
    finished = numbers(path / "commits")
    note = (path / "commits" / str(finished[-1])).read_text(encoding="utf-8") if finished else _FIRST_COMMIT
    (path / "commits").mkdir(exist_ok=True)
    written = path / _GIVEN_UP / "commit"
    written.write_text(note, encoding="utf-8")
    written.replace(path / "commits" / str(left))
    return left


def take_up(folder: str) -> None:
    """A batch that was to be given up, and is still unfinished, will be done again: it is not given up."""
    if (path := on_disk(folder)) is not None:
        finished = numbers(path / "commits")
        for number in given_up(folder):
            if not finished or number > finished[-1]:
                (path / _GIVEN_UP / str(number)).unlink()


def given_up(folder: str) -> frozenset[int]:
    """The batches of a checkpoint that were given up."""
    path = on_disk(folder)
    return frozenset() if path is None else frozenset(numbers(path / _GIVEN_UP))


EXCLUDED_FILE = "excluded.json"
_EXCLUDED_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Excluded:
    """One record, and the error that the query fails with."""

    channel: str
    partition: int
    offset: int
    error: str


def excluded(folder: str) -> list[Excluded]:
    """The records that the query of a checkpoint leaves out; Misconfigured when the file cannot be read."""
    path = on_disk(folder)
    if path is None or not (path / EXCLUDED_FILE).exists():
        return []
    try:
        told = json.loads((path / EXCLUDED_FILE).read_text(encoding="utf-8"))
        if told["format"] != _EXCLUDED_FORMAT:
            raise ValueError(f"it has format {told['format']}")
        return [
            Excluded(str(one["channel"]), int(one["partition"]), int(one["offset"]), str(one["error"]))
            for one in told["records"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"its list of excluded records, {EXCLUDED_FILE}, cannot be read: {error!r}"
        fix = "bring it back from a copy, or remove it: the records in it are then found again"
        raise Misconfigured(f"checkpoint {folder}", problem, fix) from error


def exclude(folder: str, records: Iterable[Excluded]) -> None:
    """Add records to those that are left out; on disk when this returns."""
    path = on_disk(folder)
    if path is None:
        raise Misconfigured(f"checkpoint {folder}", "records cannot be excluded there", "keep it in a local folder")
    known = {(one.channel, one.partition, one.offset): one for one in [*excluded(folder), *records]}
    written = path / f"{EXCLUDED_FILE}.new"
    with written.open("w", encoding="utf-8") as file:
        json.dump({"format": _EXCLUDED_FORMAT, "records": [asdict(one) for one in known.values()]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path / EXCLUDED_FILE)
