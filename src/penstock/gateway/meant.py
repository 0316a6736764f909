"""What may have been meant by a name that there is not."""

import difflib
from collections.abc import Iterable


def close_to(given: str, known: Iterable[str], otherwise: str) -> str:
    """The way out for a name that there is not."""
    close = [f'"{name}"' for name in difflib.get_close_matches(given, list(known), n=3)]
    return f"did you mean {' or '.join(close)}?" if close else otherwise
