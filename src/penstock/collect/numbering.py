"""Numbers for what the outside does not number: the collector is the sender then."""

import re
from collections.abc import Callable, Iterable

from penstock.core.clock import Micros
from penstock.core.record import Origin

OF_HTTP, OF_WEBHOOKS = ".http", ".webhook"
"""How a source calls itself where it numbers by itself what comes by these ways, behind its name."""


def nobody(sender: str) -> bool:
    """Whether it is another collector: there is none."""
    return False


def others(name: str, sources: Iterable[str]) -> Callable[[str], bool]:
    """Which names of senders belong to other collectors than that of `name`: in them only those may number.

    `sources` are those that fill the same channel. Each of their workers is called as its source, with a number.
    """
    names = "|".join(map(re.escape, sources))
    known = re.compile(rf"(?:{names})(?:\.[0-9]+)?(?:{re.escape(OF_HTTP)}|{re.escape(OF_WEBHOOKS)})?")
    own = {name, f"{name}{OF_HTTP}", f"{name}{OF_WEBHOOKS}"}
    return lambda sender: sender not in own and known.fullmatch(sender) is not None


class Numbering:
    """1, 2, 3, … in the name of the source; the epoch is the collector's incarnation."""

    def __init__(self, sender: str, epoch: int) -> None:
        self.sender = sender
        self.epoch = epoch
        self.last = 0

    def next(self, now: Micros) -> Origin:
        self.last += 1
        return Origin(self.sender, self.epoch, self.last, now)
