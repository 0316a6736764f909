"""Keys for the records of a channel, from inside their JSON."""

from collections.abc import Sequence

import orjson


def key_of(value: bytes, path: str | Sequence[str] | None) -> bytes | None:
    """What lies at the path ("group.group_id"), as text: `42`. Several paths give a JSON array: `[42,"yes"]`.

    None when there is no path, when the value is not JSON, or when something other than a string, a number or a boolean
    lies there. It never raises.
    """
    if not path:
        return None
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if isinstance(path, str):
        found = _at(document, path)
        return None if found is None else found.encode() if isinstance(found, str) else orjson.dumps(found)
    parts = [_at(document, each) for each in path]
    return None if None in parts else orjson.dumps(parts)


def _at(document: object, path: str) -> str | int | float | bool | None:
    for step in path.split("."):
        if not isinstance(document, dict):
            return None
        document = document.get(step)
    return document if isinstance(document, str | int | float | bool) else None
