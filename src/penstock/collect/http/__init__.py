"""Records by HTTP: each POST is acknowledged once its records are durable, with a receipt.

`POST path`: the body is a record, or has one record per line (`?lines`, `application/x-ndjson`). The response is 202
with a receipt. `?answer=10s` waits for the row that a query makes of the record; `?oneway` does not wait at all.
A record that does not fit the schema of its channel has no row: the response is then 422 with the reason.
`GET /receipts/ID`: where the records are now; with `?answer=10s` it waits for the row. `GET path`: counts.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

from penstock.collect.http.receipts import Answers, receipt_signer
from penstock.collect.http.requests import Requests, app
from penstock.collect.listen import allowed_origins, endpoint
from penstock.collect.numbers import HTTP_SUFFIX
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured
from penstock.core.record import LARGEST_JUMP
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.server import http_config, run_server

RECEIPTS = "/receipts"
_STOP_TIMEOUT = 2
"""Seconds at a stop in which clients can read their responses."""


@dataclass(frozen=True)
class HttpSource:
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

    url: str
    name: str
    named: bool = False
    answers: str | None = None
    origins: Sequence[str] | str = ()
    max_size: int = 900_000
    body: int = 8 << 20
    memory: int = 64 << 20
    records: int = 10_000
    waiters: int = 1_000
    connections: int = 1_000
    largest_jump: int = LARGEST_JUMP
    within: timedelta = timedelta(seconds=10)
    upload: timedelta = timedelta(seconds=30)
    wait: timedelta = timedelta(seconds=60)
    idle_timeout: timedelta = timedelta(seconds=10)
    folder: Path | str = ".penstock/receipts"
    clock: Clock = field(default_factory=SystemClock)
    shared: bool = False
    context: SourceContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        path = unquote(endpoint(self.url, self.name).path)
        if path == RECEIPTS or path.startswith(f"{RECEIPTS}/") or "{" in path or "}" in path:
            raise Misconfigured(
                f"source {self.name}", f'the path "{path}" is not allowed', "choose another, such as /in"
            )
        for option in ("max_size", "body", "memory", "records", "waiters", "connections"):
            at_least_one(self.name, option, getattr(self, option))
        object.__setattr__(self, "origins", allowed_origins(self.origins))

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.named and not self.shared else Guarantee.AT_LEAST_ONCE

    @property
    def numbered(self) -> str | None:
        return "by its senders" if self.named else None

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
            starlette = app(requests, unquote(at.path), self.origins)
            checked = OriginCheckMiddleware(starlette, OriginCheck(listener, at.host, origins=self.origins))
            config = http_config(checked, self.connections, self.idle_timeout.total_seconds(), _STOP_TIMEOUT)
            await stack.enter_async_context(run_server(config, listener))
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


def at_least_one(name: str, option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Misconfigured(f"source {name}, {option}", f"{value!r} is not a positive integer", "set it to 1 or more")
