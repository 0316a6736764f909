"""Who may come in: nobody whom the page of another site sends, in its own name or in ours."""

import socket
from collections.abc import Collection
from ipaddress import ip_address

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.replies import problem

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def own_page(visitor: HTTPConnection) -> bool:
    """Whether no page of another site asks."""
    origin = visitor.headers.get("origin")
    return origin is None or origin.partition("://")[2] == visitor.headers.get("host")


class OwnPages:
    """Refuses what pages of other sites ask for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or own_page(HTTPConnection(scope)):
            await self._app(scope, receive, send)
        else:
            facts = {"place": "the header origin", "way_out": ""}
            await problem(403, "pages of other sites may not ask here", facts)(scope, receive, send)


class Addressed:
    """Refuses who asks for another name than those that we have on this machine, if we listen on it alone.

    A page elsewhere can have its name point here: to a browser we would be its own site, and all ours would be its.
    Who listens to others cannot know by what names they call him.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, *names: str) -> None:
        self._app = app
        self._alone = ip_address(listener.getsockname()[0]).is_loopback
        self._names = {*_LOOPBACK, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._alone and scope["type"] != "lifespan":
            asked = HTTPConnection(scope).headers.get("host")
            if asked is not None and _without_port(asked) not in self._names:
                facts = {"place": "the header host", "way_out": f"ask for {' or '.join(sorted(self._names))}"}
                await problem(403, f'"{asked}" is none of the names of this server', facts)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def hosts(origins: Collection[str]) -> list[str]:
    """The names in origins, such as `https://example.org`."""
    return [_without_port(origin.partition("://")[2]) for origin in origins]


def _without_port(authority: str) -> str:
    name, colon, port = authority.rpartition(":")
    return (name if colon and "]" not in port else authority).lower()
