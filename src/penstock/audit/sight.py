"""What the alarms look at: the balance and the words of all processes at a moment. No I/O.

The balance is that of `Balance.to_json()`, in brief or in full. The words of other processes may be of another version:
what is not as expected counts as not told.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.audit.settings import AuditSettings
from penstock.core.clock import Micros

Json = Mapping[str, Any]
LONGEST_STEP = 5.0
"""Two looks that lie further apart saw no more than so many seconds."""


class Elapsed:
    """Seconds in which somebody looked: a clock that jumps and a machine that sleeps do not count."""

    def __init__(self) -> None:
        self._now: Micros | None = None
        self._seconds = 0.0

    def at(self, now: Micros) -> float:
        if self._now is not None:
            self._seconds += min(max(now - self._now, 0) / 1e6, LONGEST_STEP)
        self._now = now
        return self._seconds


@dataclass(frozen=True)
class Sight:
    now: Micros
    elapsed: float
    """See `Elapsed`."""
    settings: AuditSettings
    balance: Json
    processes: Json

    @property
    def hops(self) -> Iterator[Json]:
        return mappings(self.balance.get("hops"))

    @property
    def channels(self) -> dict[str, Json]:
        return {str(one["channel"]): one for one in mappings(self.balance.get("channels"))}

    @property
    def nodes(self) -> dict[str, Json]:
        """The figures of each part of the pipeline, from the words of all processes."""
        found: dict[str, Json] = {}
        for said in self.processes.values():
            nodes = said.get("nodes") if isinstance(said, Mapping) else None
            if isinstance(nodes, Mapping):
                found |= {str(node): figures for node, figures in nodes.items() if isinstance(figures, Mapping)}
        return found

    def feeder(self, channel: str) -> str:
        """The source that fills a channel; the channel itself when there are several, or none is known."""
        sources = [str(hop["stage"]) for hop in self.hops if not hop.get("reads") and hop.get("writes") == channel]
        return sources[0] if len(sources) == 1 else f"channel:{channel}"

    def newest(self, channel: str) -> Micros:
        """When the channel received something last, as far as the balance tells; 0 when it does not."""
        times = [number(one.get("newest")) or 0 for one in senders(self.channels[channel])]
        minutes = self.balance.get("minutes", {}).get(channel) or [(0, 0)]
        return int(max([*times, *(minute * 60_000_000 for minute, _ in minutes)]))


def senders(channel: Json) -> Iterator[Json]:
    """The lives of the senders of a channel: all that are told."""
    return mappings(channel.get("by_sender") or channel.get("worst"))


def number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def mappings(value: object) -> Iterator[Json]:
    return (one for one in value if isinstance(one, Mapping)) if isinstance(value, list | tuple) else iter(())
