"""Sequence numbers: those that senders give, and those that the collector gives.

Memory grows with the gaps, not with the records.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from penstock.core.clock import Micros
from penstock.core.contracts import Arrival, SenderNumbers
from penstock.core.record import Origin
from penstock.core.runs import Runs

EPOCHS = 2
"""Epochs that are kept per sender. The older one stays because its last records may be repeated, and because one absurd
epoch must not displace the true one."""
RUNS = 100
SENDERS = 20_000
CHECK_EVERY = 10_000
"""Bounds against senders that jump and feeds that invent senders. A number that was forgotten beyond them can be
accepted twice, with the same origin: stores and the audit recognize it, queries without `unique=` do not."""

HTTP_SUFFIX, WEBHOOK_SUFFIX = ".http", ".webhook"
"""A source that numbers records itself uses its name with this suffix as the sender."""


class Numbers:
    """A set of origins, by sender and epoch. The sender that was inactive for longest comes first."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, Runs]] = {}
        self._added = 0
        self._latest: tuple[str, int, Runs] = ("", -1, Runs())

    def copy(self) -> "Numbers":
        other = Numbers()
        for sender, epoch, runs in self:
            other._runs.setdefault(sender, {})[epoch] = Runs(runs)
        return other

    def add(self, sender: str, epoch: int, first: int, last: int | None = None) -> int:
        """Add first–last (or one number). Return how many were new."""
        latest_sender, latest_epoch, runs = self._latest
        if sender != latest_sender or epoch != latest_epoch:
            runs = self._runs_of(sender, epoch)
            self._latest = sender, epoch, runs
        new = runs.add(first, last)
        self._added += 1
        if self._added % CHECK_EVERY == 0:
            self._trim()
            self._latest = sender, epoch, self._runs_of(sender, epoch)
        return new

    def extend(self, sender: str, epoch: int, first: int, last: int) -> bool:
        """Add first–last if `first` is above all known numbers. Return whether it was."""
        highest = self._runs.get(sender, {}).get(epoch, Runs()).last
        if highest is not None and first <= highest:
            return False
        self.add(sender, epoch, first, last)
        return True

    def last_from(self, sender: str, epoch: int, number: int) -> int:
        """The last number of the run that contains this number or ends before it; without one, the number before."""
        runs = self._runs.get(sender, {}).get(epoch, Runs())
        return next((last for first, last in runs if first <= number <= last + 1), number - 1)

    def _runs_of(self, sender: str, epoch: int) -> Runs:
        """The runs of a sender, which becomes the most recent one. May forget another sender or epoch."""
        epochs = self._runs.pop(sender, None) or {}
        self._runs[sender] = epochs
        runs = epochs.setdefault(epoch, Runs())
        if len(epochs) > EPOCHS:
            del epochs[min(epochs)]
        if len(self._runs) > SENDERS:
            del self._runs[next(iter(self._runs))]
        return runs

    def __contains__(self, origin: Origin) -> bool:
        runs = self._runs.get(origin.sender, {}).get(origin.epoch)
        return runs is not None and origin.seq in runs

    def __iter__(self) -> Iterator[tuple[str, int, Runs]]:
        for sender, epochs in self._runs.items():
            for epoch, runs in epochs.items():
                yield sender, epoch, runs

    def contiguous(self) -> SenderNumbers:
        """The last number before the first gap, in the newest epoch of each sender.

        Numbers begin with 1. If a later one is the first known, those before it may still arrive.
        """
        return {
            sender: (epoch, max(0, runs.whole_until or 0) if (runs.first or 0) <= 1 else 0)
            for sender, epoch, runs in self._newest()
        }

    def highest(self) -> SenderNumbers:
        """The highest number in the newest epoch of each sender."""
        return {sender: (epoch, runs.last or 0) for sender, epoch, runs in self._newest()}

    def _newest(self) -> Iterator[tuple[str, int, Runs]]:
        for sender, epochs in self._runs.items():
            epoch = max(epochs)
            yield sender, epoch, epochs[epoch]

    def _trim(self) -> None:
        """Keep the first run, after which a source resumes, and the newest ones."""
        for epochs in self._runs.values():
            for epoch, runs in epochs.items():
                if len(kept := list(runs)) > RUNS:
                    epochs[epoch] = Runs([kept[0], *kept[1 - RUNS :]])


def number_runs(arrivals: Iterable[object]) -> Iterator[tuple[str, int, int, int]]:
    """The numbers of arrivals that have an origin, as runs: (sender, epoch, first, last)."""
    sender: str | None = None
    epoch, first, last = 0, 0, -1
    for arrival in arrivals:
        if not isinstance(arrival, Arrival) or (origin := arrival.origin) is None:
            continue
        if origin.seq == last + 1 and origin.sender == sender and origin.epoch == epoch:
            last += 1
            continue
        if sender is not None:
            yield sender, epoch, first, last
        sender, epoch, first, last = origin.sender, origin.epoch, origin.seq, origin.seq
    if sender is not None:
        yield sender, epoch, first, last


class Numbering:
    """Gives the numbers 1, 2, 3, … in the name of the source. The epoch is the generation of the collector."""

    def __init__(self, sender: str, epoch: int) -> None:
        self.sender = sender
        self.epoch = epoch
        self.last = 0

    def next(self, now: Micros) -> Origin:
        self.last += 1
        return Origin(self.sender, self.epoch, self.last, now)


def no_collectors(sender: str) -> bool:
    return False


def other_collectors(name: str, sources: Iterable[str]) -> Callable[[str], bool]:
    """A predicate: whether a sender name belongs to another collector than `name`. Only that one may number in it.

    `sources`: the sources that fill the same channel. Each worker has the name of its source with a number.
    """
    names = "|".join(map(re.escape, sources))
    pattern = re.compile(rf"(?:{names})(?:\.[0-9]+)?(?:{re.escape(HTTP_SUFFIX)}|{re.escape(WEBHOOK_SUFFIX)})?")
    own = {name, f"{name}{HTTP_SUFFIX}", f"{name}{WEBHOOK_SUFFIX}"}
    return lambda sender: sender not in own and pattern.fullmatch(sender) is not None
