"""What sources that are HTTP clients have in common: the address, redirects, and requested pauses."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import httpx

from penstock.collect.registry import check_headers, check_positive
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Misconfigured, Unavailable
from penstock.web.webhook import MAX_PAUSE, retry_after

REDIRECTS = 5
"""How many in a row are followed."""
LATER = (429, 503)
"""Status codes whose Retry-After is used."""

_REASON = 300
_MOVED = (301, 302, 303, 307, 308)

# httpx logs each request with its address, which may contain a token.
logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Target:
    """The address of a source. `display`: for people, without user, password and query."""

    url: httpx.URL
    display: str


def target(address: str, name: str, prefix: str) -> Target:
    """Parse `sse+https://host/path`."""
    fix = f"write {prefix}http://host:port/path or {prefix}https://…"
    try:
        url = httpx.URL(address.removeprefix(prefix))
    except (httpx.InvalidURL, ValueError) as error:
        raise Misconfigured(f"source {name}", str(error), fix) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise Misconfigured(f"source {name}", "the address is not an HTTP address", fix)
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise Misconfigured(f"source {name}", f"{url.port} is not a valid port", fix)
    return Target(url, f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}{url.path}")


@asynccontextmanager
async def get(
    client: httpx.AsyncClient, to: Target, url: httpx.URL, secrets: Mapping[str, str], headers: Mapping[bytes, bytes]
) -> AsyncIterator[httpx.Response]:
    """The response, before its body is read. Redirects are followed; `secrets` are sent only to the server of `to`.

    Compression is refused: a small body could expand without a limit.
    """
    for _ in range(REDIRECTS + 1):
        same_server = _server(url) == _server(to.url)
        sent = httpx.Headers(dict(secrets) if same_server else {})
        sent.update(headers)
        sent["accept-encoding"] = "identity"
        async with client.stream("GET", url, headers=sent) as response:
            if response.status_code not in _MOVED or "location" not in response.headers:
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise Unavailable(to.display, "its response is compressed, although the request refused it")
                yield response
                return
            url = _next(to, url, response.headers["location"])
    raise Unavailable(to.display, f"it redirects more than {REDIRECTS} times")


def _server(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _next(to: Target, url: httpx.URL, location: str) -> httpx.URL:
    try:
        following = url.join(location)
    except (httpx.InvalidURL, ValueError) as error:
        raise Unavailable(to.display, "it redirects to an invalid address") from error
    if following.scheme not in ("http", "https") or not following.host:
        raise Unavailable(to.display, "it redirects to an address that is not HTTP")
    if url.scheme == "https" and following.scheme == "http":
        raise Unavailable(to.display, "it redirects from https to http")
    return following


@contextmanager
def http_errors(to: Target, silent_for: float) -> Iterator[None]:
    """Turn httpx errors into Unavailable, with the reason."""
    try:
        yield
    except httpx.ReadTimeout as error:
        raise Unavailable(to.display, f"no data for {silent_for:g} s") from error
    except httpx.TimeoutException as error:
        raise Unavailable(to.display, "the connection timed out") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        # The message may contain what the server sent.
        why = "".join(sign if sign.isprintable() else "?" for sign in str(error)[:_REASON])
        raise Unavailable(to.display, why or type(error).__name__) from error


def refusal(to: Target, response: httpx.Response, clock: Clock) -> Unavailable:
    """The error of a response with another status, with the pause that the server requests."""
    pause = retry_after(response.headers.get("retry-after"), clock) if response.status_code in LATER else None
    return Unavailable(to.display, f"status {response.status_code}", pause)


@dataclass
class Pauses:
    """When the next request is allowed. Kept between openings of the source."""

    usual: float = 0.0
    """Minimum seconds between two connections."""
    until: float = 0.0

    def request(self, seconds: float | None) -> None:
        """Wait this long from now on, at least `usual`."""
        pause = min(max(seconds or 0.0, self.usual), MAX_PAUSE)
        self.until = max(self.until, time.monotonic() + pause)

    async def wait(self) -> None:
        await asyncio.sleep(max(0.0, self.until - time.monotonic()))


@dataclass(frozen=True)
class HttpClientSource:
    """Base class of sources that are HTTP clients. `prefix`: of the scheme in the address."""

    prefix: ClassVar[str]

    url: str
    name: str
    headers: Mapping[str, str] = field(default_factory=dict)
    max_size: int = 1 << 20
    open_within: timedelta = timedelta(seconds=10)
    proxy: str | None = None
    clock: Clock = field(default_factory=SystemClock)
    _pauses: Pauses = field(default_factory=Pauses, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._target()
        check_positive(self, "max_size", "open_within")
        check_headers(self.name, self.headers)

    def _target(self) -> Target:
        return target(self.url, self.name, self.prefix)

    def _client(self, silent_for: float) -> httpx.AsyncClient:
        """A client that ignores the proxy settings of the machine, and does not follow redirects by itself."""
        verify = ssl.create_default_context() if self._target().url.scheme == "https" else True
        timeout = httpx.Timeout(silent_for, connect=self.open_within.total_seconds())
        return httpx.AsyncClient(
            verify=verify, timeout=timeout, proxy=self.proxy, trust_env=False, follow_redirects=False
        )
