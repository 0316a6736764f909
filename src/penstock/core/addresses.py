"""Addresses in texts that people read: logs, errors, the plan, the status, the page. None of them tells a secret."""

import logging
import re

HIDDEN = "***"
SIMULATED = "simulate"
"""The scheme of feeds that a run starts by itself: their options are no secrets."""

_SECRET = r"[\w.~%-]*(?:token|secret|passw|pwd|key|sig|auth|cred|jwt|session)[\w.~%-]*"
_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_PARAMETER = re.compile(rf"([?&;]{_SECRET}=)[^\s&;#\"'<>]+", re.IGNORECASE)


def redacted(text: str) -> str:
    """The text, with addresses that have no user, no password, and no value of a parameter that may be a secret."""
    if "://" in text:
        text = _USER.sub("", text)
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{HIDDEN}", text)
    return text


def shown(address: str) -> str:
    """One address, for people. Of its parameters nothing is shown: any of them may be a token."""
    bare = redacted(address)
    return bare if address.startswith(f"{SIMULATED}://") else bare.partition("?")[0]


def is_secret(name: str) -> bool:
    """Whether a setting of this name is likely to be one."""
    return re.search("token|secret|passw", name, re.IGNORECASE) is not None


class Redacting(logging.Formatter):
    """Whatever is logged, a traceback too, tells no secret that is part of an address."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))
