"""What sources that ask over HTTP have in common: the address, redirects, and pauses that the other side asks for."""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx

from penstock.core.clock import Clock
from penstock.core.errors import Misconfigured, Unavailable
from penstock.web.webhook import MAX_PAUSE, retry_after

REDIRECTS = 5
"""So many in a row are followed."""
LATER = (429, 503)
"""Answers with which a server may say when to come back."""

_REASON = 300
_MOVED = (301, 302, 303, 307, 308)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_VALUE = re.compile(r"[!-~]([\t -~]{0,8190}[!-~])?|")

# It tells of each request with its whole address, which may hold a token.
logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Target:
    """Where a source asks. `who` is what people are shown of it: without a user, a password or a query."""

    url: httpx.URL
    who: str


def place(address: str, name: str, prefix: str) -> Target:
    """Of `sse+https://host/path`; Misconfigured when it is none."""
    fix = f"write {prefix}http://host:port/path or {prefix}https://…"
    try:
        url = httpx.URL(address.removeprefix(prefix))
    except (httpx.InvalidURL, ValueError) as error:
        raise Misconfigured(f"source {name}", str(error), fix) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise Misconfigured(f"source {name}", "its address is none of HTTP", fix)
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise Misconfigured(f"source {name}", f"{url.port} is no port", fix)
    return Target(url, f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}{url.path}")


def check_headers(name: str, headers: Mapping[str, str]) -> None:
    """Misconfigured when one of them cannot be sent."""
    for header, value in headers.items():
        if not _NAME.fullmatch(header) or not isinstance(value, str) or not _VALUE.fullmatch(value):
            # The value may be a secret.
            fix = "a name has no spaces or colons, a value is ASCII without line feeds"
            raise Misconfigured(f"source {name}, headers", f"{header!r} cannot be sent", fix)


def client(to: Target, connect_within: float, silent_for: float, proxy: str | None) -> httpx.AsyncClient:
    """Knows no settings of the machine but its certificates, and follows nobody by itself."""
    verify = ssl.create_default_context() if to.url.scheme == "https" else True
    timeout = httpx.Timeout(silent_for, connect=connect_within)
    return httpx.AsyncClient(verify=verify, timeout=timeout, proxy=proxy, trust_env=False, follow_redirects=False)


@asynccontextmanager
async def asked(
    by: httpx.AsyncClient, to: Target, url: httpx.URL, secrets: Mapping[str, str], headers: Mapping[bytes, bytes]
) -> AsyncIterator[httpx.Response]:
    """The answer, its body not read yet. Redirects are followed; `secrets` are told to the server of `to` alone.

    Nothing is ever compressed: a little of it could become very much.
    """
    for _ in range(REDIRECTS + 1):
        with_context = _server(url) == _server(to.url)
        sent = httpx.Headers(dict(secrets) if with_context else {})
        sent.update(headers)
        sent["accept-encoding"] = "identity"
        async with by.stream("GET", url, headers=sent) as response:
            if response.status_code not in _MOVED or "location" not in response.headers:
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise Unavailable(to.who, "it compresses its answer, though it was asked not to")
                yield response
                return
            url = _next(to, url, response.headers["location"])
    raise Unavailable(to.who, f"it redirects more than {REDIRECTS} times")


def _server(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _next(to: Target, url: httpx.URL, location: str) -> httpx.URL:
    try:
        following = url.join(location)
    except (httpx.InvalidURL, ValueError) as error:
        raise Unavailable(to.who, "it redirects to what is no address") from error
    if following.scheme not in ("http", "https") or not following.host:
        raise Unavailable(to.who, "it redirects to an address that is none of HTTP")
    if url.scheme == "https" and following.scheme == "http":
        raise Unavailable(to.who, "it redirects from https to http")
    return following


@contextmanager
def telling(to: Target, silent_for: float) -> Iterator[None]:
    """Whatever goes wrong while asking is an Unavailable, with the reason."""
    try:
        yield
    except httpx.ReadTimeout as error:
        raise Unavailable(to.who, f"it was silent for {silent_for:g} s") from error
    except httpx.TimeoutException as error:
        raise Unavailable(to.who, "it cannot be reached in time") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        # It may tell what came, which may be anything.
        why = "".join(sign if sign.isprintable() else "?" for sign in str(error)[:_REASON])
        raise Unavailable(to.who, why or type(error).__name__) from error


def refusal(to: Target, response: httpx.Response, clock: Clock) -> Unavailable:
    """What an answer that is none says, and when to come back if it says that too."""
    pause = retry_after(response.headers.get("retry-after"), clock) if response.status_code in LATER else None
    return Unavailable(to.who, f"it answers {response.status_code}", pause)


@dataclass
class Pauses:
    """When the other side may be asked again. It outlives a connection: who opens the source once more waits here."""

    usual: float = 0.0
    """Seconds that there have to be between two connections."""
    until: float = 0.0

    def ask(self, seconds: float | None) -> None:
        """For so long from now on, or as long as it is usual."""
        pause = min(max(seconds or 0.0, self.usual), MAX_PAUSE)
        self.until = max(self.until, time.monotonic() + pause)

    async def over(self) -> None:
        await asyncio.sleep(max(0.0, self.until - time.monotonic()))
