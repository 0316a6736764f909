"""Which of the records that wait on disk their channel holds already: what a life that ended had still sent. No I/O."""

from collections.abc import Iterable

from penstock.core.record import Origin, Record
from penstock.core.runs import Runs

_Numbers = dict[tuple[str, str, int], Runs]
"""By channel, sender and epoch."""


class Sought:
    """Origins that are sought in channels, and those of them that were found there."""

    def __init__(self, waiting: Iterable[tuple[str, Record]] = ()) -> None:
        self._sought: _Numbers = {}
        self._found: _Numbers = {}
        for channel, record in waiting:
            if record.origin is not None:
                _add(self._sought, channel, record.origin)

    def see(self, channel: str, origin: Origin) -> None:
        """A channel holds a record of this origin."""
        if _holds(self._sought, channel, origin):
            _add(self._found, channel, origin)

    def found(self, channel: str, origin: Origin) -> bool:
        return _holds(self._found, channel, origin)


def _add(numbers: _Numbers, channel: str, origin: Origin) -> None:
    numbers.setdefault((channel, origin.sender, origin.epoch), Runs()).add(origin.seq)


def _holds(numbers: _Numbers, channel: str, origin: Origin) -> bool:
    runs = numbers.get((channel, origin.sender, origin.epoch))
    return runs is not None and origin.seq in runs
