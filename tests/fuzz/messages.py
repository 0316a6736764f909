"""What feeds say: their messages, and what is read from them."""

import json
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from examples.feeds.coinbase import Product, Trade, timestamp
from examples.feeds.coinbase import read as read_trade
from tests.fuzz.target import Given, raw, target, tried

from penstock.collect.dedup import key_of
from penstock.collect.listen import invalid_sender
from penstock.collect.websocket import END, LARGEST, Reading, place_of, read, with_parameter
from penstock.core.clock import SystemClock
from penstock.core.contracts import Arrival
from penstock.core.errors import Unavailable
from penstock.core.record import Heartbeat, Origin
from penstock.web.webhook import MAX_PAUSE, retry_after

_WORDS = ("feed", "sender", "epoch", "seq", "time", "heartbeat", "heartbeats", "end", "meta", "place", "type", "a")
_CONDITIONS: Sequence[tuple[str, ...]] = ((), ("type=a",), ("meta.place=1", "end=true"))
_NOTHING = object()


@target(
    b"\x01\0\0\0" + raw(b'{"feed": {"sender": "a", "epoch": 1, "seq": 2, "time": 3}, "more": [1, 2, 3]}'),
    b"\x01\0\0\0" + raw(b'{"feed": {"sender": "a", "epoch": 1, "seq": 9223372036854775808, "time": 3}}'),
    b"\x01\0\0\0" + raw(b'{"end": true}') + raw(b'{"heartbeats": [{"sender": "a", "epoch": 1, "seq": 2, "time": 3}]}'),
    b"\0\x01\x031/4\0\0" + raw(b'{"time": 1}') + raw(b'{"time": 1}') + raw(b"{}") + raw(b'{"time": "b"}') + raw(b"x"),
    b"\x01\0\x01\x02" + raw(b'{"type": "a"}') + raw(b'{"type": "b"}') + raw(b'{"type": "a", "end": true}'),
)
def messages(data: bytes) -> None:
    """Each message is taken as it came, or it says something else; nothing that cannot be read is passed over."""
    given = Given(data)
    numbered = given.among((None, "feed", "meta"))
    cursor = given.among((None, "time", "meta.place"))
    after = given.text() if cursor else None
    only, ignore = (given.among(_CONDITIONS) for _ in range(2))
    numbered = None if cursor else numbered
    reading, counted = Reading(numbered, cursor, after, only, ignore), _Counted(place_of(after))
    for _ in range(20):
        message = given.json(_WORDS)
        document = _loaded(message)
        said = reading(message)
        if not only and not ignore and not cursor:
            assert said == read(message, numbered)
        if said is END:
            assert document == {"end": True}
        elif not said:
            assert only or ignore
            assert isinstance(document, dict)
        for one in said:
            _is_sane(one, message, document, numbered)
        if cursor and said:
            (arrival,) = said
            assert isinstance(arrival, Arrival)
            assert arrival.cursor is not None
            assert arrival.cursor == counted.next(_found(document, cursor))
            _goes_on_at(place_of(arrival.cursor))
        if not given.left:
            return


class _Counted:
    """The place that was told last, how many have told it in a row, and how many came since that told none."""

    def __init__(self, place: str) -> None:
        self._place, self._same, self._since = place, 0, 0

    def next(self, told: object) -> str:
        if isinstance(told, float) and not -(2**53) < told < 2**53:
            told = None
        if isinstance(told, int) and not -(2**63) <= told < 2**64:
            told = None
        text = told if isinstance(told, str) else orjson.dumps(told).decode() if isinstance(told, int | float) else ""
        if not text:
            self._since += 1
            return f"{self._place}/{self._same - 1}+{self._since}"
        self._place, self._same, self._since = text, self._same + 1 if text == self._place else 1, 0
        return f"{text}/{self._same - 1}"


def _is_sane(one: Arrival | Heartbeat, message: bytes, document: object, numbered: str | None) -> None:
    if isinstance(one, Arrival):
        assert one.value == message
        assert one.refused is None
        if one.origin is None:
            return
        assert isinstance(document, dict)
        assert document[numbered]["seq"] == one.origin.seq
        assert Origin.of(one.origin.headers()) == one.origin
        origin: Origin | Heartbeat = one.origin
    else:
        origin = one
    assert invalid_sender(origin.sender, "") is None
    assert all(0 <= number < LARGEST for number in (origin.epoch, origin.seq, origin.time))


def _goes_on_at(place: str) -> None:
    address = with_parameter("ws://127.0.0.1/a?cursor=1&b=2", "cursor", place)
    assert parse_qs(urlsplit(address).query, keep_blank_values=True) == {"b": ["2"], "cursor": [place]}


def _loaded(text: bytes) -> Any:
    """As the standard has it: Python reads more than that."""
    try:
        document = json.loads(text.decode(), parse_constant=_number, parse_float=_number)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _NOTHING
    return document


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _found(document: object, path: str) -> object:
    for step in path.split("."):
        document = document.get(step) if isinstance(document, dict) else None
    return document


@target(
    raw(b'{"type": "match", "product_id": "BTC-USD", "trade_id": 7, "time": "2014-11-07T08:19:27.028459Z"}'),
    raw(b'{"type": "match", "product_id": "BTC-USD", "trade_id": 9223372036854775808}'),
    raw(b'{"type": "error", "message": "no", "reason": "x"}'),
)
def trades(data: bytes) -> None:
    words = (
        "type",
        "match",
        "product_id",
        "BTC-USD",
        "trade_id",
        "time",
        "last_match",
        "error",
        "0001-01-01T00:00Z",
    )
    value, products = Given(data).json(words), {"BTC-USD": Product("BTC-USD")}
    document = _loaded(value)
    found = tried(lambda: read_trade(value, products), Unavailable)
    if isinstance(found, Unavailable):
        assert document["type"] == "error"
        assert len(str(found)) < 300
    elif found is None:
        assert isinstance(document["type"], str)
    elif not isinstance(found, str):
        product, trade = found
        assert (trade.number, trade.value) == (document["trade_id"], value)
        origin = product.take(trade).origin
        assert origin is not None
        assert Origin.of(origin.headers()) == origin


@target(b"2014-11-07T08:19:27.028459Z", b"0001-01-01T00:00:00+00:00", b"9999-12-31T23:59:59-23:59")
def moments(data: bytes) -> None:
    found = timestamp(data.decode(errors="replace"))
    assert 0 <= found < 2**63
    Product("BTC-USD").take(Trade(1, data, found))


@target(b"10", b"Wed, 21 Oct 2015 07:28:00 GMT", b"0", b"1e400", b"Mon, 1 Jan 0001 00:00:00 -0000")
def pauses(data: bytes) -> None:
    """As a header holds it."""
    pause = retry_after(data.decode("latin-1"), SystemClock())
    assert pause is None or 0 <= pause <= MAX_PAUSE


@target(
    b"\0" + raw(b'{"meta": 7}'), b"\x01" + raw(b'{"meta": {"place": "b"}}'), b"\x02" + raw(b'{"meta": 1.5, "a": true}')
)
def keys(data: bytes) -> None:
    given = Given(data)
    path = given.among(("meta", "meta.place", ("meta", "a"), ("time",)))
    value = given.json(_WORDS)
    found, document = key_of(value, path), _loaded(value)
    if found is None:
        return
    if isinstance(path, str):
        told = _found(document, path)
        assert found.decode() == told if isinstance(told, str) else json.loads(found) == _near(told)
    else:
        assert json.loads(found) == [_near(_found(document, one)) for one in path]


def _near(told: Any) -> Any:
    """Numbers beyond 64 bits are rounded: records lie together whose numbers are so near."""
    return float(told) if type(told) is int and not -(2**63) <= told < 2**64 else told
