"""Signatures of Standard Webhooks: they prove that the sender of a message knows the secret. No I/O."""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence

from penstock.core.errors import Misconfigured

PREFIX = "whsec_"
_MAX_SIGNATURES = 20
"""Of one message. A provider that changes its secret sends two."""


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def parse_secrets(location: str, secret: str | Sequence[str]) -> list[bytes]:
    """The keys of one or several secrets: each is `whsec_` and base64, or any text."""
    several = re.split(r"[,\s]+", secret.strip()) if isinstance(secret, str) else secret
    return [parse_secret(location, one) for one in several if one]


def parse_secret(location: str, secret: str) -> bytes:
    if not secret.startswith(PREFIX):
        # A secret from the environment may hold any bytes.
        return secret.encode(errors="surrogateescape")
    text = secret.removeprefix(PREFIX)
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        # The text of the error must not contain the secret.
        raise Misconfigured(location, f"the text after {PREFIX} is not base64", "copy the secret again")
    return key


def sign(key: bytes | None, message: str, seconds: int, body: bytes) -> Mapping[str, str]:
    """The headers of a message. Without a key they have no signature."""
    headers = {"webhook-id": message, "webhook-timestamp": str(seconds)}
    if key:
        digest = _digest(key, message, str(seconds), body)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def verify(keys: Sequence[bytes], signature: str, message: str, seconds: str, body: bytes) -> bool:
    """Whether one of the signatures was made with one of the keys, in constant time."""
    signatures = [one.removeprefix("v1,") for one in signature.split(" ")[:_MAX_SIGNATURES] if one.startswith("v1,")]
    valid = False
    for key in keys:
        expected = base64.b64encode(_digest(key, message, seconds, body))
        for one in signatures:
            valid |= hmac.compare_digest(expected, one.encode("latin-1", "replace"))
    return valid


def _digest(key: bytes, message: str, seconds: str, body: bytes) -> bytes:
    return hmac.digest(key, f"{message}.{seconds}.".encode("latin-1", "replace") + body, hashlib.sha256)
