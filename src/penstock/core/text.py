"""Text for people: names from outside made printable, and suggestions for a misspelled name."""

import difflib
from collections.abc import Collection


def printable(name: str) -> str:
    """Return a name from outside with control characters escaped: they could move the cursor or set colours."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def did_you_mean(
    name: str, known: Collection[str], otherwise: str, as_written: str = '"{}"', cutoff: float = 0.6
) -> str:
    """Suggest the known name that is closest to a misspelled one; `otherwise` if none is close.

    `as_written` is how the user writes the name, such as `"{}://"`.
    """
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name[:100].lower(), by_lower, n=1, cutoff=cutoff)
    return f"did you mean {as_written.format(by_lower[close[0]])}?" if close else otherwise


def counted(number: int, what: str) -> str:
    """`1 record`, `2,000 records`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
