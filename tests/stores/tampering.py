"""Rows of stores removed, doubled and changed behind the back of their loaders: what tests and soaks have in common."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction
from redis import Redis


@dataclass(frozen=True)
class Harm:
    """What was done to a store: the kind of finding, what the name of the row has to hold, and how it is undone."""

    kind: str
    name: str
    heal: Callable[[], object]
    count: int = 1


class LakeTampering:
    """With the rows of a Delta table, as anybody who can write to its folder might."""

    KINDS: Sequence[str] = ("missing", "doubled", "changed")

    def __init__(self, path: str) -> None:
        self._path = path

    def harm(self, kind: str, chance: random.Random) -> Harm:
        location = chance.choice(DeltaTable(self._path).to_pyarrow_table(columns=["_partition", "_offset"]).to_pylist())
        partition, offset = location["_partition"], location["_offset"]
        which = f"_partition = {partition} AND _offset = {offset}"
        filters = [("_partition", "=", partition), ("_offset", "=", offset)]

        def change(table: DeltaTable) -> None:
            if kind == "missing":
                table.delete(which)
            elif kind == "doubled":
                write_deltalake(table, table.to_pyarrow_table(filters=filters), mode="append")
            else:
                table.update(predicate=which, updates={"n": "-1"})

        version = _retrying(self._path, change)
        commit = _actions(self._path, version)
        added = [one["add"] for one in commit if "add" in one]
        removed = [one["remove"]["path"] for one in commit if "remove" in one]
        heal = partial(_retrying, self._path, partial(_undo, added=added, removed=removed))
        if kind == "changed":
            rows = sum(json.loads(one["stats"])["numRecords"] for one in added)
            return Harm(kind, f"version {version} wrote {added[0]['path']}", heal, rows)
        return Harm(kind, f"partition {partition}, offset {offset}", heal)


def _undo(table: DeltaTable, added: Sequence[dict[str, Any]], removed: Sequence[str]) -> None:
    """Bring the original files back, and take out those of the harm."""
    ours = {
        one["add"]["path"]: one["add"]
        for version in range(table.version() + 1)
        for one in _actions(table.table_uri, version)
        if "add" in one
    }
    back = [
        AddAction(path, ours[path]["size"], {}, ours[path]["modificationTime"], True, ours[path]["stats"])
        for path in removed
    ]
    out = [RemoveAction(one["path"], True, int(time.time() * 1000), one["size"]) for one in added]
    table.create_write_transaction([*back, *out], "append", table.schema())


def _actions(path: str, version: int) -> list[dict[str, Any]]:
    file = Path(path.removeprefix("file://"), "_delta_log", f"{version:020}.json")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _retrying(path: str, change: Callable[[DeltaTable], None]) -> int:
    """Again when the loader was quicker: then nothing was committed. The version of the commit."""
    while True:
        try:
            table = DeltaTable(path)
            change(table)
            return table.version()
        except DeltaError:
            time.sleep(random.random() / 10)


class RedisTampering:
    """With the rows of a live table."""

    KINDS: Sequence[str] = ("missing", "changed")

    def __init__(self, client: "Redis", channel: str) -> None:
        self._client, self._prefix = client, f"penstock:{channel}:"

    def harm(self, kind: str, chance: random.Random) -> Harm:
        found = self._client.scan_iter(f"{self._prefix}row:*")
        name = chance.choice(sorted(name for name in found if self._client.hexists(name, "row")))
        before = self._client.dump(name) or b""
        if kind == "missing":
            self._client.delete(name)
        elif chance.random() < 0.5:
            self._client.hset(name, "row", json.dumps({"forged": chance.randrange(1000)}))
        else:
            self._client.hincrby(name, "version", 1_000_000)

        def heal() -> None:
            self._client.restore(name, 0, before, replace=True)

        return Harm(kind, name.decode().removeprefix(f"{self._prefix}row:"), heal)
