"""Which numbers of which senders were taken: a set of origins whose memory grows with gaps, not with records."""

from collections.abc import Iterable, Iterator

from penstock.core.contracts import Arrival, SenderNumbers
from penstock.core.record import Origin
from penstock.core.runs import Runs

EPOCHS = 2
"""Epochs that are kept per sender. The newest is the one that goes on. The one before it stays because the last records
of a sender's former life may still come again, and because one absurd epoch must not push out the true one."""
RUNS = 100
SENDERS = 20_000
CHECK_EVERY = 10_000
"""Bounds against senders that jump about and feeds that make up senders. What is forgotten beyond them may be taken
twice, with the same origin: stores and the audit know it, queries do not. Nothing is believed taken that was not."""


class Numbers:
    """Origins by sender and epoch. The sender that was quiet for longest comes first."""

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
        """Add first–last (or the one number); how many of them were new."""
        before, generation, runs = self._latest
        if sender != before or epoch != generation:
            runs = self._found(sender, epoch)
            self._latest = sender, epoch, runs
        new = runs.add(first, last)
        self._added += 1
        if self._added % CHECK_EVERY == 0:
            self._trim()
            self._latest = sender, epoch, self._found(sender, epoch)
        return new

    def extend(self, sender: str, epoch: int, first: int, last: int) -> bool:
        """Add first–last, if none of them nor a later one was there; whether that is so."""
        highest = self._runs.get(sender, {}).get(epoch, Runs()).last
        if highest is not None and first <= highest:
            return False
        self.add(sender, epoch, first, last)
        return True

    def _found(self, sender: str, epoch: int) -> Runs:
        """The runs of a sender, which is now the last that was heard; others may be forgotten for it."""
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

    def places(self) -> SenderNumbers:
        """Where each sender's newest epoch has to go on: after the last number before the first gap.

        Numbers begin with 1. If a later one is the first that we hold, those before it may still be on their way.
        """
        return {sender: (epoch, _whole_until(runs)) for sender, epoch, runs in self._newest()}

    def highest(self) -> SenderNumbers:
        """The highest number of each sender's newest epoch."""
        return {sender: (epoch, runs.last or 0) for sender, epoch, runs in self._newest()}

    def _newest(self) -> Iterator[tuple[str, int, Runs]]:
        for sender, epochs in self._runs.items():
            epoch = max(epochs)
            yield sender, epoch, epochs[epoch]

    def _trim(self) -> None:
        """Keep the first run, behind which a resume goes on, and the newest ones."""
        for epochs in self._runs.values():
            for epoch, runs in epochs.items():
                if len(kept := list(runs)) > RUNS:
                    epochs[epoch] = Runs([kept[0], *kept[1 - RUNS :]])


def in_runs(arrivals: Iterable[object]) -> Iterator[tuple[str, int, int, int]]:
    """The numbers that the outside gave to these arrivals, as (sender, epoch, first, last): as few as it takes."""
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


def _whole_until(runs: Runs) -> int:
    return max(0, runs.whole_until or 0) if (runs.first or 0) <= 1 else 0
