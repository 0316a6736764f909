"""Receipts: a text that names records, and that nobody can make up. So no table of them has to be kept."""

import base64
import binascii
import hmac
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import orjson

from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin

_KEY, _SEAL = 32, 16
"""Bytes of what seals receipts, and of a seal."""
LONGEST = 3_000
"""Characters: a longer text is no receipt."""

Key = tuple[str, int, int]
"""Sender, epoch and number."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Records that came together: as which numbers, when, and in which opening of the source."""

    sender: str
    epoch: int
    first: int
    count: int
    time: Micros
    opening: int

    @property
    def key(self) -> Key:
        return self.sender, self.epoch, self.first

    def origins(self) -> list[Origin]:
        return [Origin(self.sender, self.epoch, self.first + turn, self.time) for turn in range(self.count)]

    def holds(self, origin: Origin) -> bool:
        whose = (origin.sender, origin.epoch) == (self.sender, self.epoch)
        return whose and self.first <= origin.seq < self.first + self.count


class Seals:
    """Makes receipts into texts and back."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sealed(self, receipt: Receipt) -> str:
        facts = (receipt.sender, receipt.epoch, receipt.first, receipt.count, receipt.time, receipt.opening)
        told = orjson.dumps(facts)
        return base64.urlsafe_b64encode(self._seal(told) + told).decode().rstrip("=")

    def opened(self, text: str) -> Receipt | None:
        """None when nobody gave it."""
        if len(text) > LONGEST or not text.isascii():
            return None
        try:
            sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            return None
        seal, told = sealed[:_SEAL], sealed[_SEAL:]
        if not hmac.compare_digest(seal, self._seal(told)):
            return None
        receipt = Receipt(*orjson.loads(told))
        # Of the many spellings that base64 has for it, one was given.
        return receipt if self.sealed(receipt) == text else None

    def _seal(self, told: bytes) -> bytes:
        return hmac.digest(self._key, told, "sha256")[:_SEAL]


def seals(folder: Path, name: str) -> Seals:
    """With the key of this source, which is made when there is none: receipts hold beyond the life of a process."""
    path = folder / f"{quote(name, safe='')}.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            made = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                made.touch(0o600)
                made.write_bytes(os.urandom(_KEY))
                # Whoever comes first makes it, and whole.
                os.link(made, path)
            finally:
                made.unlink(missing_ok=True)
        key = path.read_bytes()
    except OSError as error:
        fix = "let it be written, or choose another folder"
        raise Misconfigured(f"source {name}, folder {folder}", error.strerror or str(error), fix) from error
    if len(key) != _KEY:
        raise Misconfigured(
            f"source {name}, {path}", "this is no key", "remove it: receipts given so far are void then"
        )
    return Seals(key)
