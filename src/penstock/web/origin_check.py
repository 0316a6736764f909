"""Rejects cross-site requests (Origin) and DNS rebinding (Host), for all HTTP servers."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.web.responses import error_response

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Refusal:
    """The rejected header, and why."""

    header: str
    why: str
    fix: str = ""


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

    def refusal(self, hosts: Sequence[str], origins: Sequence[str]) -> Refusal | None:
        """Why a request with these headers is rejected, or None. Either header may occur several times."""
        if len(hosts) > 1:
            return Refusal("host", "it occurs twice", "send it once")
        others = [origin for origin in origins if origin not in self._origins]
        for host in hosts:
            if (others or self._loopback) and not self._is_own_name(_without_port(host)):
                return Refusal(
                    "host",
                    f'"{host}" is not a name of this server',
                    f"use {' or '.join(sorted(self._names))}, or add the name to the server's configuration",
                )
        if any([origin.partition("://")[2]] != list(hosts) for origin in others):
            return Refusal("origin", "cross-site request", "add the site to the option origins of the server")
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
                facts = {"place": f"the header {refusal.header}", "fix": refusal.fix}
                await error_response(403, refusal.why, facts)(scope, receive, send)
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
