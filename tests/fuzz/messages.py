"""Messages of WebSocket feeds, and what is read from them."""

import json
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from examples.feeds.coinbase import Product, Trade, timestamp
from examples.feeds.coinbase import read as read_trade
from tests.fuzz.target import Input, raw, result_or_error, target

from penstock.collect.dedup import key_of
from penstock.collect.listen import invalid_sender
from penstock.collect.websocket import END, MAX_NUMBER, MessageParser, position_of, with_parameter
from penstock.core.clock import SystemClock
from penstock.core.contracts import Arrival
from penstock.core.errors import Unavailable
from penstock.core.record import Heartbeat, Origin
from penstock.web.webhook import MAX_PAUSE, retry_after

_NAMES = ("feed", "sender", "epoch", "seq", "time", "heartbeat", "heartbeats", "end", "meta", "place", "type", "a")
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
    """A message gives an unchanged arrival, heartbeats, or the end; unreadable ones are not dropped."""
    inputs = Input(data)
    numbered = inputs.choose((None, "feed", "meta"))
    cursor = inputs.choose((None, "time", "meta.place"))
    after = inputs.text() if cursor else None
    only, ignore = (inputs.choose(_CONDITIONS) for _ in range(2))
    numbered = None if cursor else numbered
    reading, counted = MessageParser(numbered, cursor, after, only, ignore), _Counted(position_of(after))
    for _ in range(20):
        message = inputs.json(_NAMES)
        document = _loaded(message)
        output = reading(message)
        if not only and not ignore and not cursor:
            assert output == MessageParser(numbered)(message)
        if output is END:
            assert document == {"end": True}
        elif not output:
            assert only or ignore
            assert isinstance(document, dict)
        for one in output:
            _is_sane(one, message, document, numbered)
        if cursor and output:
            (arrival,) = output
            assert isinstance(arrival, Arrival)
            assert arrival.cursor is not None
            assert arrival.cursor == counted.next(_found(document, cursor))
            _check_resume(position_of(arrival.cursor))
        if not inputs.left:
            return


class _Counted:
    """The last place, how many messages in a row had it, and how many without a place followed."""

    def __init__(self, location: str) -> None:
        self._location, self._same, self._since = location, 0, 0

    def next(self, value: object) -> str:
        if isinstance(value, float) and not -(2**53) < value < 2**53:
            value = None
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            value = None
        text = (
            value if isinstance(value, str) else orjson.dumps(value).decode() if isinstance(value, int | float) else ""
        )
        if not text:
            self._since += 1
            return f"{self._location}/{self._same - 1}+{self._since}"
        self._location, self._same, self._since = text, self._same + 1 if text == self._location else 1, 0
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
    assert all(0 <= number < MAX_NUMBER for number in (origin.epoch, origin.seq, origin.time))


def _check_resume(location: str) -> None:
    address = with_parameter("ws://127.0.0.1/a?cursor=1&b=2", "cursor", location)
    assert parse_qs(urlsplit(address).query, keep_blank_values=True) == {"b": ["2"], "cursor": [location]}


def _loaded(text: bytes) -> Any:
    """Standard JSON; Python accepts more."""
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
    names = (
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
    value, products = Input(data).json(names), {"BTC-USD": Product("BTC-USD")}
    document = _loaded(value)
    found = result_or_error(lambda: read_trade(value, products), Unavailable)
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
def timestamps(data: bytes) -> None:
    found = timestamp(data.decode(errors="replace"))
    assert 0 <= found < 2**63
    Product("BTC-USD").take(Trade(1, data, found))


@target(b"10", b"Wed, 21 Oct 2015 07:28:00 GMT", b"0", b"1e400", b"Mon, 1 Jan 0001 00:00:00 -0000")
def retry_after_header(data: bytes) -> None:
    """Retry-After with any text."""
    pause = retry_after(data.decode("latin-1"), SystemClock())
    assert pause is None or 0 <= pause <= MAX_PAUSE


@target(
    b"\0" + raw(b'{"meta": 7}'), b"\x01" + raw(b'{"meta": {"place": "b"}}'), b"\x02" + raw(b'{"meta": 1.5, "a": true}')
)
def record_keys(data: bytes) -> None:
    inputs = Input(data)
    path = inputs.choose(("meta", "meta.place", ("meta", "a"), ("time",)))
    value = inputs.json(_NAMES)
    found, document = key_of(value, path), _loaded(value)
    if found is None:
        return
    if isinstance(path, str):
        expected = _found(document, path)
        assert found.decode() == expected if isinstance(expected, str) else json.loads(found) == _near(expected)
    else:
        assert json.loads(found) == [_near(_found(document, one)) for one in path]


def _near(expected: Any) -> Any:
    """Numbers beyond 64 bits are rounded to a float."""
    return float(expected) if type(expected) is int and not -(2**63) <= expected < 2**64 else expected
