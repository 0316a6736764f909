"""Text for people: printable names, suggestions for misspelled names, and addresses without secrets."""

import difflib
import logging
import re
from collections.abc import Collection

HIDDEN = "***"
SIMULATED = "simulate"
"""The scheme of simulated feeds. Their options are not secret."""

_SECRET = r"[\w.~%-]*(?:token|secret|passw|pwd|key|sig|auth|cred|jwt|session)[\w.~%-]*"
_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_PARAMETER = re.compile(rf"([?&;]{_SECRET}=)[^\s&;#\"'<>]+", re.IGNORECASE)


def printable(name: str) -> str:
    """Return a name from outside with control characters escaped: they could move the cursor or set colours."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def did_you_mean(
    name: str, choices: Collection[str], otherwise: str, as_written: str = '"{}"', cutoff: float = 0.6
) -> str:
    """Suggest the choice that is closest to a misspelled name; `otherwise` if none is close.

    `as_written` is how the user writes the name, such as `"{}://"`.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name[:100].lower(), by_lower, n=1, cutoff=cutoff)
    return f"did you mean {as_written.format(by_lower[close[0]])}?" if close else otherwise


def counted(number: int, what: str) -> str:
    """`1 record`, `2,000 records`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def redact(text: str) -> str:
    """Remove users, passwords and the values of parameters that may be secret from the addresses in a text."""
    if "://" in text:
        text = _USER.sub("", text)
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{HIDDEN}", text)
    return text


def redact_address(address: str) -> str:
    """Remove the user and all parameters from an address, because any parameter may be a token."""
    bare = redact(address)
    return bare if address.startswith(f"{SIMULATED}://") else bare.partition("?")[0]


def is_secret(name: str) -> bool:
    """Whether the name of a setting suggests that its value is secret."""
    return re.search("token|secret|passw", name, re.IGNORECASE) is not None


class RedactingFormatter(logging.Formatter):
    """Format log records, tracebacks included, without the secrets of addresses."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
