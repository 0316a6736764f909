"""Numbers for what the outside does not number: the collector is the sender then."""

from penstock.clock import Micros
from penstock.record import Origin


class Numbering:
    """1, 2, 3, … in the name of the source; the epoch is the collector's incarnation."""

    def __init__(self, sender: str, epoch: int) -> None:
        self.sender = sender
        self.epoch = epoch
        self.last = 0

    def next(self, now: Micros) -> Origin:
        self.last += 1
        return Origin(self.sender, self.epoch, self.last, now)
