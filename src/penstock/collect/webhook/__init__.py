"""Webhooks: a provider posts what happened, signed as Standard Webhooks are, and repeats it until it hears 202.

Headers `webhook-id`, `webhook-timestamp` (seconds), `webhook-signature` (`v1,BASE64`, several with spaces between
them): HMAC-SHA256 over `id.timestamp.body`. Each id is taken once.
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
from penstock.collect.webhook.deliveries import Delivery, Numbered
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured
from penstock.core.signatures import parse_secrets, verify
from penstock.web.bodies import BodyReader
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.responses import Problem, SecurityHeaders, handlers, reply
from penstock.web.server import http_config, run_server

LONGEST_ID = 256
LONGEST_CHALLENGE = 1_000
_FAREWELL = 2
"""Seconds that providers have at the end to hear what became of their messages."""
_WAY_OUT = "sign it as Standard Webhooks are, with the secret of this source"


@dataclass(frozen=True)
class WebhookSource:
    """Listens at `listen+webhook://host:port/path`.

    `secret`: `whsec_` and base64, or any text; several, while the provider changes it. `unsigned`: take messages of
    anybody. `window`: how far a signed time may be from ours. `remember`: how long an id is known; a provider that
    repeats later is heard twice. `folder`: where ids are kept, and bodies until they are safe. `challenge`: the query
    parameter that some providers want to have back when they are told this address.
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
    patience: timedelta = timedelta(seconds=10)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        path = unquote(endpoint(self.url, self.name).path)
        if "{" in path or "}" in path:
            raise Misconfigured(f"source {self.name}", f'"{path}" cannot be its path', "leave out the braces")
        known = self._keys()
        if not known and not self.unsigned:
            fix = "give the secret that the provider told: secret=…; or unsigned=True to take messages of anybody"
            raise Misconfigured(f"source {self.name}, secret", "there is none", fix)
        if known and self.unsigned:
            raise Misconfigured(f"source {self.name}, unsigned", "there is a secret, too", "leave out one of them")
        if self.remember < 2 * self.window:
            # Until then, a copy of a message still has a signature that is good.
            raise Misconfigured(f"source {self.name}, remember", "it is shorter than twice the window")

    def _keys(self) -> list[bytes]:
        return parse_secrets(f"source {self.name}, secret", self.secret)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        hours = self.remember.total_seconds() / 3600
        return f"the provider repeats what was not answered, and each id is taken once within {hours:g} hours"

    @property
    def sender(self) -> str:
        """In whose name the messages are numbered."""
        return f"{self.name}{WEBHOOK_SUFFIX}"

    def with_context(self, home: SourceContext) -> "WebhookSource":
        """The same source, which keeps its ids where its pipeline keeps everything."""
        return replace(self, folder=home.folder / "webhooks")

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(at.listen(self.name))
            highest = taken.highest.get(self.sender, (0, 0))
            numbered = Numbered(self.name, self.sender, Path(self.folder), self.remember, self.clock, highest)
            await stack.enter_async_context(numbered.opened())
            messages = _Messages(self, numbered, self._keys())
            # Providers come through proxies and tunnels, which pass on the name by which they were asked.
            checked = OriginCheckMiddleware(
                messages.app(unquote(at.path)), OriginCheck(listener, at.host, proxied=True)
            )
            config = http_config(checked, self.connections, self.patience.total_seconds(), _FAREWELL)
            await stack.enter_async_context(run_server(config, listener))
            intakes = await stack.enter_async_context(aclosing(numbered.queue.intakes()))
            try:
                yield intakes
            finally:
                # Who is told that its message is safe need not send it again.
                await numbered.stop()


class _Messages:
    """The requests of one opening."""

    def __init__(self, source: WebhookSource, numbered: Numbered, known: Sequence[bytes]) -> None:
        self._source, self._numbered, self._keys = source, numbered, known
        # No gzip: the signature is of the bytes as they were sent.
        self._bodies = BodyReader(f"the source {source.name}", source.max_size, source.memory, source.upload)

    def app(self, path: str) -> Starlette:
        made = Starlette(
            routes=[Route(path, self._answer, methods=["GET", "POST"])],
            middleware=[Middleware(SecurityHeaders)],
            exception_handlers=handlers("the source", "ask at the address of the source"),
        )
        made.router.redirect_slashes = False
        return made

    async def _answer(self, request: Request) -> Response:
        return await (self._take(request) if request.method == "POST" else self._challenged(request))

    async def _take(self, request: Request) -> Response:
        message = self._id(request)
        self._numbered.room()
        async with self._bodies.body(request, too_large("the body", self._source.max_size)) as body:
            if not self._source.unsigned:
                self._verify(request, message, body)
            delivery = Delivery(message, body, self._source.clock.now())
            safe = await self._numbered.take(delivery, self._source.within.total_seconds())
        if not safe:
            raise Problem(503, "the message", "it is not known to be safe yet", "send it again, with the same id")
        return reply({"id": message}, 202)

    def _id(self, request: Request) -> str:
        message = _once(request, "webhook-id", 400)
        if not 0 < len(message) <= LONGEST_ID or not (message.isascii() and message.isprintable()):
            why = f"an id has 1 to {LONGEST_ID} characters, none of them special"
            raise Problem(400, "the header webhook-id", why, "choose another id")
        return message

    def _verify(self, request: Request, message: str, body: bytes) -> None:
        seconds, signature = _once(request, "webhook-timestamp", 400), _once(request, "webhook-signature", 401)
        if not re.fullmatch(r"[0-9]{1,15}", seconds):
            raise Problem(400, "the header webhook-timestamp", "it is no number of seconds", "write those since 1970")
        if not verify(self._keys, signature, message, seconds, body):
            raise Problem(401, "the header webhook-signature", "it is not that of this message", _WAY_OUT)
        if abs(self._source.clock.now() - int(seconds) * 1_000_000) > self._source.window.total_seconds() * 1e6:
            window = f"{self._source.window.total_seconds():g} s"
            why = f"it is more than {window} from now"
            raise Problem(401, "the header webhook-timestamp", why, "sign it anew with the time, under the same id")

    async def _challenged(self, request: Request) -> Response:
        name = self._source.challenge
        if name is None:
            raise HTTPException(405, headers={"Allow": "POST"})
        told = request.query_params.getlist(name)
        if len(told) != 1 or not 0 < len(told[0]) <= LONGEST_CHALLENGE:
            raise Problem(400, f"?{name}", f"it has to be there once, with 1 to {LONGEST_CHALLENGE} characters")
        return PlainTextResponse(told[0], headers={"cache-control": "no-store"})


def _once(request: Request, header: str, status: int) -> str:
    given = request.headers.getlist(header)
    if len(given) != 1:
        why = "it is there twice" if given else "it is missing"
        raise Problem(status, f"the header {header}", why, _WAY_OUT)
    return given[0]
