"""Balances to look at, and looks at them that are a second apart."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from penstock.audit.alarms import Alarms
from penstock.audit.settings import AuditSettings
from penstock.audit.snapshot import Alarm, Elapsed, Snapshot
from penstock.testing import ManualClock

SECOND = 1_000_000


def hop(stage: str = "source:rsvps", reads: str = "", writes: str = "rsvps", **told: Any) -> dict[str, Any]:
    counts = {"due": 0, "taken": 0, "in_flight": 0, "missing": 0, "outcomes": {}, "gaps": []}
    return {"stage": stage, "reads": reads, "writes": writes, **counts, **told}


def query(**told: Any) -> dict[str, Any]:
    return hop("query:by_country", "rsvps", "by_country", **told)


def channel(**told: Any) -> dict[str, Any]:
    return {"channel": "rsvps", "kind": "source", "records": 0, "unknown_seconds": 0.0, "unread": 0, **told}


def sender(name: str, newest: int, records: int = 100, epoch: int = 1, **told: Any) -> dict[str, Any]:
    return {"sender": name, "epoch": epoch, "records": records, "newest": newest, "latency": None, **told}


def balance(*parts: dict[str, Any], **told: Any) -> dict[str, Any]:
    hops = [part for part in parts if "stage" in part]
    return {"hops": hops, "channels": [part for part in parts if "channel" in part], "minutes": {}, **told}


class Watch:
    """Alarms, and a clock that moves by a second between two looks."""

    def __init__(self, batch: timedelta = timedelta(0), reads: Mapping[str, Sequence[str]] | None = None) -> None:
        self.clock = ManualClock()
        self.alarms, self._elapsed = Alarms(batch, reads or {}), Elapsed()

    @property
    def now(self) -> int:
        return self.clock.now()

    def look(self, *parts: dict[str, Any], processes: Mapping[str, Any] | None = None, **told: Any) -> list[Alarm]:
        self.clock.move(1)
        elapsed = self._elapsed.at(self.now)
        return self.alarms.look(Snapshot(self.now, elapsed, AuditSettings(), balance(*parts, **told), processes or {}))

    def names(self, *parts: dict[str, Any], processes: Mapping[str, Any] | None = None, **told: Any) -> list[str]:
        return [alarm.name for alarm in self.look(*parts, processes=processes, **told)]

    def stay(self, seconds: int, *parts: dict[str, Any], processes: Mapping[str, Any] | None = None) -> list[str]:
        """Look at the same for so long; the alarms at the end."""
        for _ in range(seconds - 1):
            self.look(*parts, processes=processes)
        return self.names(*parts, processes=processes)
