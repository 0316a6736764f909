"""Signatures of Standard Webhooks: who knows the secret has sent this body, as this message, at this time. No I/O."""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence

from penstock.core.errors import Misconfigured

PREFIX = "whsec_"
_MOST = 20
"""Signatures that a message may have: a provider that changes its secret sends two."""


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def keys(place: str, secret: str | Sequence[str]) -> list[bytes]:
    """Of `whsec_` and base64, or of any text; of several, while a provider changes from one to the next."""
    several = re.split(r"[,\s]+", secret.strip()) if isinstance(secret, str) else secret
    return [key_of(place, one) for one in several if one]


def key_of(place: str, secret: str) -> bytes:
    if not secret.startswith(PREFIX):
        # From the environment it may be any bytes.
        return secret.encode(errors="surrogateescape")
    text = secret.removeprefix(PREFIX)
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        # The secret itself stays out of the sentence.
        raise Misconfigured(place, f"what follows {PREFIX} is not base64", "copy it once more")
    return key


def signed(key: bytes | None, message: str, seconds: int, body: bytes) -> Mapping[str, str]:
    """The headers of a message; without a key, one without a signature."""
    headers = {"webhook-id": message, "webhook-timestamp": str(seconds)}
    if key:
        digest = _digest(key, message, str(seconds), body)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def is_signed(known: Sequence[bytes], signature: str, message: str, seconds: str, body: bytes) -> bool:
    """Whether one of the signatures is by one of the keys. It takes as long for a wrong one as for a right one."""
    given = [one.removeprefix("v1,") for one in signature.split(" ")[:_MOST] if one.startswith("v1,")]
    right = False
    for key in known:
        expected = base64.b64encode(_digest(key, message, seconds, body))
        for one in given:
            right |= hmac.compare_digest(expected, one.encode("latin-1", "replace"))
    return right


def _digest(key: bytes, message: str, seconds: str, body: bytes) -> bytes:
    return hmac.digest(key, f"{message}.{seconds}.".encode("latin-1", "replace") + body, hashlib.sha256)
