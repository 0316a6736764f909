"""How far a client is: a place in every partition of a channel, written as a token that only we can write."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from penstock.core.clock import Micros


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in one partition: the offset of the next entry, and the newest time of appending before it."""

    offset: int = 0
    appended: Micros = 0


Position = Mapping[int, Mark]


class Tokens:
    """Positions as text that is opaque to clients, bound to one table.

    A token of another table, of a topic that was made anew, or of anybody's invention is not readable here.
    """

    _LONGEST = 8_192

    def __init__(self, *table: str) -> None:
        self._secret = blake2b("\0".join(table).encode(), digest_size=32).digest()

    def write(self, position: Position) -> str:
        body = ".".join(f"{part}-{mark.offset:x}-{mark.appended:x}" for part, mark in sorted(position.items()))
        return f"{self._seal(body)}.{body}"

    def read(self, token: str | None) -> Position | None:
        """The position, or None when this is no token of this table."""
        if not token or len(token) > self._LONGEST or not token.isascii():
            return None
        seal, _, body = token.partition(".")
        if not compare_digest(seal, self._seal(body)):
            return None
        # The seal says that we wrote the body, so it has the shape that we write.
        parts = [part.split("-") for part in body.split(".")] if body else []
        return {int(part): Mark(int(offset, 16), int(appended, 16)) for part, offset, appended in parts}

    def _seal(self, body: str) -> str:
        return blake2b(body.encode(), key=self._secret, digest_size=8).hexdigest()
