"""The contents of a query's checkpoint: finished batches with their offsets and watermarks, abandoned batches, and
excluded records.

The files are read directly, without Spark. Remote file systems cannot be read.
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
    """Format offsets for people."""
    return ", ".join(f"{partition}={offset}" for partition, offset in sorted(positions.items()))


def unfinished(folder: str) -> int | None:
    """The batch that was started and not committed; None when there is none, or the checkpoint is remote."""
    path = on_disk(folder)
    if path is None or not (begun := numbers(path / "offsets")):
        return None
    # Read after the offsets: a batch that ends in between counts as ended.
    finished = numbers(path / "commits")
    return begun[-1] if not finished or finished[-1] < begun[-1] else None


def covered(folder: str) -> Mapping[str, Offsets] | None:
    """Per channel, the end offsets of the last committed batch; None when there is none."""
    path = on_disk(folder)
    if path is None or not (finished := numbers(path / "commits")):
        return None
    try:
        return _batch(path, finished[-1]).ends
    except (OSError, ValueError, AttributeError) as error:
        problem = f"its offsets cannot be read: {error}"
        raise Misconfigured(f"checkpoint {folder}", problem, "see whether its files are whole") from error


def batches(folder: str, begun: bool = False) -> list[Batch]:
    """The committed batches that the checkpoint still holds, in order; none when it is remote.

    With `begun`, also the batch that is not committed.
    """
    if (path := on_disk(folder)) is None:
        return []
    found = []
    for number in numbers(path / ("offsets" if begun else "commits")):
        try:
            found.append(_batch(path, number))
        except (OSError, ValueError, AttributeError):
            found.clear()  # Spark removes old batches concurrently: batches before a gap are useless.
    return found


def ends_of(folder: str, number: int, channel: str) -> Offsets:
    """The end offsets of a started batch in a channel."""
    return _batch(Path(folder), number).ends[channel]


def _batch(path: Path, number: int) -> Batch:
    """Read a batch's offsets file: a version, Spark's metadata, then a line for each source."""
    _, metadata, *sources = (path / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
    ends: dict[str, dict[int, int]] = {}
    for line in sources:
        fields = json.loads(line) if line != "-" else {}
        for channel, offsets in fields.items():
            starts = ends.setdefault(channel, {})
            for partition, offset in offsets.items():
                # A query may read a channel twice: what both have read is covered.
                starts[int(partition)] = min(int(offset), starts.get(int(partition), int(offset)))
    return Batch(number, int(json.loads(metadata).get("batchWatermarkMs", 0)), ends)


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
    finished = numbers(path / "commits")
    note = (path / "commits" / str(finished[-1])).read_text(encoding="utf-8") if finished else _FIRST_COMMIT
    (path / "commits").mkdir(exist_ok=True)
    written = path / _ABANDONED / "commit"
    written.write_text(note, encoding="utf-8")
    written.replace(path / "commits" / str(left))
    return left


def resume_batch(folder: str) -> None:
    """Undo the abandonment of a batch that is still unfinished: it will be repeated."""
    if (path := on_disk(folder)) is not None:
        finished = numbers(path / "commits")
        for number in abandoned_batches(folder):
            if not finished or number > finished[-1]:
                (path / _ABANDONED / str(number)).unlink()


def abandoned_batches(folder: str) -> frozenset[int]:
    """The abandoned batches of a checkpoint."""
    path = on_disk(folder)
    return frozenset() if path is None else frozenset(numbers(path / _ABANDONED))


EXCLUDED_FILE = "excluded.json"
_EXCLUDED_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Excluded:
    """A record that makes the query fail, and the error."""

    channel: str
    partition: int
    offset: int
    error: str


def excluded(folder: str) -> list[Excluded]:
    """The records that the query of a checkpoint skips; Misconfigured when the file cannot be read."""
    path = on_disk(folder)
    if path is None or not (path / EXCLUDED_FILE).exists():
        return []
    try:
        fields = json.loads((path / EXCLUDED_FILE).read_text(encoding="utf-8"))
        if fields["format"] != _EXCLUDED_FORMAT:
            raise ValueError(f"it has format {fields['format']}")
        return [
            Excluded(str(one["channel"]), int(one["partition"]), int(one["offset"]), str(one["error"]))
            for one in fields["records"]
        ]
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
