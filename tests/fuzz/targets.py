"""All targets, by name, and where they are: what they examine is imported when it is asked for."""

import importlib

from tests.fuzz.target import TARGETS, Target

WHERE = {
    **dict.fromkeys(("lines", "lengths", "events"), "streams"),
    **dict.fromkeys(("body_lines", "packed", "packed_files"), "bodies"),
    **dict.fromkeys(("hello", "query", "handshake", "asked"), "doors"),
    **dict.fromkeys(("messages", "trades", "moments", "pauses", "keys"), "messages"),
    **dict.fromkeys(("pages", "paging"), "pages"),
    **dict.fromkeys(("cursors", "progress", "bookmarks", "origins"), "places"),
    **dict.fromkeys(("signatures", "deliveries", "secrets", "receipts"), "seals"),
    **dict.fromkeys(("addresses", "scanning"), "texts"),
}


def found(name: str) -> Target:
    importlib.import_module(f"tests.fuzz.{WHERE[name]}")
    return TARGETS[name]


if __name__ == "__main__":
    print(*WHERE)  # noqa: T201
