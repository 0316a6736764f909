"""What stores hold, read back to be compared."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import redis
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from penstock.audit.runs import Runs
from penstock.contracts import Positions
from penstock.errors import Unavailable
from penstock.stores.lake import LakeStore, Numbering, numbers_in
from penstock.stores.redis import RedisStore

_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Stored:
    """A row as a store holds it. A lake keeps no keys and versions of its own: they are in the row."""

    row: bytes
    key: bytes | None = None
    version: int | None = None


def stands(store: RedisStore | LakeStore) -> Positions:
    """How far a store was filled; nowhere when it is not there."""
    if isinstance(store, LakeStore) and not DeltaTable.is_deltatable(store.path):
        return {}
    with closing(store.open()) as opened:
        return opened.positions()


def rows(store: RedisStore | LakeStore) -> Iterator[Stored]:
    """Every row that a store holds: of a live table the newest of each key, of a lake all, in the channel's order."""
    return _in_redis(store) if isinstance(store, RedisStore) else _in_lake(store)


def numbers(store: LakeStore) -> dict[Numbering, Runs]:
    """Which numbers of which senders a lake holds; none when it is not there."""
    try:
        return numbers_in(DeltaTable(store.path)) if DeltaTable.is_deltatable(store.path) else {}
    except (DeltaError, OSError) as error:
        raise Unavailable(f"the lake {store.path}", str(error)) from error


def _in_redis(store: RedisStore) -> Iterator[Stored]:
    prefix = f"penstock:{store.channel}:row:".encode()
    who = f"Redis at {urlsplit(store.url).netloc.rpartition('@')[2] or 'localhost'}"
    try:
        with redis.Redis.from_url(store.url, socket_timeout=30, socket_connect_timeout=5) as client:
            # A scan may give a name twice.
            names = sorted(set(client.scan_iter(match=prefix + b"*", count=_AT_ONCE)))
            for start in range(0, len(names), _AT_ONCE):
                some = names[start : start + _AT_ONCE]
                with client.pipeline(transaction=False) as asked:
                    for name in some:
                        asked.hmget(name, ["row", "version"])
                    for name, (row, version) in zip(some, asked.execute(), strict=True):
                        # A row that was deleted leaves its version behind.
                        if row is not None:
                            yield Stored(row, name.removeprefix(prefix), _whole(version))
    except redis.RedisError as error:
        raise Unavailable(who, str(error) or type(error).__name__) from error


def _in_lake(store: LakeStore) -> Iterator[Stored]:
    if not DeltaTable.is_deltatable(store.path):
        return
    try:
        dataset = DeltaTable(store.path).to_pyarrow_dataset()
        table = dataset.to_table(columns=["value", "_partition", "_offset"])
    except (DeltaError, OSError) as error:
        raise Unavailable(f"the lake {store.path}", str(error)) from error
    for value in table.sort_by([("_partition", "ascending"), ("_offset", "ascending")])["value"]:
        if (row := value.as_py()) is not None:
            yield Stored(row)


def _whole(value: bytes | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None
