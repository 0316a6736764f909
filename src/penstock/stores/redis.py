"""Live tables in Redis: the newest row of each key, its version, and the offsets, written in one atomic step."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit
from uuid import uuid4

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from penstock.audit.account import Outcome, Share
from penstock.audit.reconcile import Kept
from penstock.core.clock import Micros
from penstock.core.contracts import Entry, Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Headers
from penstock.core.text import redact_address
from penstock.stores.base import Stored, Totals, furthest, require_kept, require_topic, version_of

_TOMBSTONES = timedelta(days=1)
"""How long the version of a deleted row is kept, if rows have no time to live."""
_AT_ONCE = 1_000

# Redis runs this atomically. Entries before the offsets were applied by an earlier call. A row replaces only an older
# version; a deletion keeps the version, so that an older row does not return. A partition is counted from its offset at
# the first call that counts, or from where reading started if nothing was loaded yet. Rows loaded before a change of
# the time to live expire by the earlier one. No record can make the script fail: a row that is not a hash was damaged
# and is replaced, and times are limited to the largest integer that Lua represents exactly.
_APPLY = """
local positions, index, prefix = KEYS[1], KEYS[2], ARGV[1]
local ttl, tombstones, topic, partitions = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[6])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local at, stands, reached, starts = 7, {}, {}, {}
redis.call('ZCARD', index)
for _ = 1, partitions do
    local partition, known = ARGV[at], tonumber(ARGV[at + 1])
    stands[partition] = tonumber(redis.call('HGET', positions, partition) or '0')
    if stands[partition] < known then
        return {-1, partition, stands[partition]}
    end
    reached[partition], starts[partition] = ARGV[at + 2], ARGV[at + 3]
    at = at + 4
end

local function apply(row, key, version, appended, value)
    local kind = redis.call('TYPE', row)['ok']
    if kind ~= 'hash' and kind ~= 'none' then
        redis.call('DEL', row)
    end
    if version ~= '' then
        local held = tonumber(redis.call('HGET', row, 'version') or '')
        if held and held >= tonumber(version) then
            return 0
        end
    end
    local life = ttl
    if value then
        redis.call('HSET', row, 'row', value)
        redis.call('ZADD', index, string.format('%.0f', appended), key)
    else
        redis.call('DEL', row)
        redis.call('ZREM', index, key)
        life = tombstones
    end
    if version ~= '' then
        redis.call('HSET', row, 'version', version)
    else
        redis.call('HDEL', row, 'version')
    end
    if life > 0 then
        redis.call('PEXPIREAT', row, string.format('%.0f', math.floor(appended / 1000) + life))
    else
        redis.call('PERSIST', row)
    end
    return 1
end

local taken, changed = 0, 0
while at <= #ARGV do
    local partition, offset, key, version = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
    local appended, value = tonumber(ARGV[at + 4]), ARGV[at + 5] == '1' and ARGV[at + 6]
    if appended <= 0 then
        appended = now
    end
    appended = math.min(appended, 9007199254740992)
    if offset >= stands[partition] then
        taken = taken + 1
        changed = changed + apply(prefix .. key, key, version, appended, value)
    end
    at = at + 7
end
for partition, offset in pairs(reached) do
    local since = 'since:' .. partition
    if stands[partition] == 0 then
        redis.call('HSET', positions, since, starts[partition])
    elseif redis.call('HEXISTS', positions, since) == 0 then
        redis.call('HSET', positions, since, string.format('%.0f', stands[partition]))
    end
    if tonumber(offset) > stands[partition] then
        redis.call('HSET', positions, partition, offset)
    end
end
if redis.call('HGET', positions, 'ttl') ~= ARGV[2] then
    local began = redis.call('HEXISTS', positions, 'life') == 1 and now or 0
    redis.call('HSET', positions, 'ttl', ARGV[2], 'ttl_since', string.format('%.0f', began))
end
redis.call('HSETNX', positions, 'life', ARGV[5])
redis.call('HINCRBY', positions, 'taken', taken)
redis.call('HINCRBY', positions, 'passed', changed)
redis.call('HINCRBY', positions, 'duplicate', taken - changed)
if topic ~= '' then
    redis.call('HSET', positions, 'topic', topic)
end
if ttl > 0 then
    redis.call('ZREMRANGEBYSCORE', index, '-inf', string.format('%.0f', now - ttl * 1000))
end
return {changed, redis.call('HGET', positions, 'life')}
"""


@dataclass(frozen=True, slots=True)
class RedisStore:
    """A live table: `penstock:CHANNEL:row:KEY` for each row. Rows expire `ttl` after they were appended."""

    url: str
    channel: str
    ttl: timedelta | None = None
    topic_id: str = ""
    every: timedelta = timedelta(milliseconds=100)

    def open(self) -> "RedisTable":
        return RedisTable(self)

    def stands(self) -> Offsets:
        with closing(self.open()) as table:
            return table.positions()

    def rows(self) -> Iterator[Stored]:
        with closing(self.open()) as table:
            yield from table.rows()


class RedisTable:
    """Opened lazily: the first call connects."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._who = f"Redis at {urlsplit(redact_address(store.url)).netloc or 'localhost'}"
        self._prefix = f"penstock:{store.channel}:"
        self._positions = f"{self._prefix}positions"
        with self._explained():
            # Only the loader retries: a retry here could hide a Redis that restarted without its rows.
            self._redis = redis.Redis.from_url(
                store.url, socket_timeout=10, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
            )
            self._apply = self._redis.register_script(_APPLY)
        self.ttl_since: Micros | None = None
        self._known: dict[int, int] = {}
        self._start: Offsets = {}
        # A new or emptied table gets the generation that is proposed with the first rows.
        self._generation = ""
        self._proposed = uuid4().hex

    @property
    def generation(self) -> str:
        return self._generation or self._proposed

    def positions(self) -> Offsets:
        stands = dict(self._totals().stands)
        self._known = stands
        return stands

    def begin(self, start: Offsets) -> None:
        self._start = start

    def share(self) -> Share:
        return self._totals().share(self._start)

    def _totals(self) -> Totals:
        with self._explained():
            held = {_text(name): _text(value) for name, value in self._redis.hgetall(self._positions).items()}
        require_topic(
            self._who,
            self._store.channel,
            held.get("topic"),
            self._store.topic_id,
            f'delete the keys "{self._prefix}*", or use another database',
        )
        self._remember(held.get("life", ""))
        try:
            return Totals(
                {int(name): int(offset) for name, offset in held.items() if name.isdecimal()},
                {int(name[6:]): int(offset) for name, offset in held.items() if name.startswith("since:")},
                int(held.get("taken", 0)),
                # Each entry becomes a row: nothing is refused.
                {
                    Outcome.PASSED: int(held.get("passed", 0)),
                    Outcome.DUPLICATE: int(held.get("duplicate", 0)),
                    Outcome.REFUSED: 0,
                },
            )
        except ValueError as error:
            # Other tables continue; this one continues when it is repaired.
            problem = (
                f"the key {self._positions} is damaged ({error}); delete the keys {self._prefix}* to fill it again"
            )
            raise Unavailable(self._who, problem) from error

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        store = self._store
        ttl = _milliseconds(store.ttl) if store.ttl else 0
        arguments: list[bytes | str | int] = [
            f"{self._prefix}row:",
            ttl,
            ttl or _milliseconds(_TOMBSTONES),
            store.topic_id,
            self.generation,
        ]
        reached = furthest({entry.partition: entry.offset + 1 for entry in entries}, positions)
        arguments.append(len(reached))
        for partition, offset in reached.items():
            arguments += [partition, self._known.get(partition, 0), offset, self._start.get(partition, 0)]
        for entry in entries:
            version = self.version(entry)
            arguments += [entry.partition, entry.offset, self.key(entry), "" if version is None else version]
            arguments.append(entry.appended)
            arguments += [0, b""] if entry.value is None else [1, entry.value]
        with self._explained():
            answer = self._apply(keys=[self._positions, f"{self._prefix}index"], args=arguments)
        if answer[0] < 0:
            stands = {int(answer[1]): int(answer[2])}
            require_kept(self._who, {partition: self._known[partition] for partition in stands}, stands)
        self._known = furthest(self._known, reached)
        self._remember(_text(answer[1]))
        return int(answer[0])

    @property
    def ttl(self) -> timedelta | None:
        return self._store.ttl

    def kept(self, keys: Sequence[bytes]) -> tuple[Offsets, list[Kept]]:
        """Return the rows of these keys, and the offsets of the table at the same time."""
        with self._explained(), self._redis.pipeline(transaction=True) as commands:
            commands.hgetall(self._positions)
            for key in keys:
                commands.hmget(f"{self._prefix}row:".encode() + key, ["row", "version"])
            held, *rows = commands.execute(raise_on_error=False)
            if isinstance(held, redis.RedisError):
                raise held
        stands = {int(name): int(offset) for name, offset in held.items() if name.isdigit()}
        own = str(_milliseconds(self._store.ttl) if self._store.ttl else 0).encode()
        self.ttl_since = int(held[b"ttl_since"]) if held.get(b"ttl") == own else None
        return stands, [_kept(row) for row in rows]

    def key(self, entry: Entry) -> bytes:
        """Return the key of an entry's row: its own, or its partition and offset."""
        return b"%d-%d" % (entry.partition, entry.offset) if entry.key is None else entry.key

    def version(self, entry: Entry) -> int | None:
        """Return the version by which an entry is compared; None if it has none."""
        return _comparable(entry.headers)

    def rows(self) -> Iterator[Stored]:
        """Yield the newest row of each key."""
        prefix = f"{self._prefix}row:".encode()
        with self._explained():
            # A scan can return a name twice.
            names = sorted(set(self._redis.scan_iter(match=prefix + b"*", count=_AT_ONCE)))
            for start in range(0, len(names), _AT_ONCE):
                some = names[start : start + _AT_ONCE]
                with self._redis.pipeline(transaction=False) as commands:
                    for name in some:
                        commands.hmget(name, ["row", "version"])
                    answers = commands.execute(raise_on_error=False)
                for name, (row, version) in zip(some, map(_kept, answers), strict=True):
                    # A deleted row keeps its version.
                    if row is not None:
                        yield Stored(row, name.removeprefix(prefix), version)

    def close(self) -> None:
        self._redis.close()

    def _remember(self, generation: str) -> None:
        if self._generation and not generation:
            self._proposed = uuid4().hex
        self._generation = generation

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, NoPermissionError) as error:
            raise Misconfigured(self._who, f"access denied: {error}", "check user and password in its URL") from error
        except ValueError as error:
            raise Misconfigured("the URL of Redis", str(error), 'write "redis://host:6379/0"') from error
        except redis.RedisError as error:
            raise Unavailable(self._who, str(error) or type(error).__name__) from error


def _comparable(headers: Headers) -> int | None:
    """Return the version of a result row; None if Lua cannot compare it."""
    version = version_of(headers)
    # Numbers in Lua are doubles.
    return version if version is not None and abs(version) < 2**53 else None


def _kept(answer: list[bytes | None] | redis.RedisError) -> Kept:
    if isinstance(answer, redis.ResponseError):
        # The key is not a hash: the row is gone.
        return Kept(None, None)
    if isinstance(answer, redis.RedisError):
        raise answer
    row, version = answer
    return Kept(row, _whole(version))


def _whole(value: bytes | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
