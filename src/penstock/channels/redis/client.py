"""A Redis server: its address, its errors, and our script. Only this module uses the client library."""

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
from penstock.core.contracts import ChannelPartition
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.text import redact_address

NAMES = "penstock:channels"
GROUPS = "penstock:groups"
_LUA = Path(__file__).with_name("log.lua").read_text(encoding="utf-8")
_SILENT = 30.0
"""Seconds after which a server that does not answer counts as down."""
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
    """A parsed `redis://user:password@host:port/db?volatile=yes`."""

    def __init__(self, url: str) -> None:
        try:
            options = urlsplit(url)
            port = options.port
            (options.hostname or "").encode("idna")  # Raises for a name that cannot be looked up.
        except ValueError as error:
            raise _wrong("an address of Redis", str(error)) from error
        self.where = redact_address(url)
        self.server_name = f"Redis at {options.hostname}:{port or 6379}"
        if not options.hostname:
            raise _wrong(f"channels at {self.where}", "it has no host")
        if (base := options.path.strip("/")) and not base.isdecimal():
            raise _wrong(f"channels at {self.where}", f'"{base}" is not the number of a database')
        settings = parse_qsl(options.query, keep_blank_values=True)
        for name, value in settings:
            if name == "volatile" and value not in ("yes", "no"):
                raise Misconfigured(f"channels at {self.where}", f'volatile is "{value}"', "write yes or no")
            if name != "volatile" and name not in _TLS:
                raise Misconfigured(
                    f"channels at {self.where}",
                    f'"{name}" is not a setting',
                    f"the settings are volatile=yes, and for TLS: {', '.join(_TLS)}",
                )
            if name in _TLS and options.scheme != "rediss":
                raise Misconfigured(f"channels at {self.where}", f"{name} is a setting of TLS", "write rediss://")
            if name == "ssl_cert_reqs" and value not in _CHECKED:
                problem = f'{name} is "{value}"'
                raise Misconfigured(f"channels at {self.where}", problem, f"write {' or '.join(_CHECKED)}")
        self.volatile = dict(settings).get("volatile") == "yes"
        # The client would use our setting as an argument of a connection.
        theirs = "&".join(part for part in options.query.split("&") if not part.startswith("volatile="))
        self.url = urlunsplit((options.scheme, options.netloc, options.path, theirs, ""))


class Server:
    """A connection that opens with the first command, and again after a failure. No command is retried.

    When `run` returns, its changes survive a kill of Redis: they are in the append-only file, unless the address has
    `volatile=yes`.
    """

    def __init__(self, address: Address) -> None:
        self._address, self.server_name = address, address.server_name
        with self._translating():
            self._redis = redis.Redis.from_url(
                address.url,
                socket_timeout=_SILENT,
                socket_connect_timeout=5,
                # A command without an answer may have been executed.
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            self._sha: str = self._redis.register_script(_LUA).sha

    def close(self) -> None:
        self._redis.close()

    # --- the script

    def run(self, calls: Sequence[tuple[Sequence[str], Arguments]]) -> list[Any]:
        """Run a command of `log.lua` for each of these keys and arguments, in one round trip.

        If it raises, some of them may have been executed.
        """
        answers: dict[int, Any] = {}
        with self._translating():
            while missing := [at for at in range(len(calls)) if at not in answers]:
                with self._redis.pipeline(transaction=False) as pipeline:
                    for at in missing:
                        keys, arguments = calls[at]
                        pipeline.evalsha(self._sha, len(keys), *keys, *arguments)
                    pipeline.info("server")
                    pipeline.info("persistence")
                    *options, server, file = pipeline.execute(raise_on_error=False)
                for answer in (*options, server, file):
                    if isinstance(answer, Exception) and not isinstance(answer, NoScriptError):
                        raise answer
                self._settle(server, file)
                done = {at: one for at, one in zip(missing, options, strict=True) if not isinstance(one, NoScriptError)}
                answers |= done
                if len(done) < len(missing):
                    # Redis forgets scripts when it restarts; these commands were not executed.
                    self._redis.script_load(_LUA)
        return [answers[at] for at in range(len(calls))]

    def one(self, command: str, keys: Sequence[str], *arguments: bytes | str | int) -> Any:
        return self.run([(keys, (command, *arguments))])[0]

    def _settle(self, server: Mapping[str, Any], file: Mapping[str, Any]) -> None:
        """Return once Redis has written the changes before this answer to its append-only file."""
        if self._address.volatile:
            return
        generation = server["run_id"]
        while True:
            if not file.get("aof_enabled"):
                raise self._forgetful()
            if file["aof_last_write_status"] != "ok":
                raise Unavailable(
                    self.server_name, "it cannot write its append-only file; check whether its disk is full"
                )
            if server["run_id"] != generation:
                raise Unavailable(self.server_name, "it restarted before it had written all changes")
            if written(file):
                return
            time.sleep(0.002)
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.info("server")
                pipeline.info("persistence")
                server, file = pipeline.execute()

    # --- questions

    def check(self) -> None:
        """Raise Misconfigured if the server would lose acknowledged records."""
        with self._translating():
            options = self._redis.info()
        version = str(options["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            raise Misconfigured(self.server_name, f"it is version {version}", "channels need Redis 6.2 or later")
        if options.get("redis_mode") == "cluster":
            raise Misconfigured(self.server_name, "it is part of a cluster", "channels need a single server")
        policy = options.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise Misconfigured(
                self.server_name,
                f"its maxmemory-policy is {policy}: it would drop records when its memory is full",
                "set maxmemory-policy noeviction",
            )
        if not self._address.volatile and not options.get("aof_enabled"):
            raise self._forgetful()

    def hash(self, key: str) -> dict[str, bytes]:
        with self._translating():
            return {_text(name): _bytes(value) for name, value in self._redis.hgetall(key).items()}

    def members(self, key: str) -> list[str]:
        with self._translating():
            return sorted(_text(name) for name in self._redis.smembers(key))

    def groups(self, *names: str) -> tuple[dict[str, bytes], Micros]:
        """The documents of these groups, or of all, and the time of the server."""
        with self._translating(), self._redis.pipeline(transaction=False) as pipeline:
            if names:
                pipeline.hmget(GROUPS, names)
            else:
                pipeline.hgetall(GROUPS)
            pipeline.time()
            options, (seconds, micros) = pipeline.execute()
        documents = dict(zip(names, options, strict=True)) if names else options
        states = {_text(name): document for name, document in documents.items() if document}
        return states, seconds * 1_000_000 + micros

    def ring(self, positions: Mapping[ChannelPartition, int], wait: float) -> None:
        """Wait until one of these partitions has a record at its offset or behind it, or the time is over."""
        streams: dict[Any, Any] = {
            # Behind the largest time that the offset before could have.
            f"{key_of(channel)}:{partition}": f"{position}-18446744073709551615"
            for (channel, partition), position in positions.items()
        }
        with self._translating():
            self._redis.xread(streams, count=1, block=max(1, round(wait * 1000)))

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, NoPermissionError) as error:
            raise Misconfigured(
                self.server_name, f"login failed: {error}", "check user and password in its address"
            ) from error
        except redis.RedisError as error:
            raise Unavailable(self.server_name, str(error) or type(error).__name__) from error

    def _forgetful(self) -> Misconfigured:
        return Misconfigured(
            self.server_name,
            "its appendonly is off: a crash would lose records that it has acknowledged",
            "set appendonly yes, or allow it with ?volatile=yes in the address",
        )


def written(file: Mapping[str, Any]) -> bool:
    """Whether the append-only file has all changes before this answer.

    Redis writes before it answers, with one exception: with appendfsync everysec, it delays the write while an fsync
    is running, and answers before it. A kill would then lose acknowledged records.
    """
    return not file["aof_pending_bio_fsync"] or not file["aof_buffer_length"]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _wrong(location: str, problem: str) -> Misconfigured:
    return Misconfigured(location, problem, "write redis://host:6379/0")
