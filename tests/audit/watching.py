"""Balances to look at, and looks at them that are a second apart."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from penstock.audit.alarms import Alarms
from penstock.audit.balance import Balance, ChannelBalance, SenderBalance
from penstock.audit.findings import Kind
from penstock.audit.hops import Hop
from penstock.audit.lag import Endangered
from penstock.audit.rules import Alarm, Elapsed, Snapshot
from penstock.audit.settings import AuditSettings
from penstock.testing import ManualClock

SECOND = 1_000_000


def hop(stage: str = "source:rsvps", reads: str = "", writes: str = "rsvps", **told: Any) -> Hop:
    return Hop(stage, reads, writes, **{"due": 0, "taken": 0, "in_flight": 0, "missing": 0, **told})


def query(**told: Any) -> Hop:
    return hop("query:by_country", "rsvps", "by_country", **told)


def channel(**told: Any) -> ChannelBalance:
    counts = ("senders", "records", "distinct", "duplicates", "missing", "claimed", "in_flight", "refused")
    zero: dict[str, Any] = dict.fromkeys((*counts, "without_identity"), 0)
    return ChannelBalance("rsvps", Kind.SOURCE, **{**zero, "unknown_seconds": 0.0, "gaps": (), "latency": None, **told})


def sender(name: str, newest: int, records: int = 100, epoch: int = 1) -> SenderBalance:
    return SenderBalance(name, epoch, 1, records, records, records, 0, 0, newest=newest)


def balance(*parts: Hop | ChannelBalance, **told: Any) -> Balance:
    hops = tuple(part for part in parts if isinstance(part, Hop))
    channels = tuple(part for part in parts if isinstance(part, ChannelBalance))
    return Balance(0, told.pop("as_of", None), channels, hops, **told)


class Watch:
    """Alarms, and a clock that moves by a second between two looks."""

    def __init__(self, batch: timedelta = timedelta(0)) -> None:
        self.clock = ManualClock()
        self.alarms, self._elapsed = Alarms(batch), Elapsed()

    @property
    def now(self) -> int:
        return self.clock.now()

    def look(
        self,
        *parts: Hop | ChannelBalance,
        processes: Mapping[str, Any] | None = None,
        endangered: Sequence[Endangered] = (),
        **told: Any,
    ) -> list[Alarm]:
        self.clock.move(1)
        found, elapsed = balance(*parts, **told), self._elapsed.at(self.now)
        return self.alarms.look(Snapshot(self.now, elapsed, AuditSettings(), found, processes or {}, endangered))

    def names(self, *parts: Hop | ChannelBalance, processes: Mapping[str, Any] | None = None, **told: Any) -> list[str]:
        return [alarm.name for alarm in self.look(*parts, processes=processes, **told)]

    def stay(self, seconds: int, *parts: Hop | ChannelBalance, processes: Mapping[str, Any] | None = None) -> list[str]:
        """Look at the same for so long; the alarms at the end."""
        for _ in range(seconds - 1):
            self.look(*parts, processes=processes)
        return self.names(*parts, processes=processes)
