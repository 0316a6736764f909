"""Records by HTTP: each POST is acknowledged once it is safe, and has a receipt that tells where its records are.

`POST path`: the body is a record, or holds one on each line (`?lines`, `application/x-ndjson`). The answer is 202 with
a receipt. `?answer=10s` waits for the row that a query makes of the record; `?oneway` waits for nothing.
A record that does not fit its channel has no row: whoever waits for it gets 422, with the reason.
`GET /receipts/ID`: where the records are now; with `?answer=10s` it waits for the row. `GET path`: figures.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

from penstock.collect.door import door, origins_of
from penstock.collect.http.answers import Answers
from penstock.collect.http.receipts import seals
from penstock.collect.http.requests import Requests, app
from penstock.collect.numbering import OF_HTTP
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured
from penstock.core.record import LARGEST_JUMP
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.server import http_config, run_server

RECEIPTS = "/receipts"
_FAREWELL = 2
"""Seconds that clients have at the end to take their answers."""


@dataclass(frozen=True)
class HttpSource:
    """Listens at `listen+http://host:port/path`.

    `named`: whether senders have to say who they are (`sender`, `epoch`, `seq`); then what they give again is dropped.
    `answers`: the result channel of a query without state, whose rows are the answers to the records; those of the
    last `wait` are known at the start.
    `origins`: sites whose pages may send here. `folder`: where the key lies that seals the receipts.
    `max_size`, `body`, `memory`: bytes of a record, of a body, of all bodies at a time; `records`: in a body.
    `largest_jump`: a sender that goes on further than this behind its last number is refused; 0: it is not.
    `shared`: whether other processes may listen at the same address; then no jump is refused.
    `within`: how long a record may take to be safe; `upload`: a body to arrive; `wait`: an answer to come.
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
    patience: timedelta = timedelta(seconds=10)
    folder: Path | str = ".penstock/receipts"
    clock: Clock = field(default_factory=SystemClock)
    shared: bool = False
    home: SourceContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        path = unquote(door(self.url, self.name).path)
        if path == RECEIPTS or path.startswith(f"{RECEIPTS}/") or "{" in path or "}" in path:
            raise Misconfigured(f"source {self.name}", f'"{path}" cannot be its path', "choose another, such as /in")
        for option in ("max_size", "body", "memory", "records", "waiters", "connections"):
            at_least_one(self.name, option, getattr(self, option))
        object.__setattr__(self, "origins", origins_of(self.origins))

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
                "a sender repeats what was not answered; at another process behind this port it is taken again, "
                "with the same number; what is sent one way may be lost"
            )
        if self.named:
            return "a sender repeats what was not answered, under the same number; what it sends one way may be lost"
        return (
            "a sender repeats what was not answered; it comes twice unless the sender numbers it, "
            "and what is sent one way may be lost"
        )

    @property
    def sender(self) -> str:
        """In whose name the records are numbered that come without a number."""
        return f"{self.name}{OF_HTTP}"

    def with_context(self, home: SourceContext) -> "HttpSource":
        """The same source, which knows the channels of its pipeline: for answers, and for receipts that tell more."""
        return replace(self, home=home, folder=home.folder / "receipts")

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = door(self.url, self.name)
        async with AsyncExitStack() as stack:
            sealing = await asyncio.to_thread(seals, Path(self.folder), self._family)
            requests = Requests(self, sealing, taken, self._answers())
            listener = stack.enter_context(at.opened(self.name, self.shared))
            if requests.answers is not None:
                await stack.enter_async_context(requests.answers.running())
            made = app(requests, unquote(at.path), self.origins)
            checked = OriginCheckMiddleware(made, OriginCheck(listener, at.host, origins=self.origins))
            config = http_config(checked, self.connections, self.patience.total_seconds(), _FAREWELL)
            await stack.enter_async_context(run_server(config, listener))
            intakes = await stack.enter_async_context(aclosing(requests.gathering.intakes()))
            try:
                yield intakes
            finally:
                # Who is told that its records are safe need not send them again.
                await requests.close()

    def _answers(self) -> Answers | None:
        if self.answers is None:
            return None
        if self.home is None:
            fix = "let the source be part of a pipeline, or tell it: source.at_home(…)"
            raise Misconfigured(f"source {self.name}, answers", "it knows no channels", fix)
        return Answers(self.home, self.answers, self._is_own, self.waiters, self.wait, self.clock)

    @property
    def _family(self) -> str:
        """What all processes behind this port have in common: others than the first have a dot in their names.

        A receipt, and an answer, may be asked for at another than the one that took the record.
        """
        return self.name.partition(".")[0]

    def _is_own(self, sender: str) -> bool:
        return sender == self.sender or (sender.endswith(OF_HTTP) and sender.partition(".")[0] == self._family)


def at_least_one(name: str, option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Misconfigured(f"source {name}, {option}", f"{value!r} is no number that is good here", "write 1 or more")
