"""Requests: their bodies, paths and query strings, each within limits; and the check of Origin and Host."""

import asyncio
import re
import socket
import zlib
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from ipaddress import ip_address

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.clock import duration
from penstock.core.errors import Unavailable
from penstock.core.text import did_you_mean
from penstock.web.responses import Problem, problem_response

_MAX_MEMBERS = 100
"""Gzip members in a body. A limit, because empty members cost time and hold no data."""


class BodyReader:
    """Reads whole bodies.

    `max_size`: bytes of a body; `memory`: bytes of all bodies in memory; `upload`: time for a body to arrive.
    """

    def __init__(
        self, server: str, max_size: int, memory: int, upload: timedelta, gzip: bool = False, allow_empty: bool = False
    ) -> None:
        self._server, self._max_size, self._memory = server, max_size, memory
        self._upload, self._gzip, self._allow_empty = upload.total_seconds(), gzip, allow_empty
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request, too_large: Problem | None = None) -> AsyncIterator[bytes]:
        """The whole body. It counts towards `memory` while the context is open.

        `too_large`: the error for a body that is larger than the fact `limit` of this error; the default limit is
        `max_size`.
        """
        compressed, refusal = self._is_compressed(request), too_large or self._too_large()
        limit = int(str(refusal.facts["limit"]))
        # Data that compresses badly grows.
        max_sent = max(limit, self._max_size) if compressed else limit
        announced = request.headers.get("content-length", "0")
        if not announced.isdecimal() or len(announced) > 20 or int(announced) > max_sent:
            raise refusal
        body = bytearray()
        try:
            await self._receive(body, request, max_sent, refusal)
            if compressed:
                # Not more than there is memory for: one byte too many is refused by `_hold`.
                content = _gunzip(bytes(body), min(limit, self._memory - self._held + len(body)))
                if len(content) > limit:
                    raise refusal
                self._hold(len(content) - len(body))
                body[:] = content
            if not body and not self._allow_empty:
                raise Problem(400, "the body", "it is empty", "send a record")
            yield bytes(body)
        finally:
            self._held -= len(body)

    def _is_compressed(self, request: Request) -> bool:
        coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
        if coding != "identity" and not (self._gzip and coding in ("gzip", "x-gzip")):
            fix = "use gzip, or no compression" if self._gzip else "send it without compression"
            raise Problem(415, "the header content-encoding", f'"{coding[:40]}" is not supported', fix)
        return coding != "identity"

    async def _receive(self, body: bytearray, request: Request, max_sent: int, refusal: Problem) -> None:
        try:
            async with asyncio.timeout(self._upload):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > max_sent:
                        raise refusal
                    self._hold(len(chunk))
                    body += chunk
        except TimeoutError:
            fix = "send it faster, or fewer records in a request"
            raise Problem(408, "the body", f"it did not arrive within {self._upload:g} s", fix) from None

    def _hold(self, growth: int) -> None:
        if self._held + growth > self._memory:
            raise Unavailable(self._server, "its memory for request bodies is full; the request was rejected", 1.0)
        self._held += growth

    def _too_large(self) -> Problem:
        why, fix = f"it has more than {self._max_size:,} bytes", "send fewer records in a request, or raise body"
        return Problem(413, "the body", why, fix, {"limit": self._max_size, "option": "body"})


def _gunzip(data: bytes, limit: int) -> bytes:
    """The content of all gzip members. It stops when this is larger than the limit."""
    content, members = bytearray(), 0
    while data and len(content) <= limit:
        members += 1
        if members > _MAX_MEMBERS:
            raise _broken_gzip(f"it has more than {_MAX_MEMBERS} members")
        inflate = zlib.decompressobj(wbits=31)
        try:
            content += inflate.decompress(data, limit + 1 - len(content))
        except zlib.error as error:
            raise _broken_gzip(str(error)) from error
        if not inflate.eof and len(content) <= limit:
            raise _broken_gzip("the data ends early")
        data = inflate.unused_data
    return bytes(content)


def _broken_gzip(why: str) -> Problem:
    return Problem(400, "the body", f"it is not valid gzip: {why}", "compress it with gzip, once")


def media_type(request: Request, *accepted: str) -> str:
    """The media type of the body; Problem if it is not accepted."""
    kind, *parameters = request.headers.get("content-type", "").split(";")
    found = kind.strip().lower()
    if found not in accepted:
        why = f"{found} is not supported here" if found else "it is missing"
        raise Problem(415, "the header content-type", why, f"send {' or '.join(accepted)}")
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "charset" and value.strip('"').lower() not in ("utf-8", "utf8"):
            raise Problem(415, "the header content-type", f"the charset {value} is not supported", "send UTF-8")
    return found


LARGEST = 2**63 - 1


class _Rest(PathConvertor):
    """`{name:rest}` in a route: the rest of a path. Starlette's own `path` ends at a line feed."""

    regex = r"[\s\S]*"


register_url_convertor("rest", _Rest())


class Query:
    """The query parameters of a request: only `allowed` ones, each at most once."""

    def __init__(self, request: Request, allowed: Collection[str] = ()) -> None:
        self._values: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if name not in allowed:
                names = f"the parameters are {', '.join(sorted(allowed))}" if allowed else "this address has none"
                raise Problem(400, f"?{name[:100]}", "unknown parameter", did_you_mean(name, allowed, names))
            if name in self._values:
                raise Problem(400, f"?{name}", "it occurs twice", "give it once")
            self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        if self._values.get(name):
            raise Problem(400, f"?{name}", "it takes no value", f"write ?{name} alone")
        return name in self._values

    def number(self, name: str, default: int, most: int = LARGEST, least: int = 0) -> int:
        if name not in self._values:
            return default
        return integer(f"?{name}", self._values[name], most, least)

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        value = self._values.get(name, default)
        if value not in choices:
            raise Problem(400, f"?{name}", f'"{value}" is not a valid value', f"use {' or '.join(choices)}")
        return value

    def seconds(self, name: str, most: timedelta | None = None) -> float | None:
        """A duration such as `10s`, in seconds; None when it is missing."""
        if name not in self._values:
            return None
        try:
            found = duration(self._values[name])
        except ValueError as error:
            why, _, fix = str(error).rpartition("; ")
            raise Problem(400, f"?{name}", why, fix) from error
        if most is not None and found > most:
            longest = f"{most.total_seconds():g}s"
            raise Problem(400, f"?{name}", f"{self._values[name]} is too long", f"use at most {longest}")
        return found.total_seconds()

    def offsets(self, name: str) -> dict[int, int]:
        """`0:12,1:7`: an offset per partition."""
        found: dict[int, int] = {}
        for part in self._values[name].split(","):
            partition, colon, offset = part.partition(":")
            if not colon:
                raise Problem(400, f"?{name}", f'"{part}" is not an offset', "write PARTITION:OFFSET,PARTITION:OFFSET")
            number = integer(f"?{name}", partition)
            if number in found:
                raise Problem(400, f"?{name}", f"partition {number} occurs twice", "give it once")
            found[number] = integer(f"?{name}", offset)
        return found


def integer(location: str, text: str, most: int = LARGEST, least: int = 0) -> int:
    # Longer texts are not parsed: a number of more than twenty digits is out of range anyway.
    if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise Problem(400, location, f'"{text[:40]}" is not a valid integer', f"use a number from {least} to {most}")
    return int(text)


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class OriginCheck:
    """Accepts or rejects requests by their headers Host and Origin.

    Pages of other sites send their Origin: only those in `origins` are accepted. A site can point its own name to this
    machine (DNS rebinding); a browser then treats this server as that site. So the Host of a browser's request has to
    be a name of this server: an IP address, the name of this machine, `names`, or the hosts of `origins`.

    `listener`: the socket, or its IP address. A server on a loopback address accepts only these names. Any other server
    accepts any Host from a client that is not a browser (no Origin), because it may have further names. So does one
    with `proxied`, also on a loopback address: a proxy may pass on the Host of its client.
    """

    def __init__(
        self, listener: socket.socket | str, *names: str, origins: Iterable[str] = (), proxied: bool = False
    ) -> None:
        address = listener if isinstance(listener, str) else listener.getsockname()[0]
        self._loopback = ip_address(address).is_loopback and not proxied
        self._origins = frozenset(origins)
        hosts = (_without_port(origin.partition("://")[2]) for origin in self._origins)
        self._names = {*_LOOPBACK, *(name.lower() for name in names), *hosts}
        if not self._loopback:
            machine = socket.gethostname().lower()
            self._names |= {machine, machine.partition(".")[0], socket.getfqdn().lower()}

    def refusal(self, hosts: Sequence[str], origins: Sequence[str]) -> Problem | None:
        """Why a request with these headers is rejected, or None. Either header may occur several times."""
        if len(hosts) > 1:
            return Problem(403, "the header host", "it occurs twice", "send it once")
        others = [origin for origin in origins if origin not in self._origins]
        for host in hosts:
            if (others or self._loopback) and not self._is_own_name(_without_port(host)):
                fix = f"use {' or '.join(sorted(self._names))}, or add the name to the server's configuration"
                return Problem(403, "the header host", f'"{host}" is not a name of this server', fix)
        if any([origin.partition("://")[2]] != list(hosts) for origin in others):
            fix = "add the site to the option origins of the server"
            return Problem(403, "the header origin", "cross-site request", fix)
        return None

    def _is_own_name(self, name: str) -> bool:
        return name in self._names or (not self._loopback and _is_address(name))


class OriginCheckMiddleware:
    """Answers rejected requests with 403, before they reach the app."""

    def __init__(self, app: ASGIApp, origin_check: OriginCheck) -> None:
        self._app, self._origin_check = app, origin_check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            headers = HTTPConnection(scope).headers
            refusal = self._origin_check.refusal(headers.getlist("host"), headers.getlist("origin"))
            if refusal is not None:
                await problem_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _without_port(authority: str) -> str:
    name, colon, port = authority.rpartition(":")
    return (name if colon and "]" not in port else authority).lower()
