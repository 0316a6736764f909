"""Histories of tables, and what each operator has to make of them, in plain Python. No I/O.

A history is a list of batches, each a list of changes in the order in which they are sent. Tables are folded as the
operators promise it: the last change of a key is its row, one without a value takes it away.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Value = dict[str, Any]
Table = dict[str, Value]


class Change(NamedTuple):
    """One record: of which table, of which key, and what it holds now; None when it is deleted."""

    table: str
    key: str
    value: Value | None


def generate(
    seed: int,
    tables: Sequence[str],
    keys: int = 20,
    batches: int = 3,
    size: int = 60,
    names: Mapping[str, tuple[str, int]] | None = None,
) -> list[list[Change]]:
    """Upserts, changes, repeated records, deletions (of what was never there, too) and rows that come back.

    `names`: per table, a column that names a key of another table, and how many keys that has; now and then it names
    none, or one that does not exist. Rows move from one name to another.
    """
    rng = random.Random(seed)
    known: dict[tuple[str, str], Value] = {}
    history: list[list[Change]] = []
    for _ in range(batches):
        batch = []
        for _ in range(size):
            table, key = rng.choice(tables), str(rng.randrange(keys))
            before = known.get((table, key))
            if rng.random() < 0.2:
                known.pop((table, key), None)
                batch.append(Change(table, key, None))
                continue
            value: Value = before if before is not None and rng.random() < 0.15 else {"n": rng.randrange(1_000)}
            if value is not before:
                value["text"] = rng.choice(["ä", 'a "b"', "c:d", ""])
                if names and table in names:
                    column, many = names[table]
                    value[column] = None if rng.random() < 0.1 else rng.randrange(many + 2)
            known[table, key] = value
            batch.append(Change(table, key, value))
        history.append(batch)
    return history


def flat(batches: Iterable[Iterable[Change]]) -> list[Change]:
    return [change for batch in batches for change in batch]


def latest(changes: Iterable[Change], table: str) -> Table:
    """The rows of one table."""
    rows: Table = {}
    for change in changes:
        if change.table == table:
            rows.pop(change.key, None)
            if change.value is not None:
                rows[change.key] = change.value
    return rows


def joined(changes: Sequence[Change], tables: Sequence[str], how: str) -> dict[str, dict[str, Value | None]]:
    """By key, the row of each table."""
    rows = {table: latest(changes, table) for table in tables}
    keys = set().union(*rows.values())
    if how == "left":
        keys = set(rows[tables[0]])
    if how == "inner":
        keys = set(rows[tables[0]]).intersection(*rows.values())
    return {key: {table: rows[table].get(key) for table in tables} for key in keys}


def related(
    changes: Sequence[Change], left: str, right: str, on: str, how: str
) -> dict[str, tuple[Value, Value | None]]:
    """By the key of the left table, its row and the one that it names."""
    others = latest(changes, right)
    found = {
        key: (row, others.get(str(row[on])) if row[on] is not None else None)
        for key, row in latest(changes, left).items()
    }
    return {key: pair for key, pair in found.items() if how == "left" or pair[1] is not None}


def looked_up(
    batches: Sequence[Sequence[Change]], stream: str, table: str, on: str, how: str
) -> list[tuple[Value, Value | None]]:
    """Each record of a stream with the row that it found: of a batch, the table's changes come first."""
    before: list[Change] = []
    found = []
    for batch in batches:
        before += batch
        rows = latest(before, table)
        for change in batch:
            if change.table == stream and change.value is not None:
                named = change.value[on]
                found.append((change.value, None if named is None else rows.get(str(named))))
    return [pair for pair in found if how == "left" or pair[1] is not None]


def counted(changes: Iterable[Change], tables: Sequence[str]) -> int:
    """How many records the rows of a join hold together: all of them, each once."""
    return sum(change.table in tables for change in changes)
