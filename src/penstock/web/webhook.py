"""Send webhooks, signed as Standard Webhooks require, and read Retry-After."""

import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.signatures import sign

TIMEOUT = 10.0
MAX_PAUSE = 300.0
"""Seconds: longer pauses are cut to this."""
_RETRIED = (408, 429)
_MIN_PAUSE = 1.0

# httpx logs each request with its whole address, which may be secret.
logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message, with an id that is the same for all attempts."""

    id: str
    body: bytes


class Rejected(PenstockError):
    """Raised when a message will never be accepted."""

    def __init__(self, who: str, status: int) -> None:
        super().__init__(who, status)
        self.who, self.status = who, status

    def __str__(self) -> str:
        fix = "redirects are not followed; use the final address" if self.status < 400 else "the message is not retried"
        return f"{self.who} answers {self.status}: {fix}"


def new_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Webhook:
    """The receiver of messages."""

    url: str
    key: bytes = field(default=b"", repr=False)
    clock: Clock = field(default_factory=SystemClock)

    @property
    def who(self) -> str:
        """The name for logs, without path and query, which may be secret."""
        return f"the webhook at {urlsplit(self.url).netloc}"

    def message(self, kind: str, data: Mapping[str, object], id: str = "") -> Message:
        time = datetime.fromtimestamp(self.clock.now() / 1e6, UTC).isoformat().replace("+00:00", "Z")
        # ASCII, because names may hold lone surrogates, which UTF-8 cannot encode.
        body = json.dumps({"type": kind, "timestamp": time, "data": data}).encode("ascii")
        return Message(id or new_id(), body)

    def post(self, client: httpx.Client, message: Message) -> None:
        """Send once; Unavailable if a retry may help, Rejected if not."""
        with self._unavailable(), client.stream("POST", self.url, **self._content(message)) as response:
            self._check(response)

    async def post_async(self, client: httpx.AsyncClient, message: Message) -> None:
        """Like `post`."""
        with self._unavailable():
            async with client.stream("POST", self.url, **self._content(message)) as response:
                self._check(response)

    def _content(self, message: Message) -> dict[str, Any]:
        # Signed for each attempt: receivers reject old timestamps.
        signature = sign(self.key, message.id, self.clock.now() // 1_000_000, message.body)
        headers = {"content-type": "application/json", "user-agent": "penstock", **signature}
        return {"content": message.body, "headers": headers, "follow_redirects": False}

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise Unavailable(self.who, str(error) or type(error).__name__) from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status >= 500 or status in _RETRIED:
            pause = retry_after(response.headers.get("retry-after"), self.clock)
            raise Unavailable(self.who, f"it answers {status}", None if pause is None else max(pause, _MIN_PAUSE))
        if not response.is_success:
            raise Rejected(self.who, status)


def retry_after(header: str | None, clock: Clock) -> float | None:
    """The seconds of Retry-After, a number or a date; None when it is missing or not readable."""
    if header is None:
        return None
    try:
        if header.strip().isdecimal():
            seconds = float(header)
        else:
            seconds = parsedate_to_datetime(header).timestamp() - clock.now() / 1e6
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_PAUSE)
