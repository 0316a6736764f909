"""Who may come in."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from penstock.serve.visitors import Addressed, OwnPages, hosts


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("in")(scope, receive, send)


@contextmanager
def listening(host: str) -> Iterator[socket.socket]:
    with closing(socket.create_server((host, 0))) as listener:
        yield listener


async def asked(addressed: Addressed | OwnPages, **headers: str) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(addressed), base_url="http://x") as client:
        return (await client.get("/", headers=headers)).status_code


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "LocalHost:80", "[::1]", "[::1]:80", "mine", "friend.example:1"]
)
async def test_on_this_machine_alone_our_names_are_known(name: str) -> None:
    with listening("127.0.0.1") as listener:
        assert await asked(Addressed(app, listener, "Mine", *hosts(["https://friend.example:8443"])), host=name) == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:80", "localhost.evil.example", "[::2]", "192.168.0.1", ""]
)
async def test_on_this_machine_alone_other_names_are_not_ours(name: str) -> None:
    with listening("127.0.0.1") as listener:
        assert await asked(Addressed(app, listener, "mine"), host=name, origin=f"http://{name}") == 403


async def test_for_others_we_may_have_any_name() -> None:
    with listening("0.0.0.0") as listener:
        assert await asked(Addressed(app, listener, "0.0.0.0"), host="this.example") == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://here:80", 200),
        ("https://here:80", 200),
        ("http://here", 403),
        ("http://evil.example", 403),
        ("null", 403),
    ],
)
async def test_pages_of_other_sites_are_refused(origin: str, status: int) -> None:
    assert await asked(OwnPages(app), host="here:80", origin=origin) == status
    assert await asked(OwnPages(app), host="here:80") == 200
