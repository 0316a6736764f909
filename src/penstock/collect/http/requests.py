"""The requests of one opening of an HTTP source: what is taken, what is answered, where records are."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.collect.bodies import lines, too_large
from penstock.collect.gathering import Gathering
from penstock.collect.http.answers import Answer, Answers
from penstock.collect.http.options import PostOptions
from penstock.collect.http.receipts import Key, Receipt, Seals
from penstock.collect.http.whereabouts import Searching, Whereabouts
from penstock.collect.senders import Senders
from penstock.core.contracts import Arrival, ResumeState
from penstock.core.errors import Refused, Unavailable
from penstock.web.bodies import BodyReader
from penstock.web.query import LARGEST, Query
from penstock.web.responses import Problem, SecurityHeaders, error_response, handlers, reply

if TYPE_CHECKING:
    from penstock.collect.http import HttpSource

log = logging.getLogger(__name__)

_FAILED = 10_000
"""So many of the last that were not taken are remembered."""


class Requests:
    """Numbers what comes, hands it over, and knows what is safe."""

    def __init__(self, source: "HttpSource", seals: Seals, taken: ResumeState, answers: Answers | None) -> None:
        self.gathering = Gathering(source.name)
        self.answers = answers
        self._source, self._seals, self._before = source, seals, taken.numbers
        # An opening has an epoch of its own: what an earlier one has numbered and lost leaves no gap in this one.
        self._opening = max(source.clock.now(), self._before.get(source.sender, (0, 0))[0] + 1)
        self._last = 0
        self._senders = Senders(taken, 0 if source.shared else source.largest_jump)
        self._bodies = BodyReader(f"the source {source.name}", source.body, source.memory, source.upload, gzip=True)
        self._searching = Searching(source.home) if source.home else None
        self._pending: dict[Key, asyncio.Future[None]] = {}
        self._failed: dict[Key, None] = {}
        self._closing = asyncio.get_running_loop().create_future()
        self._taken = self._dropped = self._refused = 0

    # --- taking -------------------------------------------------------------------------------------------------------

    async def post(self, request: Request) -> Response:
        try:
            return await self._post(request)
        except Problem as problem:
            if problem.status < 500:
                self._refused += 1
                # Whoever sends nonsense must not fill the log, too: the first, the tenth, the hundredth.
                if str(self._refused).strip("0") == "1":
                    log.warning("source %s refuses a body, %d so far: %s", self._source.name, self._refused, problem)
            raise

    async def _post(self, request: Request) -> Response:
        source = self._source
        options = PostOptions.of(request, source.name, source.sender, source.wait)
        if options.identity is None and source.named:
            raise Problem(400, "?sender", "it is not said who sends", "give ?sender=NAME&epoch=N&seq=N")
        if options.answer is not None and self.answers is None:
            raise self._no_answers()
        self._room(options)
        record = None if options.lines else too_large("the body", source.max_size, lines=True)
        async with self._bodies.body(request, record) as body:
            payloads = self._payloads(body, options)
            # From here to `put` nothing is awaited: numbers have no gaps, and lie in their order.
            self._room(options)
            receipt = self._numbered(len(payloads), options)
            with ExitStack() as stack:
                answer = None
                if self.answers is not None:
                    self.answers.expect(receipt.sender)
                    if options.answer is not None:
                        answer = stack.enter_context(self.answers.awaited(receipt.key))
                if options.identity is None:
                    self._last += receipt.count
                arrivals = [Arrival(*one) for one in zip(payloads, receipt.origins(), strict=True)]
                safe = await self.gathering.put(arrivals)
                stack = stack.pop_all()
        with stack:
            self._pending[receipt.key] = safe
            safe.add_done_callback(partial(self._settled, receipt, options.oneway))
            del body, payloads, arrivals
            return await self._answered(receipt, options, safe, answer)

    async def _answered(
        self,
        receipt: Receipt,
        options: PostOptions,
        safe: "asyncio.Future[None]",
        answer: "asyncio.Future[Answer] | None",
    ) -> Response:
        begun = self._source.clock.elapsed()
        text = self._seals.sealed(receipt)
        if not options.oneway:
            await asyncio.wait([safe], timeout=self._source.within.total_seconds())
            if not safe.done():
                why = "it is not known to be safe yet, and may be there all the same"
                facts = {"receipt": text}
                raise Problem(503, "the record", why, "ask for the receipt, or send it again", facts)
            safe.result()
        if answer is not None and options.answer is not None:
            left = options.answer - (self._source.clock.elapsed() - begun)
            await self._until(answer, left)
            if answer.done():
                return _told(answer.result(), text)
        return reply({"receipt": text, "receipts": receipt.count}, 202, _location(text))

    def _room(self, options: PostOptions) -> None:
        if not self.gathering.full:
            return
        if options.oneway:
            self._dropped += 1
        raise Unavailable(f"the source {self._source.name}", "it has no room; nothing was taken", 1.0)

    def _payloads(self, body: bytes, options: PostOptions) -> Sequence[bytes]:
        if not options.lines:
            return [body]
        found = lines(body, self._source.max_size, self._source.records)
        if options.answer is not None and len(found) > 1:
            raise Problem(400, "?answer", "several records have several answers", "send one at a time")
        return found

    def _numbered(self, count: int, options: PostOptions) -> Receipt:
        now = self._source.clock.now()
        if (identity := options.identity) is None:
            return Receipt(self._source.sender, self._opening, self._last + 1, count, now, self._opening)
        if identity.seq + count - 1 > LARGEST:
            raise Problem(400, "?seq", "the numbers of these records lie beyond 64 bits", "begin another epoch")
        try:
            self._senders.admit(identity.sender, identity.epoch, identity.seq, identity.seq + count - 1)
        except Refused as refused:
            raise Problem(400, "?seq", refused.reason) from refused
        return Receipt(identity.sender, identity.epoch, identity.seq, count, now, self._opening)

    def _settled(self, receipt: Receipt, oneway: bool, safe: "asyncio.Future[None]") -> None:
        if self._pending.get(receipt.key) is safe:
            del self._pending[receipt.key]
        if not safe.cancelled() and safe.exception() is None:
            self._taken += receipt.count
            self._failed.pop(receipt.key, None)
            return
        self._dropped += oneway
        self._failed[receipt.key] = None
        if len(self._failed) > _FAILED:
            del self._failed[next(iter(self._failed))]

    # --- telling ------------------------------------------------------------------------------------------------------

    async def figures(self, request: Request) -> Response:
        Query(request)
        return reply(
            {
                "source": self._source.name,
                "records": self._taken,
                "on_their_way": len(self._pending),
                "dropped": self._dropped,
                "refused": self._refused,
                "waiting": self.answers.waiting if self.answers else 0,
            }
        )

    async def receipt(self, request: Request) -> Response:
        query = Query(request, ("answer",))
        text = request.path_params["id"]
        receipt = self._seals.opened(text)
        if receipt is None:
            raise Problem(404, "the receipt", "nobody here has given it", "send a record: the answer holds a receipt")
        wait = query.seconds("answer", self._source.wait)
        if wait is None:
            return reply(await self._state(text, receipt))
        if self.answers is None:
            raise self._no_answers()
        if receipt.count > 1:
            raise Problem(400, "?answer", "several records have several answers", "send one at a time")
        with self.answers.awaited(receipt.key) as answer:
            await self._until(answer, wait)
            if answer.done():
                return _told(answer.result(), text)
        return reply(await self._state(text, receipt), 202, _location(text))

    async def _state(self, text: str, receipt: Receipt) -> dict[str, object]:
        document: dict[str, object] = {
            "receipt": text,
            "state": "",
            "sender": receipt.sender,
            "epoch": receipt.epoch,
            "seq": receipt.first,
            "records": receipt.count,
            "time": receipt.time,
        }
        known = self._known(receipt)
        found = Whereabouts()
        if self._searching is not None and self._source.home is not None and known != "on its way":
            try:
                found = await self._searching.find(receipt)
                document |= found.document(self._source.home)
            except Unavailable as error:
                if known is None:
                    raise
                document["trouble"] = str(error)
        if found.dead:
            known = "refused"
        elif known is None:
            known = "safe" if len(found.into) == receipt.count else "unknown"
        document["state"] = known
        return document

    def _known(self, receipt: Receipt) -> str | None:
        """What is known without a search."""
        if receipt.opening == self._opening:
            if receipt.key in self._pending:
                return "on its way"
            return None if receipt.key in self._failed else "safe"
        epoch, until = self._before.get(receipt.sender, (0, 0))
        return "safe" if epoch == receipt.epoch and receipt.first + receipt.count - 1 <= until else None

    async def _until(self, answer: "asyncio.Future[Answer]", left: float) -> None:
        await asyncio.wait([answer, self._closing], timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)

    def _no_answers(self) -> Problem:
        return Problem(400, "?answer", "this source has no answers", 'set answers="CHANNEL", the results of a query')

    async def close(self) -> None:
        """Those who wait hear what there is."""
        await self.gathering.close()
        self._closing.cancel()
        if self._searching is not None:
            self._searching.stop()


def app(requests: Requests, path: str, origins: Sequence[str] = ()) -> Starlette:
    middleware = [Middleware(SecurityHeaders)]
    if origins:
        exposed = ["location", "retry-after"]
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"], expose_headers=exposed)
        )
    made = Starlette(
        routes=[
            Route(path, requests.post, methods=["POST"]),
            Route(path, requests.figures),
            Route("/receipts/{id}", requests.receipt),
        ],
        middleware=middleware,
        exception_handlers=handlers("the source", "ask at the address of the source"),
    )
    made.router.redirect_slashes = False
    return made


def _told(answer: Answer, text: str) -> Response:
    """The row; or why there is none, which is the sender's to mend."""
    value = answer.row
    if answer.refused is not None:
        facts = {"place": "the record", "fix": "correct it, and send it as another record", "receipt": text}
        return error_response(422, answer.refused, facts, _location(text))
    try:
        orjson.loads(value)
        kind = "application/json"
    except orjson.JSONDecodeError:
        kind = "application/octet-stream"
    return Response(value, 200, {"cache-control": "no-store", **_location(text)}, kind)


def _location(text: str) -> dict[str, str]:
    return {"location": f"/receipts/{text}"}
