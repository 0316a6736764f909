"""Cross-site requests and DNS rebinding."""

import socket

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from penstock.web.requests import OriginCheck, OriginCheckMiddleware


def header(origin_check: OriginCheck, host: str | None = None, origin: str | None = None) -> str | None:
    """Which header a request is refused for; None when it is taken."""
    refusal = origin_check.refusal([] if host is None else [host], [] if origin is None else [origin])
    return refusal.location.removeprefix("the header ") if refusal else None


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "LocalHost:80", "[::1]", "[::1]:80", "mine", "friend.example:1"]
)
def test_a_loopback_server_accepts_its_own_names(name: str) -> None:
    origin_check = OriginCheck("127.0.0.1", "Mine", origins=["https://friend.example:8443"])
    assert header(origin_check, name) is None
    assert header(origin_check, name, f"http://{name}") is None


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:80", "localhost.evil.example", "[::2]", "192.168.0.1", ""]
)
def test_a_loopback_server_rejects_other_names(name: str) -> None:
    origin_check = OriginCheck("127.0.0.1", "mine")
    assert header(origin_check, name) == "host"
    assert header(origin_check, name, f"http://{name}") == "host"


@pytest.mark.parametrize("name", ["this.example:80", "10.0.0.7", "[2001:db8::1]:80", "localhost", "Mine:80"])
def test_a_public_server_accepts_any_name_without_an_origin(name: str) -> None:
    assert header(OriginCheck("0.0.0.0", "0.0.0.0"), name) is None


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("evil.example:80", "host"),
        ("10.0.0.7.evil.example", "host"),
        ("10.0.0.7:80", None),
        ("[2001:db8::1]:80", None),
        ("localhost:80", None),
        ("mine.example:80", None),
        ("friend.example:80", None),
        (socket.gethostname(), None),
    ],
)
def test_a_public_server_accepts_only_its_names_from_browsers(name: str, refused: str | None) -> None:
    """A page elsewhere can have its own name point here: its browser then takes us for its own site."""
    origin_check = OriginCheck("0.0.0.0", "mine.example", origins=["https://friend.example"])
    assert header(origin_check, name, f"http://{name}") == refused


def test_a_proxied_server_accepts_any_name_without_an_origin() -> None:
    origin_check = OriginCheck("127.0.0.1", proxied=True)
    assert header(origin_check, "hooks.example") is None
    assert header(origin_check, "hooks.example", "http://hooks.example") == "host"
    assert header(origin_check, "127.0.0.1", "http://evil.example") == "origin"


@pytest.mark.parametrize(
    ("origin", "refused"),
    [
        ("http://here:80", None),
        ("https://here:80", None),
        ("https://friend.example", None),
        ("http://here", "origin"),
        ("http://evil.example", "origin"),
        ("null", "origin"),
    ],
)
def test_cross_site_requests_are_rejected(origin: str, refused: str | None) -> None:
    assert header(OriginCheck("127.0.0.1", "here", origins=["https://friend.example"]), "here:80", origin) == refused


def test_a_repeated_header_is_rejected() -> None:
    origin_check = OriginCheck("127.0.0.1")
    assert origin_check.refusal(["localhost", "localhost"], []) is not None
    assert origin_check.refusal(["localhost"], ["http://localhost", "http://evil.example"]) is not None
    assert origin_check.refusal([], ["http://evil.example"]) is not None
    assert origin_check.refusal([], []) is None


async def test_the_app_does_not_get_rejected_requests() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    checked = httpx.ASGITransport(OriginCheckMiddleware(app, OriginCheck("127.0.0.1")))
    async with httpx.AsyncClient(transport=checked, base_url="http://localhost") as client:
        assert (await client.get("/")).text == "in"
        answer = await client.get("/", headers={"origin": "http://evil.example"})
        assert (answer.status_code, answer.json()["place"]) == (403, "the header origin")
