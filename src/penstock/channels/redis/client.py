"""The server that channels lie on, in our words: the only file of this room that knows Redis' client."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError
from redis.retry import Retry

from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.text import redact_address

NAMES = "penstock:channels"
GROUPS = "penstock:groups"
_LUA = Path(__file__).with_name("log.lua").read_text(encoding="utf-8")
_SILENT = 30.0
"""Seconds after which a server that does not answer is taken for gone."""
_OLDEST = (6, 2)
_TLS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)
_CHECKED = ("none", "optional", "required")

Arguments = Sequence[bytes | str | int]


def key_of(channel: str) -> str:
    return f"penstock:channel:{{{channel}}}"


class Address:
    """`redis://user:password@host:port/db?volatile=yes`, taken apart."""

    def __init__(self, url: str) -> None:
        try:
            told = urlsplit(url)
            port = told.port
            (told.hostname or "").encode("idna")  # As whoever looks the name up will spell it.
        except ValueError as error:
            raise _wrong("an address of Redis", str(error)) from error
        self.where = redact_address(url)
        self.who = f"Redis at {told.hostname}:{port or 6379}"
        if not told.hostname:
            raise _wrong(f"channels at {self.where}", "it tells no host")
        if (base := told.path.strip("/")) and not base.isdecimal():
            raise _wrong(f"channels at {self.where}", f'"{base}" is no number of a database')
        asked = parse_qsl(told.query, keep_blank_values=True)
        for name, value in asked:
            if name == "volatile" and value not in ("yes", "no"):
                raise Misconfigured(f"channels at {self.where}", f'volatile is "{value}"', "write yes or no")
            if name != "volatile" and name not in _TLS:
                raise Misconfigured(
                    f"channels at {self.where}",
                    f'"{name}" is not a setting',
                    f"there are volatile=yes, and those of TLS: {', '.join(_TLS)}",
                )
            if name in _TLS and told.scheme != "rediss":
                raise Misconfigured(f"channels at {self.where}", f"{name} is a setting of TLS", "write rediss://")
            if name == "ssl_cert_reqs" and value not in _CHECKED:
                problem = f'{name} is "{value}"'
                raise Misconfigured(f"channels at {self.where}", problem, f"write {' or '.join(_CHECKED)}")
        self.volatile = dict(asked).get("volatile") == "yes"
        # Ours is not for the client, which would take it for an argument of a connection.
        theirs = "&".join(part for part in told.query.split("&") if not part.startswith("volatile="))
        self.url = urlunsplit((told.scheme, told.netloc, told.path, theirs, ""))


class Server:
    """A connection that is made with the first question, and again after a failure. Nothing is ever tried twice.

    Whatever an answer of `run` tells is safe, unless the address allows otherwise: it lies in the append-only file, as
    far as a kill of Redis is concerned.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        with self._explained():
            self._redis = redis.Redis.from_url(
                address.url,
                socket_timeout=_SILENT,
                socket_connect_timeout=5,
                # What was written and not answered may have been done.
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            self._sha: str = self._redis.register_script(_LUA).sha

    @property
    def who(self) -> str:
        return self._address.who

    def close(self) -> None:
        self._redis.close()

    # --- the script

    def run(self, calls: Sequence[tuple[Sequence[str], Arguments]]) -> list[Any]:
        """Run a command of `log.lua` for each of these keys and arguments, in one round trip.

        A call that raises may have done some of them.
        """
        answers: dict[int, Any] = {}
        with self._explained():
            while missing := [at for at in range(len(calls)) if at not in answers]:
                with self._redis.pipeline(transaction=False) as asked:
                    for at in missing:
                        keys, arguments = calls[at]
                        asked.evalsha(self._sha, len(keys), *keys, *arguments)
                    asked.info("server")
                    asked.info("persistence")
                    *told, server, file = asked.execute(raise_on_error=False)
                for answer in (*told, server, file):
                    if isinstance(answer, Exception) and not isinstance(answer, NoScriptError):
                        raise answer
                self._settle(server, file)
                done = {at: one for at, one in zip(missing, told, strict=True) if not isinstance(one, NoScriptError)}
                answers |= done
                if len(done) < len(missing):
                    # Redis forgets scripts when it restarts: nothing was done.
                    self._redis.script_load(_LUA)
        return [answers[at] for at in range(len(calls))]

    def one(self, command: str, keys: Sequence[str], *arguments: bytes | str | int) -> Any:
        return self.run([(keys, (command, *arguments))])[0]

    def _settle(self, server: Mapping[str, Any], file: Mapping[str, Any]) -> None:
        """Return once Redis has written down what it had done when it told this of itself."""
        if self._address.volatile:
            return
        generation = server["run_id"]
        while True:
            if not file.get("aof_enabled"):
                raise self._forgetful()
            if file["aof_last_write_status"] != "ok":
                raise Unavailable(self.who, "it cannot write its append-only file: is the disk full?")
            if server["run_id"] != generation:
                raise Unavailable(self.who, "it was started again before it had written all down")
            if written(file):
                return
            time.sleep(0.002)
            with self._redis.pipeline(transaction=False) as asked:
                asked.info("server")
                asked.info("persistence")
                server, file = asked.execute()

    # --- questions

    def check(self) -> None:
        """Misconfigured when the server would lose what it has acknowledged."""
        with self._explained():
            told = self._redis.info()
        version = str(told["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            raise Misconfigured(self.who, f"it is version {version}", "channels need Redis 6.2 or later")
        if told.get("redis_mode") == "cluster":
            raise Misconfigured(self.who, "it is part of a cluster", "channels need a single server")
        policy = told.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise Misconfigured(
                self.who,
                f"its maxmemory-policy is {policy}: it would drop records when its memory is full",
                "set maxmemory-policy noeviction",
            )
        if not self._address.volatile and not told.get("aof_enabled"):
            raise self._forgetful()

    def hash(self, key: str) -> dict[str, bytes]:
        with self._explained():
            return {_text(name): _bytes(value) for name, value in self._redis.hgetall(key).items()}

    def members(self, key: str) -> list[str]:
        with self._explained():
            return sorted(_text(name) for name in self._redis.smembers(key))

    def groups(self, *names: str) -> tuple[dict[str, bytes], Micros]:
        """What groups know, these or all, and the time."""
        with self._explained(), self._redis.pipeline(transaction=False) as asked:
            if names:
                asked.hmget(GROUPS, names)
            else:
                asked.hgetall(GROUPS)
            asked.time()
            told, (seconds, micros) = asked.execute()
        documents = dict(zip(names, told, strict=True)) if names else told
        known = {_text(name): document for name, document in documents.items() if document}
        return known, seconds * 1_000_000 + micros

    def ring(self, channel_positions: Sequence[tuple[str, int, int]], wait: float) -> None:
        """Return as soon as one of these partitions holds something at or behind its position, or after the wait."""
        streams: dict[Any, Any] = {
            # What lies behind the greatest moment that the offset before could have.
            f"{key_of(channel)}:{partition}": f"{position}-18446744073709551615"
            for channel, partition, position in channel_positions
        }
        with self._explained():
            self._redis.xread(streams, count=1, block=max(1, round(wait * 1000)))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, NoPermissionError) as error:
            raise Misconfigured(
                self.who, f"it does not let us in: {error}", "check user and password in its address"
            ) from error
        except redis.RedisError as error:
            raise Unavailable(self.who, str(error) or type(error).__name__) from error

    def _forgetful(self) -> Misconfigured:
        return Misconfigured(
            self.who,
            "its appendonly is off: a crash would lose records that it has acknowledged",
            "set appendonly yes, or allow it with ?volatile=yes in the address",
        )


def written(file: Mapping[str, Any]) -> bool:
    """Whether what Redis did before it told this of its append-only file is written when the answer comes.

    It writes before it answers, with one exception: with appendfsync everysec, it puts off writing while the fsync of
    the last second is still under way, and answers all the same. A kill would then lose what it has acknowledged.
    """
    return not file["aof_pending_bio_fsync"] or not file["aof_buffer_length"]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _wrong(place: str, problem: str) -> Misconfigured:
    return Misconfigured(place, problem, "write redis://host:6379/0")
