"""What a query's checkpoint tells: the batches that Spark has finished, how far each has read, and its watermark.

Read beside Spark, without it. A checkpoint on a shared file system cannot be looked into from here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.contracts import Positions
from penstock.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    watermark: int
    """In milliseconds since 1970; 0 when there is none yet."""
    ends: Mapping[str, Positions]
    """Per channel, up to where it has read."""


def on_disk(folder: str) -> Path | None:
    """The folder, if this machine can look into it."""
    return None if "://" in folder and not folder.startswith("file://") else Path(folder.removeprefix("file://"))


def numbers(log: Path) -> list[int]:
    """The batches of which a folder holds a file each, in order."""
    return sorted(int(file.name) for file in log.glob("[0-9]*") if file.name.isdigit())


def told(positions: Positions) -> str:
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


def covered(folder: str) -> Mapping[str, Positions] | None:
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


def ends_of(folder: str, number: int, channel: str) -> Positions:
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
