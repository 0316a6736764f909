"""Handshakes of senders: identity, and options."""

import json
from datetime import timedelta
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from tests.fuzz.target import Input, part, result_or_error, target
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeaderValue
from websockets.http11 import Request as Handshake

from penstock.collect.http import PostOptions
from penstock.collect.listen import invalid_sender
from penstock.collect.websocket import MAX_NUMBER
from penstock.collect.websocket_server import WebSocketServer, _named, _Server
from penstock.core.contracts import ResumeState
from penstock.core.errors import Refused
from penstock.core.framing import framing, parse_hello
from penstock.core.record import Origin
from penstock.web.requests import OriginCheck
from penstock.web.responses import Problem

_ADDRESS = "listen+ws://127.0.0.1:8765/in"
_NAMES = ("sender", "epoch", "seq", "a")


@target(
    b'\0{"sender": "a", "epoch": 1}\n',
    b'\0{"sender": "a", "epoch": true, "seq": 1}\n',
    b'\0{"sender": "a", "epoch": 9223372036854775808, "seq": 9223372036854775807}\n',
    b'\x01\0\0\0\x26{"sender": "a", "epoch": 1, "seq": 12}  ',
    b"\x02\x08\x03\0\x04\x03\x01\x02\x01\x02\x02\x03",
)
def hello(data: bytes) -> None:
    """A hello with exactly the identity of a sender is accepted; others are refused."""
    inputs = Input(data)
    kind = inputs.byte() % 3
    text = inputs.json(_NAMES, 2) + b"\n" if kind == 2 else inputs.rest()
    for found in framing("length" if kind == 1 else "lines", 4_096).push(text)[:1]:
        met = result_or_error(partial(parse_hello, found), Refused)
        if not isinstance(met, Refused):
            (sender, epoch), has = met
            assert (type(epoch), type(has)) == (int, int)
            assert found[2] is None
            assert {"seq": 1, **json.loads(found[0])} == {"sender": sender, "epoch": epoch, "seq": has}
            if invalid_sender(sender, "rsvps") is None:
                assert Origin.of(Origin(sender, epoch, has, 0).headers()) is not None


@target(
    b"sender=a&epoch=1&seq=2",
    b"sender=%C3%A4+b&epoch=17",
    b"epoch=1",
    b"sender=a&sender=b&epoch=1",
    b"sender=a&epoch=9223372036854775808",
)
def websocket_query(data: bytes) -> None:
    who = result_or_error(lambda: _named(data.decode("latin-1")), Refused)
    if who is not None and not isinstance(who, Refused):
        (sender, epoch), first = who
        assert 0 <= epoch < MAX_NUMBER
        assert 1 <= first < MAX_NUMBER
        if invalid_sender(sender, "rsvps") is None:
            assert Origin.of(Origin(sender, epoch, first, 0).headers()) is not None


@target(
    part(b"/in?sender=a&epoch=1&seq=2") + b"\x02\0" + part(b"http://a:8") + b"\x01" + part(b"a:8"),
    part(b"//[::1") + b"\0",
    part(b"/in?sender=a&epoch=1") + b"\x02\0" + part(b"http://a") + b"\0" + part(b"http://b"),
)
def handshake(data: bytes) -> None:
    """A handshake is accepted, or rejected with the reason; it never causes an internal error."""
    inputs = Input(data)
    path = inputs.sized().decode("latin-1")
    names = ("Origin", "Host", "Upgrade")
    fields = [(inputs.choose(names), inputs.sized().decode("latin-1")) for _ in range(inputs.byte() % 5)]
    headers = result_or_error(lambda: Headers(fields), InvalidHeaderValue)
    if isinstance(headers, InvalidHeaderValue):
        # The library does not let it through.
        return
    source, origin_check = WebSocketServer(_ADDRESS, "rsvps"), OriginCheck("127.0.0.1")
    refusal = _Server(source, ResumeState(), "/in", origin_check).refusal(Handshake(path, headers))
    if refusal is None:
        who = _named(urlsplit(path).query)
        assert who is not None
        assert invalid_sender(who[0][0], "rsvps") is None
        assert len(headers.get_all("Origin")) == 0 or len(headers.get_all("Host")) == 1
    else:
        status, text = refusal
        assert 400 <= status < 500
        assert text.endswith("\n")


@target(
    part(b"lines&sender=a&epoch=1&seq=2"),
    part(b"lines&lines"),
    part(b"answer=10s&oneway") + b"\x01\0" + part(b"a/1/2"),
    part(b"answer=2h") + b"\x02\0" + part(b'"a/1/2"') + b"\x01" + part(b"application/x-ndjson"),
)
def post_options(data: bytes) -> None:
    """A query string gives options, or a Problem."""
    inputs = Input(data)
    address = inputs.sized()
    headers = [(inputs.choose((b"idempotency-key", b"content-type")), inputs.sized()) for _ in range(inputs.byte() % 4)]
    request = Request({"type": "http", "method": "POST", "path": "/in", "query_string": address, "headers": headers})
    found = result_or_error(lambda: PostOptions.of(request, "rsvps", "rsvps.http", timedelta(seconds=60)), Problem)
    if isinstance(found, Problem):
        assert 400 <= found.status < 500
        str(found).encode()
        return
    names = [name for name, _ in parse_qsl(address.decode("latin-1"), keep_blank_values=True)]
    assert len(names) == len(set(names))
    assert found.answer is None or 0 <= found.answer <= 60
    if found.identity is not None:
        assert invalid_sender(found.identity[0], "rsvps") is None
        assert Origin.of(Origin(*found.identity, 0).headers()) is not None
