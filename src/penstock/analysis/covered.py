"""How far a query has come, as its checkpoint says. Read beside Spark, without it."""

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.contracts import Positions
from penstock.errors import Misconfigured


def covered(checkpoint: str) -> Mapping[str, Positions] | None:
    """Per channel, the offsets up to which the last committed batch has read; None when there is none to be found.

    A checkpoint on a shared file system cannot be looked into from here.
    """
    if "://" in checkpoint and not checkpoint.startswith("file://"):
        return None
    folder = Path(checkpoint.removeprefix("file://"))
    batches = [int(file.name) for file in folder.glob("commits/[0-9]*") if file.name.isdigit()]
    if not batches:
        return None
    file = folder / "offsets" / str(max(batches))
    try:
        return _offsets(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError) as error:
        problem = f"its offsets cannot be read: {error}"
        raise Misconfigured(f"checkpoint {checkpoint}", problem, "see whether its files are whole") from error


def _offsets(text: str) -> dict[str, dict[int, int]]:
    """A version, what Spark notes for itself, and then a line for each source: its topics with their offsets."""
    found: dict[str, dict[int, int]] = {}
    for line in text.splitlines()[2:]:
        told = json.loads(line) if line != "-" else {}
        for topic, offsets in told.items():
            known = found.setdefault(topic, {})
            for partition, offset in offsets.items():
                # A query may read a channel twice; what both have read is covered.
                known[int(partition)] = min(int(offset), known.get(int(partition), int(offset)))
    return found
