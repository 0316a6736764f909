"""Signatures of webhooks, and receipts."""

import base64
import hmac
from typing import cast

from starlette.requests import Request
from tests.fuzz.target import Input, result_or_error, target

from penstock.collect.receipts import Receipt, ReceiptSigner
from penstock.collect.webhook import DeliveryQueue, WebhookSource, _Messages
from penstock.core.errors import Misconfigured
from penstock.core.signatures import parse_secrets, sign, verify
from penstock.testing import ManualClock
from penstock.web.responses import Problem


@target(
    b"\x03one\x03two\x05msg_1\xaa\x02{}\x00\x02AA\x03\x00",
    b"\x03one\x00\x03a.b\x01\x032.x\x01\x03 v1\x13\x02",
    b"\x03one\x03two\x01a\x01\x01b\x02\x01c\x14\x2a",
)
def signatures(data: bytes) -> None:
    """A valid signature verifies among others; one with another key or content does not."""
    inputs = Input(data)
    key, other = inputs.sized() or b"k", inputs.sized()
    message, seconds, body = inputs.sized().decode("latin-1"), inputs.byte() * 10_000_000, inputs.sized()
    junk = inputs.choose(("v1,", "v2,", "")) + inputs.sized().decode("latin-1").replace(" ", "_")
    before = inputs.byte() % 24
    right = sign(key, message, seconds, body)["webhook-signature"]
    expected = base64.b64encode(hmac.new(key, f"{message}.{seconds}.".encode("latin-1") + body, "sha256").digest())
    assert right == f"v1,{expected.decode()}"
    among = " ".join([*[junk] * before, right, junk])
    for trusted in ([other, key], [key, other]):
        assert verify(trusted, among, message, str(seconds), body) == (before < 20 or junk == right)
    assert not verify([], among, message, str(seconds), body)
    if key.rstrip(b"\0") != other.rstrip(b"\0"):
        assert not verify([other], among, message, str(seconds), body)
    assert not verify([key], junk, message, str(seconds), body) or junk == right
    assert not verify([key], right, message, str(seconds + 1), body)
    assert not verify([key], right, message, str(seconds), body + b"x")
    assert not verify([key], right, f"{message}x", str(seconds), body)
    at = 3 + inputs.byte() % 43
    assert not verify([key], f"{right[:at]}.{right[at + 1 :]}", message, str(seconds), body)


_NOW = 1_700_000_000
_HEADERS = (b"webhook-id", b"webhook-timestamp", b"webhook-signature")


@target(
    b"\x01\x05msg_1\x02{}\x00\x00",
    b"\x00\x05msg_1\x02{}\x00\x03\x00\x01a\x01\x0a1700000000\x02\x05v1,AA",
    b"\x01\x01a\x00\x00\x01\x00\x01b",
)
def webhooks(data: bytes) -> None:
    """A message is accepted only if each header occurs once, the signature is valid and the time is close."""
    inputs = Input(data)
    right, message, body, off = inputs.byte() % 2, inputs.sized().decode("latin-1"), inputs.sized(), 2 * inputs.byte()
    headers = [(inputs.choose(_HEADERS), inputs.sized()) for _ in range(inputs.byte() % 4)]
    if right:
        signed = sign(b"key", message, _NOW + off, body)
        headers += [(name.encode(), value.encode("latin-1")) for name, value in signed.items()]
    taking = _Messages(_SOURCE, cast(DeliveryQueue, None), [b"other", b"key"])
    request = Request({"type": "http", "method": "POST", "headers": headers})
    found = result_or_error(lambda: _verified(taking, request, body), Problem)
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
    """A secret from the environment is a key, or Misconfigured without the secret in its text."""
    secret = data.decode(errors="surrogateescape")
    found = result_or_error(lambda: parse_secrets("a source", secret), Misconfigured)
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
    """An encoded receipt decodes unchanged; no other text decodes."""
    inputs = Input(data)
    signer = ReceiptSigner(b"k" * 32)
    sender = inputs.text()
    numbers = [inputs.choose((0, 1, 2**31, 2**63 - 1)) ^ inputs.byte() for _ in range(5)]
    receipt = Receipt(sender, *numbers)
    text = signer.encode(receipt)
    assert signer.decode(text) == receipt
    assert ReceiptSigner(b"j" * 32).decode(text) is None
    for made in (inputs.text(), inputs.rest().decode("latin-1")):
        assert signer.decode(made) is None or made == text
        at = inputs.byte()
        for other in (text[:at] + made + text[at:], text[:at] + made + text[at + len(made) :], text[: len(text) - at]):
            assert other == text or signer.decode(other) is None
