"""What Python remembers of tables: which row names which, and the row that a stream finds. By Spark's keyed state.

Rows are texts here: nobody looks into them. Spark hands over all records of a key of a batch at once, in no order: the
one with the highest offset is the last.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from penstock.core.errors import Misconfigured

FOUND = "found"
"""The column of what a stream finds in a table."""

_TOLD = "offset BIGINT, newest BIGINT, appended BIGINT, mark BIGINT"
MOVED = f"place STRING, key STRING, row STRING, gone BOOLEAN, told BOOLEAN, changes BIGINT, {_TOLD}"
RELATED = (
    "key STRING, left STRING, right STRING, "
    "seen STRUCT<count: BIGINT, newest: BIGINT, appended: BIGINT, mark: BIGINT, deleted: BOOLEAN>"
)
LOOKED_UP = f"row STRING, {FOUND} STRING"

CHANGES = 2**22
"""A row may change so often, and the row that it names as well, until versions are used up."""


class _Held(NamedTuple):
    """A row of a table: its text, whether it is gone, how often it has changed, and its last record."""

    row: str | None = None
    gone: bool = True
    changes: int = 0
    offset: int = -1
    newest: int | None = None
    appended: int | None = None
    mark: int = 0

    def then(self, row: Row) -> "_Held":
        """The same after one more record. A row that is gone keeps its text."""
        changes = self.changes + 1
        if row.offset < self.offset:
            return self._replace(changes=changes)
        text = self.row if row.gone else row.row
        return _Held(text, row.gone, changes, row.offset, row.newest, row.appended, row.mark)


_HELD = f"row STRING, gone BOOLEAN, changes BIGINT, {_TOLD}"


class Moves(StatefulProcessor):
    """Left rows, by their own key: where each belongs now, and that it left the place where it was.

    A place is the row that it names, `=KEY`; of one that names none, a place of its own, `-KEY`. Only the place where a
    row is now tells of it: so the last record of a key in the result is true, whatever the order of places.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._at = handle.getValueState("at", "place STRING, changes BIGINT, offset BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before, changes, offset = self._at.get() or (None, 0, -1)
        held, names = _Held(changes=changes, offset=offset), None
        for row in rows:
            if row.offset > held.offset:
                names = row.names
            held = held.then(row)
        if held.offset == offset:
            # All are older than what was taken before: their key came to another partition.
            self._at.update((before, held.changes, offset))
            return
        own = f"-{key[0]}"
        place = own if names is None else f"={names}"
        if held.gone:
            place = before or own
        self._at.update((None if held.gone else place, held.changes, held.offset))
        told = {"key": key[0], **held._asdict()}
        if before is not None and before != place:
            yield Row(**{**told, "gone": True}, place=before, told=False)
        yield Row(**told, place=place, told=True)

    def close(self) -> None:
        """There is nothing to let go of."""


class Relation(StatefulProcessor):
    """A right row and the left rows that name it: each with it, whenever one of the two changes."""

    def __init__(self, without: bool) -> None:
        """`without`: a left row is there without a right one, too."""
        self._without = without

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._right = handle.getValueState("right", _HELD)
        self._lefts = handle.getMapState("lefts", "key STRING", _HELD)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        lefts: dict[str, Row] = {}
        before = right = _Held(*(self._right.get() or ()))
        for row in rows:
            if row.key is None:
                right = right.then(row)
            elif row.key not in lefts or row.changes > lefts[row.key].changes:
                lefts[row.key] = row
        if right != before:
            self._right.update(right)
        # One that names none is not held: nothing but its own change can concern it.
        alone = key[0].startswith("-")
        for name, row in lefts.items():
            known = None if alone else self._lefts.getValue((name,))
            left = _Held(*(row[field] for field in _Held._fields))
            if row.gone:
                if known is not None:
                    self._lefts.removeKey((name,))
                if row.told:
                    last = left._replace(row=row.row or (known[0] if known else None))
                    yield _related(name, last, _Held(row=right.row), True)
            elif alone:
                yield self._told(name, left, right)
            else:
                self._lefts.updateValue((name,), left)
                if right == before:
                    yield self._told(name, left, right)
        if right != before:
            for (name,), values in list(self._lefts.iterator()):
                yield self._told(name, _Held(*values), right)

    def _told(self, name: str, left: _Held, right: _Held) -> Row:
        if self._without and right.gone:
            return _related(name, left, right._replace(row=None), False)
        return _related(name, left, right, right.gone)

    def close(self) -> None:
        """There is nothing to let go of."""


class Lookup(StatefulProcessor):
    """A row of a table and the records of a stream that name it: each with the row as it is when it comes."""

    def __init__(self, without: bool) -> None:
        """`without`: a record that finds nothing is there, too."""
        self._without = without

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._row = handle.getValueState("row", "row STRING, offset BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found, offset = self._row.get() or (None, -1)
        before, records = offset, []
        for row in rows:
            if not row.known:
                records.append(row)
            elif row.offset > offset:
                found, offset = None if row.gone else row.row, row.offset
        if offset > before:
            self._row.update((found, offset))
        if found is not None or self._without:
            for row in sorted(records, key=lambda row: (row.partition, row.offset)):
                yield Row(row=row.row, found=found)

    def close(self) -> None:
        """There is nothing to let go of."""


def _related(name: str, left: _Held, right: _Held, deleted: bool) -> Row:
    """A row of the result. Its version grows with each change of the left row, and between two with the right one's."""
    if max(left.changes, right.changes) >= CHANGES:
        problem = f"the row {name}, or the one that it names, has changed {CHANGES} times: its versions are used up"
        raise Misconfigured("tables.foreign", problem, "let its query begin anew: --new-checkpoint QUERY")
    seen = {
        "count": left.changes * CHANGES + right.changes,
        "newest": _later(left.newest, right.newest),
        "appended": _later(left.appended, right.appended),
        "mark": left.mark ^ right.mark,
        "deleted": deleted,
    }
    return Row(key=name, left=left.row, right=right.row, seen=seen)


def _later(one: int | None, other: int | None) -> int | None:
    return max((at for at in (one, other) if at is not None), default=None)
