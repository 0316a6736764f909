"""Where commands print tables: as wide as the terminal, and as wide as need be where there is none."""

from rich.console import Console


def console() -> Console:
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=180)
