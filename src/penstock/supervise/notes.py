"""Small JSON files that survive a crash whole: the old text or the new one, never half of it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def read_note(file: Path) -> dict[str, object]:
    """What the file holds; nothing when it is missing or was spoilt by hand."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(file: Path, note: Mapping[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as out:
        json.dump(note, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
