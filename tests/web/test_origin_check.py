"""Cross-site requests and DNS rebinding."""

import socket

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware


def header(origin_check: OriginCheck, host: str | None = None, origin: str | None = None) -> str | None:
    """Which header a request is refused for; None when it is taken."""
    refusal = origin_check.refusal([] if host is None else [host], [] if origin is None else [origin])
    return refusal.header if refusal else None


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "LocalHost:80", "[::1]", "[::1]:80", "mine", "friend.example:1"]
)
def test_on_this_machine_alone_our_names_are_known(name: str) -> None:
    origin_check = OriginCheck("127.0.0.1", "Mine", origins=["https://friend.example:8443"])
    assert header(origin_check, name) is None
    assert header(origin_check, name, f"http://{name}") is None


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:80", "localhost.evil.example", "[::2]", "192.168.0.1", ""]
)
def test_on_this_machine_alone_other_names_are_not_ours(name: str) -> None:
    origin_check = OriginCheck("127.0.0.1", "mine")
    assert header(origin_check, name) == "host"
    assert header(origin_check, name, f"http://{name}") == "host"


@pytest.mark.parametrize("name", ["this.example:80", "10.0.0.7", "[2001:db8::1]:80", "localhost", "Mine:80"])
def test_for_others_a_client_that_is_no_browser_may_use_any_name(name: str) -> None:
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
def test_for_others_a_browser_has_to_use_a_name_that_is_known(name: str, refused: str | None) -> None:
    """A page elsewhere can have its own name point here: its browser then takes us for its own site."""
    origin_check = OriginCheck("0.0.0.0", "mine.example", origins=["https://friend.example"])
    assert header(origin_check, name, f"http://{name}") == refused


def test_behind_a_proxy_any_name_is_taken_but_not_from_a_page() -> None:
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
def test_pages_of_other_sites_are_refused(origin: str, refused: str | None) -> None:
    assert header(OriginCheck("127.0.0.1", "here", origins=["https://friend.example"]), "here:80", origin) == refused


def test_a_header_that_is_there_twice_is_no_way_in() -> None:
    origin_check = OriginCheck("127.0.0.1")
    assert origin_check.refusal(["localhost", "localhost"], []) is not None
    assert origin_check.refusal(["localhost"], ["http://localhost", "http://evil.example"]) is not None
    assert origin_check.refusal([], ["http://evil.example"]) is not None
    assert origin_check.refusal([], []) is None


async def test_an_app_hears_of_nothing_that_is_refused() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    checked = httpx.ASGITransport(OriginCheckMiddleware(app, OriginCheck("127.0.0.1")))
    async with httpx.AsyncClient(transport=checked, base_url="http://localhost") as client:
        assert (await client.get("/")).text == "in"
        answer = await client.get("/", headers={"origin": "http://evil.example"})
        assert (answer.status_code, answer.json()["place"]) == (403, "the header origin")
