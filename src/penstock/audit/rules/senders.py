"""Rules about senders: silent, slow."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from penstock.audit.rules.base import Alarm, Growth, Json, Snapshot, lasting, listed, named, number, senders
from penstock.core.clock import Micros

NAMED = 20
"""Maximum senders that are named."""
USED_TO_SEND = 10
"""A sender of fewer records is not expected to send."""
PAUSES = 5
"""A rare sender may be silent for this many of its usual intervals."""
CONFIRMED = 10.0
"""Partitions are read one after the other: for this many seconds a sender can seem silent and is only unread."""
FEW = 3
"""Fewer slow records are not an alarm."""
TIMES = 10
ROUNDED = 0.001
"""Mean latencies are in whole microseconds: the error in ms for each record that was ever counted."""

SenderKey = tuple[str, str]
"""Channel and sender."""


@dataclass(slots=True)
class _Sender:
    """All epochs of a sender together."""

    records: int = 0
    newest: Micros = 0
    count: float = 0
    total: float = 0
    """Of its latencies, in ms."""


def _senders_by_channel(snapshot: Snapshot) -> Iterator[tuple[str, Json, dict[str, _Sender]]]:
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
    at an earlier time. The balance does not contain whether a sender reports that it has nothing to send.
    """

    def __init__(self) -> None:
        self._received: dict[str, tuple[Micros, float]] = {}
        """Per channel: its newest record, and when that was seen first."""
        self._first: dict[SenderKey, tuple[Micros, int]] = {}
        """The newest record of a sender and their number, when they were seen first."""
        self._quiet: dict[SenderKey, float] = {}
        """Since when it seems silent."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        first, quiet = self._first, self._quiet
        self._first, self._quiet = {}, {}
        for channel, _, found in _senders_by_channel(snapshot):
            newest = snapshot.newest(channel)
            for name, sender in found.items():
                key = channel, name
                self._first[key] = first.get(key, (sender.newest, sender.records))
                if self._is_quiet(key, sender, newest, snapshot):
                    self._quiet[key] = quiet.get(key, snapshot.elapsed)
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

    def _is_quiet(self, key: SenderKey, sender: _Sender, newest: Micros, snapshot: Snapshot) -> bool:
        if sender.records < USED_TO_SEND or not sender.newest:
            return False
        limit = snapshot.settings.silent_after / timedelta(microseconds=1)
        since, records = self._first[key]
        if sender.records > records:
            limit = max(limit, PAUSES * (sender.newest - since) / (sender.records - records))
        return limit < newest - sender.newest <= snapshot.settings.gone_after / timedelta(microseconds=1)


class SlowSender:
    """The last records of a sender had a much higher latency than those of other senders."""

    def __init__(self) -> None:
        self._growth: dict[SenderKey, Growth] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        before, self._growth = self._growth, {}
        least = snapshot.settings.slow / timedelta(milliseconds=1)
        nodes = snapshot.nodes
        for channel, one, found in _senders_by_channel(snapshot):
            # The latency of the node is of the last minutes, that of the balance of all time.
            latency = nodes.get(f"channel:{channel}", {}).get("latency") or one.get("latency") or {}
            median = number(latency.get("p50")) or 0.0
            slow = []
            for name, sender in found.items():
                growth = self._growth[channel, name] = before.get((channel, name)) or Growth()
                count, total = growth.reach(snapshot.elapsed, sender.count, sender.total)
                if count < FEW:
                    continue
                mean = (total - ROUNDED * sender.count) / count
                if mean > max(least, TIMES * median):
                    slow.append((mean, name))
            if slow:
                slow.sort(reverse=True)
                names = [f"{named(name)} ({lasting(mean / 1_000)})" for mean, name in slow]
                text = (
                    f"the records of {listed(names, NAMED)} arrive late in {channel}, where the median latency is "
                    f'{lasting(median / 1_000)}: see "penstock audit --senders".'
                )
                yield Alarm("slow-sender", snapshot.feeder(channel), text, snapshot.now)
