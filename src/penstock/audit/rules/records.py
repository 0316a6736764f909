"""Rules about records: missing, unknown, refused, out of order."""

from collections.abc import Iterator

from penstock.audit.rules.base import Alarm, Growth, Json, Level, Snapshot, Standstill, mappings, named, number, senders

RANGES = 5
"""Maximum missing ranges that are named."""
FEW = 3
"""Fewer refused records are not an alarm."""
SETTLES = 10.0
"""Seconds after which a verdict that is not known is an alarm: at each start it is not known for a while."""
REPORTED_FOR = 60.0
"""Seconds for which an outage interval is reported after its end."""


class Missing:
    """Records are missing at a hop."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for hop in snapshot.hops:
            if missing := int(number(hop.get("missing")) or 0):
                records = f"{missing:,} record{'s' if missing > 1 else ''}"
                of = f" of {hop['reads']}" if hop.get("reads") else ""
                text = f'{hop["stage"]} misses {records}{of}{_ranges(hop, missing)}: see "penstock audit".'
                yield Alarm("missing", str(hop["stage"]), text, snapshot.now)


def _ranges(hop: Json, missing: int) -> str:
    gaps = list(mappings(hop.get("gaps")))[:RANGES]
    if not gaps:
        return ""
    ranges = [f"{named(gap['sender'])}/{gap['epoch']}: {gap['first']}–{gap['last']}" for gap in gaps]
    if rest := missing - sum(gap["last"] - gap["first"] + 1 for gap in gaps):
        ranges.append(f"and {rest:,} more")
    return f" ({', '.join(ranges)})"


class Discrepancies:
    """The audit has a finding: a changed row of a store, records that were removed from the log, …"""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for one in mappings(snapshot.balance.get("discrepancies")):
            yield Alarm(str(one.get("kind")), str(one.get("stage")), f"{named(one.get('text'))}.", snapshot.now)


class NotKnown:
    """The verdict remains not known."""

    def __init__(self) -> None:
        self._watch = Standstill()

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        doubts = [named(one.get("text")) for one in mappings(snapshot.balance.get("doubts"))]
        quiet = self._watch.look(snapshot.elapsed, (), bool(doubts))
        if doubts and quiet >= SETTLES:
            more = f"; and {len(doubts) - RANGES} more reasons" if len(doubts) > RANGES else ""
            text = (
                f'whether records are missing is not known: {"; ".join(doubts[:RANGES])}{more}: see "penstock audit".'
            )
            yield Alarm("not-known", "audit", text, snapshot.now - round(quiet * 1e6))


class Unknown:
    """The outage time of a source grew."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._grown: dict[str, tuple[float, float]] = {}
        """Per channel: when it grew last, and from what."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for channel, one in snapshot.channels.items():
            seconds = number(one.get("unknown_seconds")) or 0.0
            before = self._before.get(channel, seconds)
            self._before[channel] = seconds
            if seconds > before:
                self._grown[channel] = snapshot.elapsed, self._grown.get(channel, (0.0, before))[1]
            if channel not in self._grown:
                continue
            at, start = self._grown[channel]
            if snapshot.elapsed - at > REPORTED_FOR:
                del self._grown[channel]
                continue
            stage = snapshot.feeder(channel)
            length = f"{seconds - start:.1f} s"
            text = f'{stage} was not connected for {length}: what it sent then is unknown, see "penstock audit".'
            yield Alarm("unknown", stage, text, snapshot.now)


class Refused:
    """A stage refused more than a share of its last records."""

    def __init__(self) -> None:
        self._growth: dict[tuple[str, str], Growth] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for hop in snapshot.hops:
            stage = str(hop["stage"])
            growth = self._growth.setdefault((stage, str(hop.get("reads"))), Growth())
            outcomes = hop.get("outcomes") or {}
            totals = number(hop.get("taken")) or 0, number(outcomes.get("refused")) or 0
            count, refused = growth.reach(snapshot.elapsed, *totals)
            if refused >= FEW and refused > count * snapshot.settings.refused_share:
                share = (
                    f"{refused:,.0f} of its last {count:,.0f} records ({refused / count:.0%})" if count else "records"
                )
                yield Alarm("refused", stage, f'{stage} refused {share}: see "penstock dlq list".', snapshot.now)


class Disorder:
    """Records of a sender arrived in another order than their numbers: a notice, not a loss."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for channel, one in snapshot.channels.items():
            found = sum(int(number(generation.get("reordered")) or 0) for generation in senders(one))
            # The senders of the brief form are not always the same.
            most = self._most[channel] = max(found, self._most.get(channel, 0))
            if most:
                stage = snapshot.feeder(channel)
                text = f'{most:,} records came to {channel} out of order, none is lost: see "penstock audit --senders".'
                yield Alarm("disorder", stage, text, snapshot.now, Level.NOTICE)
