"""What a person may have meant by a name that nobody knows."""

import difflib
from collections.abc import Collection


def meant(name: str, known: Collection[str]) -> str:
    """The way out of a wrong name."""
    if close := difflib.get_close_matches(name, known, n=1):
        return f'did you mean "{close[0]}"?'
    return f"there are {', '.join(known)}"
