"""What a query's checkpoint tells: the batches that Spark has finished, how far each has read, and its watermark."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    watermark: int
    """In milliseconds since 1970; 0 when there is none yet."""
    ends: Mapping[str, Mapping[int, int]]
    """Per channel and partition, the offset up to which it has read."""


def on_disk(folder: str) -> Path | None:
    """The folder, if this machine can look into it; one on a shared file system is looked at by Spark alone."""
    return None if "://" in folder and not folder.startswith("file://") else Path(folder.removeprefix("file://"))


def batches(folder: str) -> list[Batch]:
    """The finished batches that the checkpoint still remembers, in order; none when it cannot be looked into."""
    if (path := on_disk(folder)) is None:
        return []
    finished = {int(file.name) for file in path.glob("commits/[0-9]*") if file.name.isdigit()}
    found = [_batch(path / "offsets" / str(number), number) for number in sorted(finished)]
    return [batch for batch in found if batch is not None]


def _batch(file: Path, number: int) -> Batch | None:
    """A batch by its note of offsets: a version, then what it knew, then a line for each source."""
    try:
        _, metadata, *sources = file.read_text().splitlines()
    except (OSError, ValueError):
        return None  # Spark removes old ones while we look.
    ends: dict[str, dict[int, int]] = {}
    for line in sources:
        if line.startswith("{"):
            for channel, offsets in json.loads(line).items():
                ends[channel] = {int(partition): int(offset) for partition, offset in offsets.items()}
    return Batch(number, int(json.loads(metadata).get("batchWatermarkMs", 0)), ends)
