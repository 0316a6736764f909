"""Rules about stages and processes: stalled, unheard, slow, away, slower than the retention of a channel."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from penstock.audit.rules.base import Alarm, Json, Level, Snapshot, Standstill, lasting, mappings, named, number
from penstock.core.clock import Micros

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOISE = 0.05
"""Two quantiles that differ by less than this share are the same."""


class Stalled:
    """A stage has input and makes no progress.

    Progress is a new account of the stage. A higher count of its process than any since the last account is progress,
    too: a process in a restart loop counts, but never reaches a higher count.
    """

    def __init__(self, batch: timedelta, reads: Mapping[str, Sequence[str]]) -> None:
        self._batch, self._reads = batch, reads
        self._stages: dict[tuple[str, str], Standstill] = {}
        self._highest: dict[tuple[str, str], tuple[float | None, float]] = {}
        self._audit = Standstill()

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        # A query sends its account when its batch ends.
        limit = max(snapshot.settings.stalled_after, 2 * self._batch).total_seconds()
        channels, nodes = snapshot.channels, snapshot.nodes
        unread = sum(number(one.get("unread")) or 0 for one in channels.values())
        behind = self._audit.look(snapshot.elapsed, (snapshot.balance.get("as_of"),), unread > 0)
        stuck = []
        for stage, hop in self._hops(snapshot, nodes):
            reads = str(hop.get("reads") or "")
            node = nodes.get(stage, {})
            arrived = number(channels.get(reads, {}).get("records"))
            waiting = _waiting(hop, node, arrived)
            watch = self._stages.setdefault((stage, reads), Standstill())
            quiet = watch.look(snapshot.elapsed, self._progress(stage, hop, node), waiting > 0, arrived)
            if quiet >= limit:
                what = f"{waiting:,.0f} records wait" if waiting else "more records came"
                where = f" in {reads}" if reads else ""
                text = f'{stage} made no progress for {lasting(quiet)}, while {what}{where}: see "penstock status".'
                stuck.append(Alarm("stalled", stage, text, snapshot.now - round(quiet * 1e6)))
        if behind >= limit:
            # Then the progress of the stages is not known.
            entries = f"{unread:,.0f} entries"
            text = f'the audit read nothing for {lasting(behind)}, while {entries} wait: see "penstock status".'
            yield Alarm("stalled", "audit", text, snapshot.now - round(behind * 1e6))
        else:
            yield from stuck

    def _hops(self, snapshot: Snapshot, nodes: Mapping[str, Json]) -> list[tuple[str, Json]]:
        """Return the stages with an account, those that should have one, and other nodes with a lag."""
        found: list[tuple[str, Json]] = [(str(hop["stage"]), hop) for hop in snapshot.hops]
        stages = {stage for stage, _ in found}
        for stage, channels in self._reads.items():
            if stage not in stages:
                found += [(stage, {"reads": channel}) for channel in channels]
        stages |= self._reads.keys()
        return found + [(node, {}) for node in nodes if node not in stages and not node.startswith("channel:")]

    def _progress(self, stage: str, hop: Json, node: Json) -> tuple[float | None, float]:
        key = stage, str(hop.get("reads") or "")
        accounted = number(hop.get("taken"))
        count = number(node.get("count")) or 0.0
        before, highest = self._highest.get(key, (accounted, count))
        self._highest[key] = accounted, max(count, highest) if accounted == before else count
        return self._highest[key]


def _waiting(hop: Json, node: Json, arrived: float | None) -> float:
    """Return how many records the stage has not read."""
    count, lag = number(hop.get("taken")), number(node.get("lag")) or 0
    if count is None:
        # It has no account. If its node has no count either, the whole channel waits.
        return max(lag, 0 if node.get("count") else arrived or 0)
    if arrived is not None and count >= arrived:
        # The other two figures compare offsets: transaction markers use offsets, too.
        return 0
    return max(lag, number(hop.get("in_flight")) or 0)


class Unheard:
    """A source has no connection: records wait at the sender, or are lost."""

    def __init__(self) -> None:
        self._sources: dict[str, Standstill] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for node, figures in snapshot.nodes.items():
            if not isinstance(connected := figures.get("connected"), bool):
                continue
            watch = self._sources.setdefault(node, Standstill())
            quiet = watch.look(snapshot.elapsed, (connected,), not connected)
            if quiet >= snapshot.settings.silent_after.total_seconds():
                why = f" ({named(figures['trouble'])})" if figures.get("trouble") else ""
                text = f'{node} has had no connection for {lasting(quiet)}{why}: see "penstock status".'
                yield Alarm("unheard", node, text, snapshot.now - round(quiet * 1e6))


class Full:
    """A process reports that its disk is full: it accepts and acknowledges nothing."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        full: dict[str, tuple[float, float]] = {}
        for report in snapshot.processes.values():
            disk = report.get("disk") if isinstance(report, Mapping) else None
            if isinstance(disk, Mapping):
                free, reserve = number(disk.get("free")), number(disk.get("reserve"))
                if free is not None and reserve is not None and free < reserve:
                    full[named(disk.get("folder"))] = free, reserve
        for folder, (free, reserve) in full.items():
            sizes = f"{free / 2**20:,.0f} MiB are free, less than the {reserve / 2**20:,.0f} MiB of [local] reserve"
            text = f"the disk of {folder} is full: {sizes}; sources wait, and continue when there is space."
            yield Alarm("disk", folder, text, snapshot.now)


class EventTime:
    """The newest event time of a query is far from the time at which it was read."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        limit = snapshot.settings.event_time_off / timedelta(microseconds=1)
        for stage, figures in snapshot.nodes.items():
            newest, skew = number(figures.get("newest")), number(figures.get("skew"))
            if newest is None or skew is None or abs(skew * 1_000) <= limit:
                continue
            at = newest + skew * 1_000
            text = f"the newest event time of {stage} is of {_day(newest)}, and was read on {_day(at)}"
            for factor, unit in ((1_000, "milliseconds"), (1_000_000, "microseconds")):
                if abs(newest * factor - at) <= limit:
                    why = f"seconds read as {unit}? See event_time= of the channel: timestamp_seconds(…)."
                    yield Alarm("event-time", stage, f"{text}: {why}", snapshot.now)
                    break
            else:
                why = "history, or another unit than event_time= of the channel expects?"
                yield Alarm("event-time", stage, f"{text}: {why}", snapshot.now, Level.NOTICE)


def _day(timestamp: float) -> str:
    return f"{EPOCH + timedelta(microseconds=timestamp):%Y-%m-%d}"


class SlowStage:
    """The p99 latency of a stage is too high."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        nodes = snapshot.nodes
        least = snapshot.settings.slow_stage.total_seconds() * 1_000
        history = snapshot.settings.gone_after.total_seconds() * 1_000
        for hop in snapshot.hops:
            stage = str(hop["stage"])
            took = _took(hop, nodes)
            # Records that arrive days after they were sent are history; the source is not slow.
            if took is not None and took > least and (hop.get("reads") or took < history):
                text = (
                    f'{stage} takes {lasting(took / 1_000)} for one record in a hundred (p99): see "penstock status".'
                )
                yield Alarm("slow-stage", stage, text, snapshot.now)


def _took(hop: Json, nodes: Mapping[str, Json]) -> float | None:
    """Return the p99 of the stage alone, in ms: of the last minutes if its node reports it, otherwise of the hop."""
    figures = nodes.get(str(hop["stage"]), {})
    after = _p99(figures.get("delivery")) or _p99(figures.get("latency")) or _p99(_channel(nodes, hop.get("writes")))
    if not hop.get("reads"):
        return after or _p99(hop.get("latency"))
    before = _p99(_channel(nodes, hop["reads"]))
    if after is None or before is None:
        return _p99(hop.get("step"))
    return after - before if after - before > NOISE * before else 0.0


def _channel(nodes: Mapping[str, Json], channel: object) -> object:
    return nodes.get(f"channel:{channel}", {}).get("latency")


def _p99(summary: object) -> float | None:
    return number(summary.get("p99")) if isinstance(summary, Mapping) else None


class Away:
    """A process sends no reports any more."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Micros, float]] = {}
        """Per process: the time of its last report by its own clock, and when it was first seen by this clock."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        gone = snapshot.settings.gone_after / timedelta(microseconds=1)
        for process in _ours(snapshot.processes):
            at = int(number(snapshot.processes[process].get("at")) or 0)
            if process not in self._heard or self._heard[process][0] != at:
                self._heard[process] = at, snapshot.elapsed
            quiet = snapshot.elapsed - self._heard[process][1]
            if quiet > snapshot.settings.away_after.total_seconds() and snapshot.now - at < gone:
                name = named(process)
                text = (
                    f'the process {name} has reported nothing for {lasting(quiet)}: see "penstock status" and its log.'
                )
                yield Alarm("away", name, text, snapshot.now - round(quiet * 1e6))


def _ours(processes: Json) -> list[str]:
    """Return the processes of this run: the supervisor lists them. Without a supervisor, all that ever reported."""
    names = [name for name, report in processes.items() if isinstance(report, Mapping)]
    usage = processes["run"].get("usage") if "run" in names else None
    return [name for name in names if name == "run" or name in usage] if isinstance(usage, Mapping) and usage else names


RETENTION = "retention"
"""The key in the status of the audit, see `audit.lag`."""


class Overtaken:
    """Retention has removed records that a reader had not read, or is about to."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for report in snapshot.processes.values():
            for one in mappings(report.get(RETENTION)) if hasattr(report, "get") else ():
                reader, channel = named(one.get("reader")), named(one.get("channel"))
                if lost := number(one.get("lost")):
                    text = (
                        f"{reader} had not read {lost:,.0f} offsets of {channel} when they were removed: their "
                        f"retention was too short. {_fix(reader)}"
                    )
                    yield Alarm("overtaken", reader, text, snapshot.now)
                if unread := number(one.get("unread")):
                    left = number(one.get("left"))
                    when = "soon" if left is None else f"in {lasting(left)}"
                    text = (
                        f"{reader} has not read {unread:,.0f} old records of {channel}, and the first of them will be "
                        f"removed {when}: let it catch up, or keep them for longer (retention=)."
                    )
                    yield Alarm("expiring", reader, text, snapshot.now)


def _fix(reader: str) -> str:
    if reader.startswith("group:"):
        group = reader.removeprefix("group:")
        return f"To start at the beginning of the channel: penstock groups --reset --group {group} --to beginning."
    return 'It continues after them if [channels] lost = "skip".'
