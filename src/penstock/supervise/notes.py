"""Small JSON files that survive a crash whole: the old text or the new one, never half of it."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")


def read_note(file: Path) -> dict[str, object]:
    """What the file holds; nothing when it is missing or was spoilt by hand."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def fitting(shape: type[T], note: Mapping[str, object]) -> T | None:
    """The dataclass that a note holds, whichever version has written it: what is unknown is passed over.

    None when the note lacks what cannot be done without.
    """
    known = {field.name: note[field.name] for field in fields(cast(Any, shape)) if field.name in note}
    try:
        return shape(**known)
    except TypeError:
        return None


def write_note(file: Path, note: Mapping[str, object]) -> None:
    """Put the note in the place of what was there. Only its owner can read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o600)
        json.dump(note, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
