"""Rows of stores removed, doubled and changed behind the back of their loaders: what tests and soaks have in common."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from redis import Redis


@dataclass(frozen=True)
class Harm:
    """What was done to a store: the kind of finding, what the name of the row has to hold, and how it is undone."""

    kind: str
    name: str
    heal: Callable[[], None]


class LakeTampering:
    """With the rows of a Delta table, as anybody who can write to its folder might."""

    KINDS: Sequence[str] = ("missing", "doubled")

    def __init__(self, path: str) -> None:
        self._path = path

    def harm(self, kind: str, chance: random.Random) -> Harm:
        table = DeltaTable(self._path)
        place = chance.choice(table.to_pyarrow_table(columns=["_partition", "_offset"]).to_pylist())
        partition, offset = place["_partition"], place["_offset"]
        row = table.to_pyarrow_table(filters=[("_partition", "=", partition), ("_offset", "=", offset)])
        which = f"_partition = {partition} AND _offset = {offset}"

        def remove() -> None:
            DeltaTable(self._path).delete(which)

        def append() -> None:
            write_deltalake(self._path, row, mode="append")

        if kind == "missing":
            _retrying(remove)
            return Harm(kind, f"partition {partition}, offset {offset}", lambda: _retrying(append))
        _retrying(append)

        def heal() -> None:
            _retrying(remove)
            _retrying(append)

        return Harm(kind, f"partition {partition}, offset {offset}", heal)


def _retrying(change: Callable[[], None]) -> None:
    """Again when the loader was quicker: then nothing was committed."""
    while True:
        try:
            return change()
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
