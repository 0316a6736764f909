"""Records by HTTP: each POST is acknowledged once its records are durable, with a receipt.

`POST path`: the body is a record, or has one record per line (`?lines`, `application/x-ndjson`). The response is 202
with a receipt. `?answer=10s` waits for the row that a query makes of the record; `?oneway` does not wait at all.
A record that does not fit the schema of its channel has no row: the response is then 422 with the reason.
`GET /receipts/ID`: where the records are now; with `?answer=10s` it waits for the row. `GET path`: counts.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.collect.listen import (
    AcknowledgingSource,
    IngestQueue,
    SenderStates,
    allowed_origins,
    endpoint,
    http_server,
    invalid_sender,
    split_lines,
    too_large,
)
from penstock.collect.numbers import HTTP_SUFFIX
from penstock.collect.receipts import Answer, Answers, Key, Location, Locator, Receipt, ReceiptSigner, receipt_signer
from penstock.collect.registry import check_positive
from penstock.core.contracts import Arrival, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import MAX_NUMBER
from penstock.web.requests import BodyReader, OriginCheck, Query, integer
from penstock.web.responses import Problem, error_response, reply
from penstock.web.server import run_server

log = logging.getLogger(__name__)

RECEIPTS = "/receipts"
_IDENTITY = ("sender", "epoch", "seq")
_KEY_HEADER = "the header idempotency-key"
_FAILED = 10_000
"""How many of the last failed requests are remembered."""


@dataclass(frozen=True)
class HttpSource(AcknowledgingSource):
    """Listens at `listen+http://host:port/path`.

    `named`: senders must identify themselves (`sender`, `epoch`, `seq`); then repeated records are dropped.
    `answers`: the result channel of a stateless query, whose rows are the answers to the records; those of the last
    `wait` are known at the start.
    `origins`: sites whose pages may send here. `folder`: where the key of the receipts is kept.
    `max_size`, `body`, `memory`: bytes of a record, of a body, of all bodies at a time; `records`: in a body.
    `largest_jump`: a sender is refused if its numbers continue further than this after its last one; 0: never.
    `shared`: other processes can listen at the same address; then no jump is refused.
    `within`: time for a record to become durable; `upload`: for a body to arrive; `wait`: for an answer.
    `idle_timeout`: a connection without a request is closed after it.
    """

    named: bool = False
    connections: int = 1_000
    answers: str | None = None
    origins: Sequence[str] | str = ()
    body: int = 8 << 20
    memory: int = 64 << 20
    records: int = 10_000
    waiters: int = 1_000
    within: timedelta = timedelta(seconds=10)
    upload: timedelta = timedelta(seconds=30)
    wait: timedelta = timedelta(seconds=60)
    idle_timeout: timedelta = timedelta(seconds=10)
    folder: Path | str = ".penstock/receipts"
    context: SourceContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        path = unquote(endpoint(self.url, self.name).path)
        if path == RECEIPTS or path.startswith(f"{RECEIPTS}/") or "{" in path or "}" in path:
            raise Misconfigured(
                f"source {self.name}", f'the path "{path}" is not allowed', "choose another, such as /in"
            )
        check_positive(self, "max_size", "body", "memory", "records", "waiters", "connections")
        object.__setattr__(self, "origins", allowed_origins(self.origins))

    @property
    def description(self) -> str:
        if self.named and self.shared:
            return (
                "senders repeat a request without a response; another process at this port accepts it again, with the "
                "same number; a request with ?oneway can be lost"
            )
        if self.named:
            return "senders repeat a request without a response, with the same number; one with ?oneway can be lost"
        return (
            "senders repeat a request without a response; it is then stored twice, unless the sender numbers it; "
            "a request with ?oneway can be lost"
        )

    @property
    def sender(self) -> str:
        """The sender name of records that come without a number."""
        return f"{self.name}{HTTP_SUFFIX}"

    def with_context(self, context: SourceContext) -> "HttpSource":
        """The same source with the channels of its pipeline, for answers and receipts."""
        return replace(self, context=context, folder=context.folder / "receipts")

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        async with AsyncExitStack() as stack:
            signer = await asyncio.to_thread(receipt_signer, Path(self.folder), self._family)
            requests = Requests(self, signer, resume, self._answers())
            listener = stack.enter_context(at.listen(self.name, self.shared))
            if requests.answers is not None:
                await stack.enter_async_context(requests.answers.running())
            routes = [
                Route(unquote(at.path), requests.post, methods=["POST"]),
                Route(unquote(at.path), requests.figures),
                Route(f"{RECEIPTS}/{{id}}", requests.receipt),
            ]
            check = OriginCheck(listener, at.host, origins=self.origins)
            server = http_server(routes, check, self.connections, self.idle_timeout, self.origins)
            await stack.enter_async_context(run_server(server, listener))
            intakes = await stack.enter_async_context(aclosing(requests.queue.intakes()))
            try:
                yield intakes
            finally:
                # Acknowledge what is durable, so that senders need not repeat it.
                await requests.close()

    def _answers(self) -> Answers | None:
        if self.answers is None:
            return None
        if self.context is None:
            fix = "use the source in a pipeline, or call source.with_context(…)"
            raise Misconfigured(f"source {self.name}, answers", "the source has no channels", fix)
        return Answers(self.context, self.answers, self._is_own, self.waiters, self.wait, self.clock)

    @property
    def _family(self) -> str:
        """The name that all processes at this port share. Workers other than the first have a suffix: `.1`.

        Any of them can be asked for a receipt or an answer.
        """
        return self.name.partition(".")[0]

    def _is_own(self, sender: str) -> bool:
        return sender == self.sender or (sender.endswith(HTTP_SUFFIX) and sender.partition(".")[0] == self._family)


@dataclass(frozen=True)
class PostOptions:
    """The query parameters and headers of a POST.

    `answer`: seconds to wait for the row of the record. `identity`: of the first record, if the sender numbers them.
    """

    lines: bool = False
    oneway: bool = False
    answer: float | None = None
    identity: Key | None = None

    @classmethod
    def of(cls, request: Request, source: str, own: str, longest: timedelta) -> "PostOptions":
        query = Query(request, ("lines", "oneway", "answer", *_IDENTITY))
        lines, oneway = query.flag("lines"), query.flag("oneway")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        answer = query.seconds("answer", longest)
        if answer is not None and oneway:
            raise Problem(400, "?answer", "a request with ?oneway gets no answer", "remove ?oneway")
        lines = lines or kind in ("application/x-ndjson", "application/jsonl")
        return cls(lines, oneway, answer, _identity(request, query, source, own))


def _identity(request: Request, query: Query, source: str, own: str) -> Key | None:
    key = request.headers.getlist("idempotency-key")
    identity = {name: text for name in _IDENTITY if (text := query.text(name)) is not None}
    if key:
        # Keys without an order would have to be kept without a limit. Numbers are kept as runs.
        found = re.fullmatch(r'"?(.+)/([0-9]+)/([0-9]+)"?', key[0]) if len(key) == 1 else None
        if found is None:
            fix = "write SENDER/EPOCH/SEQ: a name, a number that grows with each restart, the number of the record"
            raise Problem(400, _KEY_HEADER, "it is not SENDER/EPOCH/SEQ", fix)
        named = dict(zip(_IDENTITY, found.groups(), strict=True))
        if identity and identity != named:
            raise Problem(400, _KEY_HEADER, "the address has another identity", "use one of them")
        identity = named
    if not identity:
        return None
    location = _KEY_HEADER if key else "?sender, ?epoch, ?seq"
    if missing := [name for name in _IDENTITY if name not in identity]:
        raise Problem(400, location, f"missing: {' and '.join(missing)}", "set all three, or none")
    reason = invalid_sender(identity["sender"], source) or invalid_sender(identity["sender"], own)
    if reason is not None:
        raise Problem(400, location, reason, "choose another name")
    epoch, seq = (integer(_KEY_HEADER if key else f"?{name}", identity[name]) for name in ("epoch", "seq"))
    return identity["sender"], epoch, seq


class Requests:
    """The requests of one opening: numbers records, puts them into the queue, and knows which are durable."""

    def __init__(self, source: HttpSource, signer: ReceiptSigner, resume: ResumeState, answers: Answers | None) -> None:
        self.queue = IngestQueue(source.name)
        self.answers = answers
        self._source, self._signer, self._before = source, signer, resume.numbers
        # Each opening has its own epoch: numbers that an earlier one lost leave no gap in this one.
        self._opening = max(source.clock.now(), self._before.get(source.sender, (0, 0))[0] + 1)
        self._last = 0
        self._senders = SenderStates(resume, 0 if source.shared else source.largest_jump)
        self._bodies = BodyReader(f"the source {source.name}", source.body, source.memory, source.upload, gzip=True)
        self._locator = Locator(source.context) if source.context else None
        self._pending: dict[Key, asyncio.Future[None]] = {}
        self._failed: dict[Key, None] = {}
        self._closing = asyncio.get_running_loop().create_future()
        self._accepted = self._dropped = self._refused = 0

    # --- POST ---------------------------------------------------------------------------------------------------------

    async def post(self, request: Request) -> Response:
        try:
            return await self._post(request)
        except Problem as problem:
            if problem.status < 500:
                self._refused += 1
                # Log the 1st, the 10th, the 100th: invalid requests must not fill the log.
                if str(self._refused).strip("0") == "1":
                    log.warning(
                        "source %s: a body was refused, %d so far: %s", self._source.name, self._refused, problem
                    )
            raise

    async def _post(self, request: Request) -> Response:
        source = self._source
        options = PostOptions.of(request, source.name, source.sender, source.wait)
        if options.identity is None and source.named:
            raise Problem(400, "?sender", "it is missing", "add ?sender=NAME&epoch=N&seq=N")
        if options.answer is not None and self.answers is None:
            raise self._no_answers()
        self._check_space(options)
        limit = None if options.lines else too_large("the body", source.max_size, lines=True)
        async with self._bodies.body(request, limit) as body:
            payloads = self._payloads(body, options)
            # No await between here and `put`: numbers have no gaps, and are in order.
            self._check_space(options)
            receipt = self._number(len(payloads), options)
            with ExitStack() as stack:
                answer = None
                if self.answers is not None:
                    self.answers.expect(receipt.sender)
                    if options.answer is not None:
                        answer = stack.enter_context(self.answers.awaited(receipt.key))
                if options.identity is None:
                    self._last += receipt.count
                arrivals = [Arrival(*one) for one in zip(payloads, receipt.origins(), strict=True)]
                durable = await self.queue.put(arrivals)
                stack = stack.pop_all()
        with stack:
            self._pending[receipt.key] = durable
            durable.add_done_callback(partial(self._settled, receipt, options.oneway))
            del body, payloads, arrivals
            return await self._respond(receipt, options, durable, answer)

    async def _respond(
        self,
        receipt: Receipt,
        options: PostOptions,
        durable: "asyncio.Future[None]",
        answer: "asyncio.Future[Answer] | None",
    ) -> Response:
        started = self._source.clock.elapsed()
        text = self._signer.encode(receipt)
        if not options.oneway:
            await asyncio.wait([durable], timeout=self._source.within.total_seconds())
            if not durable.done():
                reason = "the record is not durable yet, but may become so"
                raise Problem(503, "the record", reason, "read the receipt, or send it again", {"receipt": text})
            durable.result()
        if answer is not None and options.answer is not None:
            remaining = options.answer - (self._source.clock.elapsed() - started)
            await self._wait_for(answer, remaining)
            if answer.done():
                return _response(answer.result(), text)
        return reply({"receipt": text, "receipts": receipt.count}, 202, _location(text))

    def _check_space(self, options: PostOptions) -> None:
        if not self.queue.full:
            return
        if options.oneway:
            self._dropped += 1
        raise Unavailable(f"source {self._source.name}", "its queue is full; nothing was accepted", 1.0)

    def _payloads(self, body: bytes, options: PostOptions) -> Sequence[bytes]:
        if not options.lines:
            return [body]
        found = split_lines(body, self._source.max_size, self._source.records)
        if options.answer is not None and len(found) > 1:
            raise _several_answers()
        return found

    def _number(self, count: int, options: PostOptions) -> Receipt:
        now = self._source.clock.now()
        if options.identity is None:
            return Receipt(self._source.sender, self._opening, self._last + 1, count, now, self._opening)
        sender, epoch, first = options.identity
        last = first + count - 1
        if last > MAX_NUMBER:
            raise Problem(400, "?seq", "the numbers of these records are beyond 64 bits", "start another epoch")
        try:
            self._senders.admit(sender, epoch, first, last)
        except Refused as refused:
            raise Problem(400, "?seq", refused.reason) from refused
        return Receipt(sender, epoch, first, count, now, self._opening)

    def _settled(self, receipt: Receipt, oneway: bool, durable: "asyncio.Future[None]") -> None:
        if self._pending.get(receipt.key) is durable:
            del self._pending[receipt.key]
        if not durable.cancelled() and durable.exception() is None:
            self._accepted += receipt.count
            self._failed.pop(receipt.key, None)
            return
        self._dropped += oneway
        self._failed[receipt.key] = None
        if len(self._failed) > _FAILED:
            del self._failed[next(iter(self._failed))]

    # --- GET ----------------------------------------------------------------------------------------------------------

    async def figures(self, request: Request) -> Response:
        Query(request)
        return reply(
            {
                "source": self._source.name,
                "records": self._accepted,
                "in_flight": len(self._pending),
                "dropped": self._dropped,
                "refused": self._refused,
                "waiting": self.answers.waiting if self.answers else 0,
            }
        )

    async def receipt(self, request: Request) -> Response:
        query = Query(request, ("answer",))
        text = request.path_params["id"]
        receipt = self._signer.decode(text)
        if receipt is None:
            raise Problem(404, "the receipt", "it is unknown", "use the receipt from the response to a POST")
        wait = query.seconds("answer", self._source.wait)
        if wait is None:
            return reply(await self._state(text, receipt))
        if self.answers is None:
            raise self._no_answers()
        if receipt.count > 1:
            raise _several_answers()
        with self.answers.awaited(receipt.key) as answer:
            await self._wait_for(answer, wait)
            if answer.done():
                return _response(answer.result(), text)
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
        state = self._state_without_search(receipt)
        location = Location()
        if self._locator is not None and self._source.context is not None and state != "in flight":
            try:
                location = await self._locator.find(receipt)
                document |= location.document(self._source.context)
            except Unavailable as error:
                if state is None:
                    raise
                document["trouble"] = str(error)
        if location.dead:
            state = "refused"
        elif state is None:
            state = "safe" if len(location.into) == receipt.count else "unknown"
        document["state"] = state
        return document

    def _state_without_search(self, receipt: Receipt) -> str | None:
        if receipt.opening == self._opening:
            if receipt.key in self._pending:
                return "in flight"
            return None if receipt.key in self._failed else "safe"
        epoch, until = self._before.get(receipt.sender, (0, 0))
        return "safe" if epoch == receipt.epoch and receipt.first + receipt.count - 1 <= until else None

    async def _wait_for(self, answer: "asyncio.Future[Answer]", seconds: float) -> None:
        await asyncio.wait([answer, self._closing], timeout=max(0, seconds), return_when=asyncio.FIRST_COMPLETED)

    def _no_answers(self) -> Problem:
        return Problem(400, "?answer", "this source has no answers", 'set answers="CHANNEL", the results of a query')

    async def close(self) -> None:
        """Accept nothing more, and answer the requests that wait."""
        await self.queue.close()
        self._closing.cancel()
        if self._locator is not None:
            self._locator.stop()


def _several_answers() -> Problem:
    return Problem(400, "?answer", "several records have several answers", "send one record per request")


def _response(answer: Answer, text: str) -> Response:
    """The row, or 422 with the reason why there is none."""
    if answer.refused is not None:
        fields = {"place": "the record", "fix": "correct it, and send it as another record", "receipt": text}
        return error_response(422, answer.refused, fields, _location(text))
    try:
        orjson.loads(answer.row)
        content_type = "application/json"
    except orjson.JSONDecodeError:
        content_type = "application/octet-stream"
    return Response(answer.row, 200, {"cache-control": "no-store", **_location(text)}, content_type)


def _location(text: str) -> dict[str, str]:
    return {"location": f"{RECEIPTS}/{text}"}
