"""Webhooks: a provider posts events, signed as Standard Webhooks defines it, until the response is 202.

Headers `webhook-id`, `webhook-timestamp` (seconds), `webhook-signature` (`v1,BASE64`, several separated by spaces):
HMAC-SHA256 over `id.timestamp.body`. Each id is stored once.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.collect.listen import endpoint, too_large
from penstock.collect.numbers import WEBHOOK_SUFFIX
from penstock.collect.webhook.deliveries import Delivery, DeliveryQueue
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured
from penstock.core.signatures import parse_secrets, verify
from penstock.web.bodies import BodyReader
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.responses import Problem, SecurityHeaders, handlers, reply
from penstock.web.server import http_config, run_server

MAX_ID = 256
MAX_CHALLENGE = 1_000
_STOP_TIMEOUT = 2
"""Seconds at a stop in which providers can read their responses."""
_SIGN_FIX = "sign it as Standard Webhooks defines it, with the secret of this source"


@dataclass(frozen=True)
class WebhookSource:
    """Listens at `listen+webhook://host:port/path`.

    `secret`: `whsec_` and base64, or any text; several during a rotation. `unsigned`: accept messages without a
    signature. `window`: the maximum difference between the signed time and the local time. `remember`: how long an id
    is known; a message that is repeated later is stored twice. `folder`: keeps ids, and bodies until they are durable.
    `challenge`: the query parameter that some providers expect back when the address is registered.
    """

    url: str
    name: str
    secret: str | Sequence[str] = field(default="", repr=False)
    unsigned: bool = False
    window: timedelta = timedelta(minutes=5)
    remember: timedelta = timedelta(hours=76)
    folder: Path | str = ".penstock/webhooks"
    challenge: str | None = None
    max_size: int = 900_000
    memory: int = 64 << 20
    connections: int = 1_000
    within: timedelta = timedelta(seconds=10)
    upload: timedelta = timedelta(seconds=30)
    idle_timeout: timedelta = timedelta(seconds=10)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        path = unquote(endpoint(self.url, self.name).path)
        if "{" in path or "}" in path:
            raise Misconfigured(f"source {self.name}", f'the path "{path}" is not allowed', "remove the braces")
        secrets = self._keys()
        if not secrets and not self.unsigned:
            fix = "set secret= from the provider, or unsigned=True to accept messages without a signature"
            raise Misconfigured(f"source {self.name}, secret", "it is missing", fix)
        if secrets and self.unsigned:
            raise Misconfigured(
                f"source {self.name}, unsigned", "it cannot be combined with secret=", "remove one of them"
            )
        if self.remember < 2 * self.window:
            # A copy of a message has a valid signature for this time.
            raise Misconfigured(f"source {self.name}, remember", "it is shorter than two windows")

    def _keys(self) -> list[bytes]:
        return parse_secrets(f"source {self.name}, secret", self.secret)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        hours = self.remember.total_seconds() / 3600
        return f"the provider repeats events without a response, and each id is stored once within {hours:g} hours"

    @property
    def sender(self) -> str:
        """The sender name of the messages."""
        return f"{self.name}{WEBHOOK_SUFFIX}"

    def with_context(self, context: SourceContext) -> "WebhookSource":
        """The same source, with its ids in the folder of its pipeline."""
        return replace(self, folder=context.folder / "webhooks")

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(at.listen(self.name))
            highest = resume.highest.get(self.sender, (0, 0))
            queue = DeliveryQueue(self.name, self.sender, Path(self.folder), self.remember, self.clock, highest)
            await stack.enter_async_context(queue.opened())
            messages = _Messages(self, queue, self._keys())
            # Providers connect through proxies and tunnels, which forward the host name.
            checked = OriginCheckMiddleware(
                messages.app(unquote(at.path)), OriginCheck(listener, at.host, proxied=True)
            )
            config = http_config(checked, self.connections, self.idle_timeout.total_seconds(), _STOP_TIMEOUT)
            await stack.enter_async_context(run_server(config, listener))
            intakes = await stack.enter_async_context(aclosing(queue.queue.intakes()))
            try:
                yield intakes
            finally:
                # Acknowledge what is durable, so that providers need not repeat it.
                await queue.stop()


class _Messages:
    """The requests of one opening."""

    def __init__(self, source: WebhookSource, queue: DeliveryQueue, secrets: Sequence[bytes]) -> None:
        self._source, self._queue, self._keys = source, queue, secrets
        # No gzip: the signature covers the bytes as they were sent.
        self._bodies = BodyReader(f"the source {source.name}", source.max_size, source.memory, source.upload)

    def app(self, path: str) -> Starlette:
        starlette = Starlette(
            routes=[Route(path, self._answer, methods=["GET", "POST"])],
            middleware=[Middleware(SecurityHeaders)],
            exception_handlers=handlers("the source", "use the address of the source"),
        )
        starlette.router.redirect_slashes = False
        return starlette

    async def _answer(self, request: Request) -> Response:
        return await (self._take(request) if request.method == "POST" else self._challenge(request))

    async def _take(self, request: Request) -> Response:
        message = self._id(request)
        self._queue.check_space()
        async with self._bodies.body(request, too_large("the body", self._source.max_size)) as body:
            if not self._source.unsigned:
                self._verify(request, message, body)
            delivery = Delivery(message, body, self._source.clock.now())
            durable = await self._queue.put(delivery, self._source.within.total_seconds())
        if not durable:
            raise Problem(503, "the message", "it is not durable yet", "send it again, with the same id")
        return reply({"id": message}, 202)

    def _id(self, request: Request) -> str:
        message = _single(request, "webhook-id", 400)
        if not 0 < len(message) <= MAX_ID or not (message.isascii() and message.isprintable()):
            reason = f"an id has 1 to {MAX_ID} printable ASCII characters"
            raise Problem(400, "the header webhook-id", reason, "choose another id")
        return message

    def _verify(self, request: Request, message: str, body: bytes) -> None:
        seconds, signature = _single(request, "webhook-timestamp", 400), _single(request, "webhook-signature", 401)
        if not re.fullmatch(r"[0-9]{1,15}", seconds):
            raise Problem(400, "the header webhook-timestamp", "it is not a number", "send the seconds since 1970")
        if not verify(self._keys, signature, message, seconds, body):
            raise Problem(401, "the header webhook-signature", "it does not match the message", _SIGN_FIX)
        if abs(self._source.clock.now() - int(seconds) * 1_000_000) > self._source.window.total_seconds() * 1e6:
            window = f"{self._source.window.total_seconds():g} s"
            reason = f"it is more than {window} from now"
            raise Problem(401, "the header webhook-timestamp", reason, "sign it again now, with the same id")

    async def _challenge(self, request: Request) -> Response:
        name = self._source.challenge
        if name is None:
            raise HTTPException(405, headers={"Allow": "POST"})
        values = request.query_params.getlist(name)
        if len(values) != 1 or not 0 < len(values[0]) <= MAX_CHALLENGE:
            raise Problem(400, f"?{name}", f"it must be set once, with 1 to {MAX_CHALLENGE} characters")
        return PlainTextResponse(values[0], headers={"cache-control": "no-store"})


def _single(request: Request, header: str, status: int) -> str:
    values = request.headers.getlist(header)
    if len(values) != 1:
        reason = "it is set twice" if values else "it is missing"
        raise Problem(status, f"the header {header}", reason, _SIGN_FIX)
    return values[0]
