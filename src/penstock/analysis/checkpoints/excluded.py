"""The records that a query leaves out because they make it fail: a file beside its checkpoint, excluded.json."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from penstock.analysis.checkpoints.batches import on_disk
from penstock.core.errors import Misconfigured

NAME = "excluded.json"
_FORMAT = 1


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
    if path is None or not (path / NAME).exists():
        return []
    try:
        told = json.loads((path / NAME).read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            raise ValueError(f"it has format {told['format']}")
        return [
            Excluded(str(one["channel"]), int(one["partition"]), int(one["offset"]), str(one["error"]))
            for one in told["records"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"its list of excluded records, {NAME}, cannot be read: {error!r}"
        way_out = "bring it back from a copy, or remove it: the records in it are then found again"
        raise Misconfigured(f"checkpoint {folder}", problem, way_out) from error


def exclude(folder: str, records: Iterable[Excluded]) -> None:
    """Add records to those that are left out; on disk when this returns."""
    path = on_disk(folder)
    if path is None:
        raise Misconfigured(f"checkpoint {folder}", "records cannot be excluded there", "keep it in a local folder")
    known = {(one.channel, one.partition, one.offset): one for one in [*excluded(folder), *records]}
    written = path / f"{NAME}.new"
    with written.open("w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, "records": [asdict(one) for one in known.values()]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path / NAME)
