"""Trades of the exchange Coinbase, which numbers them: `app.source(Coinbase(["BTC-USD"]), into="trades")`.

They come over its WebSocket; those that were missed are requested from its REST history.
"""

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import httpx
import orjson

from penstock.collect.websocket import WebSocketSource
from penstock.core.clock import Micros
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin, OutageInterval

ADDRESS = "wss://ws-feed.exchange.coinbase.com"
HISTORY = "https://api.exchange.coinbase.com"
PAGE = 1_000
"""Trades in an answer of the history, at most."""
LARGEST_PAGE = 4 << 20
LARGEST = 1 << 63
TIMEOUT = 10.0
LONGEST_PAUSE = 300.0
AGENT = {"User-Agent": "penstock"}


@dataclass(frozen=True)
class Trade:
    number: int
    value: bytes
    time: Micros


Page = Callable[[str, int, int], Awaitable[Sequence[Trade]]]
"""The trades of a product from one number to before another, in order."""


@dataclass
class Product:
    """How far a product is. `began` is the first trade of this life of it; in it, that one has the number 1."""

    name: str
    began: int | None = None
    last: int = 0
    time: Micros | None = None
    """Of the last trade, if this connection has seen it."""

    @property
    def sender(self) -> str:
        return f"coinbase:{self.name}"

    def take(self, trade: Trade) -> Arrival:
        if self.began is None or trade.number != self.last + 1:
            self.began = trade.number
        self.last, self.time = trade.number, trade.time
        return Arrival(trade.value, Origin(self.sender, self.began, trade.number - self.began + 1, trade.time))


@dataclass(frozen=True)
class Coinbase:
    """Trades product by product; over the WebSocket none is given again.

    What lies between the last trade that is safe and the first that is heard is asked of the history, which tells less
    of each: nothing of its orders. A record keeps the exchange's count: its sender is the product, its epoch the first
    trade that was heard of it, its number counts from there. Where more is missing than `fill`, or than the history
    has, the time is reported as unknown, and another epoch begins.
    """

    products: Sequence[str]
    name: str = "coinbase"
    address: str = ADDRESS
    history: str = HISTORY
    fill: int = 100_000
    guarantee = Guarantee.EXACTLY_ONCE

    def __post_init__(self) -> None:
        source = f"source {self.name}"
        if not 1 <= len(self.products) <= 100 or len(set(self.products)) < len(self.products):
            raise Misconfigured(f"{source}, products", "they are not 1 to 100, each once", 'say products = ["BTC-USD"]')
        for product in self.products:
            if len(product) > 40 or not re.fullmatch(r"[A-Z0-9]+(-[A-Z0-9]+)+", product):
                raise Misconfigured(f"{source}, products", f"{product!r} is none", 'write it like "BTC-USD"')
        if self.fill < 0:
            raise Misconfigured(f"{source}, fill", "it is negative", "say how many trades may be asked for; 0: none")
        if not re.match(r"wss?://\w", self.address):
            raise Misconfigured(f"{source}, address", "it is not a WebSocket", "write wss://host/path")
        if not re.match(r"https?://\w", self.history):
            raise Misconfigured(f"{source}, history", "it is not an HTTP address", "write https://host/path")

    @property
    def description(self) -> str:
        return (
            f"trades that were missed are asked of the exchange's history, {self.fill:,} of a product at most; "
            "beyond that the time is reported as unknown"
        )

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        products = {name: Product(name) for name in self.products}
        for product in products.values():
            if (safe := resume.numbers.get(product.sender)) is not None:
                product.began, product.last = safe[0], safe[0] + safe[1] - 1
        subscribe = {"type": "subscribe", "product_ids": list(self.products), "channels": ["matches"]}
        notice = orjson.dumps(subscribe).decode()
        feed = WebSocketSource(self.address, self.name, numbered=None, first=notice, headers=AGENT)
        async with (
            httpx.AsyncClient(headers=AGENT, timeout=TIMEOUT, trust_env=False) as client,
            feed.open(ResumeState()) as intakes,
            aclosing(self._whole(intakes, products, partial(self._page, client))) as whole,
        ):
            yield whole

    async def _whole(
        self, intakes: AsyncIterator[Intake], products: Mapping[str, Product], page: Page
    ) -> AsyncGenerator[Intake, None]:
        """What is heard, and before it what was missed."""
        async for intake in intakes:
            arrivals: list[Arrival | OutageInterval] = []
            for arrival in intake.arrivals:
                if not isinstance(arrival, Arrival) or (notice := read(arrival.value, products)) is None:
                    continue
                if isinstance(notice, str):
                    arrivals.append(Arrival(arrival.value, refused=notice))
                    continue
                product, trade = notice
                if product.began is not None and trade.number > product.last + 1:
                    if arrivals:
                        yield Intake(arrivals, _settled)
                        arrivals = []
                    async with aclosing(self._missed(product, trade, page)) as missed:
                        async for some in missed:
                            yield Intake(some, _settled)
                if trade.number > product.last:
                    arrivals.append(product.take(trade))
            if arrivals:
                yield Intake(arrivals, _settled)

    async def _missed(
        self, product: Product, until: Trade, page: Page
    ) -> AsyncGenerator[Sequence[Arrival | OutageInterval], None]:
        """The trades between the last one and this one, a page at a time: so no more than that is held."""
        for start in range(max(product.last + 1, until.number - self.fill), until.number, PAGE):
            some: list[Arrival | OutageInterval] = []
            for trade in await page(product.name, start, min(start + PAGE, until.number)):
                some += await self._unknown(product, trade, page)
                some.append(product.take(trade))
            if some:
                yield some
        if unknown := await self._unknown(product, until, page):
            yield unknown

    async def _unknown(self, product: Product, trade: Trade, page: Page) -> Sequence[OutageInterval]:
        """What to say where there is a gap before this trade."""
        if trade.number == product.last + 1:
            return ()
        if product.time is None:
            before = await page(product.name, product.last, product.last + 1)
            product.time = before[0].time if before else trade.time
        return (OutageInterval(self.name, min(product.time, trade.time), trade.time),)

    async def _page(self, client: httpx.AsyncClient, product: str, start: int, end: int) -> Sequence[Trade]:
        url = f"{self.history.rstrip('/')}/products/{product}/trades"
        # "After" means behind in the list, which begins with the newest.
        wanted = {"after": end, "limit": end - start}
        body = bytearray()
        try:
            async with client.stream("GET", url, params=wanted) as answer:
                if answer.status_code != 200:
                    pause = answer.headers.get("retry-after", "")
                    later = min(float(pause), LONGEST_PAUSE) if pause.isdecimal() else None
                    raise Unavailable(self.history, f"it answers {answer.status_code}", later)
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > LARGEST_PAGE:
                        raise Unavailable(self.history, "its answer is too large")
        except httpx.HTTPError as error:
            raise Unavailable(self.history, str(error) or type(error).__name__) from error
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Unavailable(self.history, "its answer is not JSON") from error
        if not isinstance(document, list):
            raise Unavailable(self.history, "its answer is no list of trades")
        found = {one["trade_id"]: one for one in document if isinstance(one, dict) and _is_number(one.get("trade_id"))}
        return [
            Trade(number, orjson.dumps({"type": "match", "product_id": product, **one}), timestamp(one.get("time")))
            for number, one in sorted(found.items())
            if start <= number < end
        ]


def read(value: bytes, products: Mapping[str, Product]) -> tuple[Product, Trade] | str | None:
    """A trade of a product; why it is none; or None for what the exchange says beside trades.

    Unavailable when it says that it will not serve us.
    """
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return "it is not JSON"
    match document:
        case {"type": "match" | "last_match", "product_id": str(name), "trade_id": number}:
            if name not in products:
                return "it is a trade of a product that was not asked for"
            if not _is_number(number):
                return "its trade_id is no number of a trade"
            return products[name], Trade(number, value, timestamp(document.get("time")))
        case {"type": "match" | "last_match"}:
            return "it is a trade without a product or a number"
        case {"type": "error"}:
            why = f"{document.get('message')}: {document.get('reason')}"
            raise Unavailable("the exchange", "".join(one for one in why if one.isprintable())[:200])
        case {"type": str()}:
            return None
    return "it is no message of the exchange"


def _is_number(fields: object) -> bool:
    return isinstance(fields, int) and not isinstance(fields, bool) and 0 < fields < LARGEST


def timestamp(fields: object) -> Micros:
    """Of `2014-11-07T08:19:27.028459Z`; now, if it cannot be read."""
    try:
        found = datetime.fromisoformat(str(fields))
        micros = round(found.timestamp() * 1e6) if found.tzinfo is not None else -1
    except (ValueError, OverflowError):
        micros = -1
    return micros if micros >= 0 else time.time_ns() // 1_000


async def _settled(error: Exception | None) -> None:
    """What was not settled is asked for again at the next connection, by its number."""
