"""Rejects cross-site requests (Origin) and DNS rebinding (Host): one check for everything that is served over HTTP."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.replies import problem

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Refusal:
    """Which header is not as it has to be, and why."""

    header: str
    why: str
    way_out: str = ""


class Visitors:
    """Which requests a server takes, by their headers Host and Origin.

    A page of another site says so in Origin: only those in `origins` may ask. But a page elsewhere can have its own
    name point to this machine (DNS rebinding); to its browser, the server here is then its own site. So a browser has
    to ask for a name that is known to be ours: an IP address, the name of this machine, `names`, or the hosts of
    `origins`.

    `listener`: the socket, or its IP address. A server that listens on this machine alone takes no other name from
    anybody. One that others can reach takes any name from a client that is no browser (one without Origin), because it
    cannot know all its names. With `proxied` the same holds on this machine: a proxy in front of it may pass on the
    name by which it was asked.
    """

    def __init__(
        self, listener: socket.socket | str, *names: str, origins: Iterable[str] = (), proxied: bool = False
    ) -> None:
        address = listener if isinstance(listener, str) else listener.getsockname()[0]
        self._alone = ip_address(address).is_loopback and not proxied
        self._origins = frozenset(origins)
        hosts = (_without_port(origin.partition("://")[2]) for origin in self._origins)
        self._names = {*_LOOPBACK, *(name.lower() for name in names), *hosts}
        if not self._alone:
            machine = socket.gethostname().lower()
            self._names |= {machine, machine.partition(".")[0], socket.getfqdn().lower()}

    def refusal(self, hosts: Sequence[str], origins: Sequence[str]) -> Refusal | None:
        """Why a request with these headers is not taken; None when it is. Either header may be there several times."""
        if len(hosts) > 1:
            return Refusal("host", "it is there twice")
        others = [origin for origin in origins if origin not in self._origins]
        for host in hosts:
            if (others or self._alone) and not self._is_ours(_without_port(host)):
                return Refusal(
                    "host",
                    f'"{host}" is none of the names of this server',
                    f"ask for {' or '.join(sorted(self._names))}, or set the name that it has",
                )
        if any([origin.partition("://")[2]] != list(hosts) for origin in others):
            return Refusal("origin", "pages of other sites may not ask here", "let the server allow this site: origins")
        return None

    def _is_ours(self, name: str) -> bool:
        return name in self._names or (not self._alone and _is_address(name))


class Checked:
    """An app that hears of nothing but what its visitors may ask."""

    def __init__(self, app: ASGIApp, visitors: Visitors) -> None:
        self._app, self._visitors = app, visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            headers = HTTPConnection(scope).headers
            refusal = self._visitors.refusal(headers.getlist("host"), headers.getlist("origin"))
            if refusal is not None:
                facts = {"place": f"the header {refusal.header}", "way_out": refusal.way_out}
                await problem(403, refusal.why, facts)(scope, receive, send)
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
