"""Rules about senders: silent, slow."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from penstock.audit.rules.base import Alarm, Json, Snapshot, Trail, lasting, listed, named, number, senders
from penstock.core.clock import Micros

NAMED = 20
"""So many senders are named."""
USED_TO_SEND = 10
"""A sender of fewer records has no habit that it could break."""
PAUSES = 5
"""Who sends rarely may be quiet for so many of its usual intervals."""
CONFIRMED = 10.0
"""Partitions are read one after the other: for so many seconds a sender may seem quiet and is only unread."""
FEW = 3
"""Fewer records are no habit of being slow."""
TIMES = 10
ROUNDED = 0.001
"""Mean latencies come in whole microseconds: so many ms may be wrong for each record that was ever counted."""

Who = tuple[str, str]
"""Channel and sender."""


@dataclass(slots=True)
class _Sender:
    """All lives of a sender together."""

    records: int = 0
    newest: Micros = 0
    count: float = 0
    total: float = 0
    """Of its latencies, in ms."""


def _told(snapshot: Snapshot) -> Iterator[tuple[str, Json, dict[str, _Sender]]]:
    for channel, one in snapshot.channels.items():
        found: dict[str, _Sender] = {}
        for generation in senders(one):
            sender = found.setdefault(str(generation["sender"]), _Sender())
            sender.records += int(number(generation.get("records")) or 0)
            sender.newest = max(sender.newest, int(number(generation.get("newest")) or 0))
            latency = generation.get("latency") or {}
            count = number(latency.get("count")) or 0
            sender.count += count
            sender.total += count * (number(latency.get("mean")) or 0)
        yield channel, one, found


class Silent:
    """A sender that used to send does not, while its channel still receives.

    It is compared with the newest record of the channel, not with the clock: an audit that is behind sees all senders
    at an earlier time. Whether a sender says that it has nothing to send cannot be told from the balance.
    """

    def __init__(self) -> None:
        self._received: dict[str, tuple[Micros, float]] = {}
        """Per channel: its newest record, and when that was seen first."""
        self._first: dict[Who, tuple[Micros, int]] = {}
        """The newest record of a sender and their number, when they were seen first."""
        self._quiet: dict[Who, float] = {}
        """Since when it seems quiet."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        first, quiet = self._first, self._quiet
        self._first, self._quiet = {}, {}
        for channel, _, found in _told(snapshot):
            newest = snapshot.newest(channel)
            for name, sender in found.items():
                who = channel, name
                self._first[who] = first.get(who, (sender.newest, sender.records))
                if self._is_quiet(who, sender, newest, snapshot):
                    self._quiet[who] = quiet.get(who, snapshot.elapsed)
            if not self._receives(channel, newest, snapshot):
                continue
            silent = sorted(
                (sender.newest, name)
                for name, sender in found.items()
                if snapshot.elapsed - self._quiet.get((channel, name), snapshot.elapsed) >= CONFIRMED
            )
            if silent:
                names = [f"{named(name)} for {lasting((newest - since) / 1e6)}" for since, name in silent]
                text = f'{channel} receives nothing from {listed(names, NAMED)}: see "penstock audit --senders".'
                yield Alarm("silent", snapshot.feeder(channel), text, silent[0][0])

    def _receives(self, channel: str, newest: Micros, snapshot: Snapshot) -> bool:
        if self._received.get(channel, (None, 0.0))[0] != newest:
            self._received[channel] = newest, snapshot.elapsed
        return snapshot.elapsed - self._received[channel][1] <= snapshot.settings.silent_after.total_seconds()

    def _is_quiet(self, who: Who, sender: _Sender, newest: Micros, snapshot: Snapshot) -> bool:
        if sender.records < USED_TO_SEND or not sender.newest:
            return False
        limit = snapshot.settings.silent_after / timedelta(microseconds=1)
        since, records = self._first[who]
        if sender.records > records:
            limit = max(limit, PAUSES * (sender.newest - since) / (sender.records - records))
        return limit < newest - sender.newest <= snapshot.settings.gone_after / timedelta(microseconds=1)


class SlowSender:
    """What a sender sent lately was much longer under way than what others sent."""

    def __init__(self) -> None:
        self._trails: dict[Who, Trail] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        trails, self._trails = self._trails, {}
        least = snapshot.settings.slow / timedelta(milliseconds=1)
        nodes = snapshot.nodes
        for channel, one, found in _told(snapshot):
            # The node tells the last minutes, the balance all times.
            latency = nodes.get(f"channel:{channel}", {}).get("latency") or one.get("latency") or {}
            median = number(latency.get("p50")) or 0.0
            slow = []
            for name, sender in found.items():
                trail = self._trails[channel, name] = trails.get((channel, name)) or Trail()
                count, total = trail.reach(snapshot.elapsed, sender.count, sender.total)
                if count < FEW:
                    continue
                mean = (total - ROUNDED * sender.count) / count
                if mean > max(least, TIMES * median):
                    slow.append((mean, name))
            if slow:
                slow.sort(reverse=True)
                names = [f"{named(name)} ({lasting(mean / 1_000)})" for mean, name in slow]
                text = (
                    f"the records of {listed(names, NAMED)} are long under way to {channel}, where the median is "
                    f'{lasting(median / 1_000)}: see "penstock audit --senders".'
                )
                yield Alarm("slow-sender", snapshot.feeder(channel), text, snapshot.now)
