"""What nobody can make up: signatures of webhooks and receipts."""

import base64
import hmac
from typing import cast

from starlette.requests import Request
from tests.fuzz.target import Given, target, tried

from penstock.collect.http.receipts import Receipt, ReceiptSigner
from penstock.collect.webhook import WebhookSource, _Messages
from penstock.collect.webhook.deliveries import Numbered
from penstock.core.errors import Misconfigured
from penstock.core.signatures import parse_secrets, sign, verify
from penstock.testing.clock import ManualClock
from penstock.web.responses import Problem


@target(
    b"\x03one\x03two\x05msg_1\xaa\x02{}\x00\x02AA\x03\x00",
    b"\x03one\x00\x03a.b\x01\x032.x\x01\x03 v1\x13\x02",
    b"\x03one\x03two\x01a\x01\x01b\x02\x01c\x14\x2a",
)
def signatures(data: bytes) -> None:
    """A signature by the key verifies among any others; one by another key, or over anything else, does not."""
    given = Given(data)
    key, other = given.some() or b"k", given.some()
    message, seconds, body = given.some().decode("latin-1"), given.byte() * 10_000_000, given.some()
    junk = given.among(("v1,", "v2,", "")) + given.some().decode("latin-1").replace(" ", "_")
    before = given.byte() % 24
    right = sign(key, message, seconds, body)["webhook-signature"]
    expected = base64.b64encode(hmac.new(key, f"{message}.{seconds}.".encode("latin-1") + body, "sha256").digest())
    assert right == f"v1,{expected.decode()}"
    among = " ".join([*[junk] * before, right, junk])
    for known in ([other, key], [key, other]):
        assert verify(known, among, message, str(seconds), body) == (before < 20 or junk == right)
    assert not verify([], among, message, str(seconds), body)
    if key.rstrip(b"\0") != other.rstrip(b"\0"):
        assert not verify([other], among, message, str(seconds), body)
    assert not verify([key], junk, message, str(seconds), body) or junk == right
    assert not verify([key], right, message, str(seconds + 1), body)
    assert not verify([key], right, message, str(seconds), body + b"x")
    assert not verify([key], right, f"{message}x", str(seconds), body)
    at = 3 + given.byte() % 43
    assert not verify([key], f"{right[:at]}.{right[at + 1 :]}", message, str(seconds), body)


_NOW = 1_700_000_000
_HEADERS = (b"webhook-id", b"webhook-timestamp", b"webhook-signature")


@target(
    b"\x01\x05msg_1\x02{}\x00\x00",
    b"\x00\x05msg_1\x02{}\x00\x03\x00\x01a\x01\x0a1700000000\x02\x05v1,AA",
    b"\x01\x01a\x00\x00\x01\x00\x01b",
)
def deliveries(data: bytes) -> None:
    """A message is taken whose headers are there once, signed by the key, and of this time; no other one is."""
    given = Given(data)
    right, message, body, off = given.byte() % 2, given.some().decode("latin-1"), given.some(), 2 * given.byte()
    headers = [(given.among(_HEADERS), given.some()) for _ in range(given.byte() % 4)]
    if right:
        told = sign(b"key", message, _NOW + off, body)
        headers += [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
    taking = _Messages(_SOURCE, cast(Numbered, None), [b"other", b"key"])
    request = Request({"type": "http", "method": "POST", "headers": headers})
    found = tried(lambda: _verified(taking, request, body), Problem)
    if isinstance(found, Problem):
        assert found.status in (400, 401)
        usual = message.isascii() and message.isprintable() and message
        assert not right or not usual or len(headers) > 3 or off > 300
    else:
        assert right
        assert len(headers) == 3
        assert off <= 300


def _verified(taking: _Messages, request: Request, body: bytes) -> None:
    taking._verify(request, taking._id(request), body)


_SOURCE = WebhookSource("listen+webhook://127.0.0.1:8700/in", "rsvps", "key", clock=ManualClock(_NOW * 1_000_000))


@target(b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b"one, two three", b"whsec_\xff", b"\xff")
def secrets(data: bytes) -> None:
    """As the environment may hold it. A secret is a key, or the user hears that it is none, without hearing it."""
    secret = data.decode(errors="surrogateescape")
    found = tried(lambda: parse_secrets("a source", secret), Misconfigured)
    if isinstance(found, Misconfigured):
        assert "whsec_" in secret
        assert len(secret) < 20 or secret not in str(found)
        return
    assert all(found)
    assert bool(found) == bool(secret.replace(",", " ").split())
    for key in found:
        assert verify([key], sign(key, "a", 1, b"")["webhook-signature"], "a", "1", b"")


@target(b"\x06a.http\x02\x03\x04\x05\x06\x00\x00\x00", b"\x02\xc3\xa4\xff\xff\xff\xff\xff\x05AAAA=\x03\x01")
def receipts(data: bytes) -> None:
    """What was sealed opens as what it was; no other text opens at all."""
    given = Given(data)
    sealing = ReceiptSigner(b"k" * 32)
    sender = given.text()
    numbers = [given.among((0, 1, 2**31, 2**63 - 1)) ^ given.byte() for _ in range(5)]
    receipt = Receipt(sender, *numbers)
    text = sealing.encode(receipt)
    assert sealing.decode(text) == receipt
    assert ReceiptSigner(b"j" * 32).decode(text) is None
    for made in (given.text(), given.rest().decode("latin-1")):
        assert sealing.decode(made) is None or made == text
        at = given.byte()
        for other in (text[:at] + made + text[at:], text[:at] + made + text[at + len(made) :], text[: len(text) - at]):
            assert other == text or sealing.decode(other) is None
