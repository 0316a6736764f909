"""Batches that a crash left unfinished, given up instead of run again: nothing is written twice, and some never.

Spark notes what a batch will read before it reads it, and that it has finished it afterwards. A batch with the first
note alone may have written some of its rows. To give it up is to write the second note for it.
"""

from penstock.analysis.checkpoints.batches import numbers, on_disk, unfinished

_FOLDER = "given-up"
_FIRST = 'v1\n{"nextBatchWatermarkMs":0}'


def give_up(folder: str) -> int | None:
    """Give the unfinished batch of a checkpoint up, if there is one: its number. Only for a query without state."""
    path, left = on_disk(folder), unfinished(folder)
    if path is None or left is None:
        return None
    (path / _FOLDER).mkdir(exist_ok=True)
    # First that it is given up, then that it is over: otherwise a crash in between would pass for a batch well done.
    (path / _FOLDER / str(left)).touch()
    finished = numbers(path / "commits")
    note = (path / "commits" / str(finished[-1])).read_text(encoding="utf-8") if finished else _FIRST
    (path / "commits").mkdir(exist_ok=True)
    written = path / _FOLDER / "commit"
    written.write_text(note, encoding="utf-8")
    written.replace(path / "commits" / str(left))
    return left


def take_up(folder: str) -> None:
    """A batch that was to be given up, and is still unfinished, will be done again: it is not given up."""
    if (path := on_disk(folder)) is not None:
        finished = numbers(path / "commits")
        for number in given_up(folder):
            if not finished or number > finished[-1]:
                (path / _FOLDER / str(number)).unlink()


def given_up(folder: str) -> frozenset[int]:
    """The batches of a checkpoint that were given up."""
    path = on_disk(folder)
    return frozenset() if path is None else frozenset(numbers(path / _FOLDER))
