"""The active alarms, and the reasons why the verdict is not known. No I/O."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType

from penstock.audit import rules
from penstock.audit.judge import Doubt
from penstock.audit.rules import Alarm, Json, Memory, Snapshot, lasting, named, number

ENDS_AFTER = 10.0
"""Seconds without the condition after which an alarm ends: a flapping condition is one alarm."""

Rule = Callable[[Snapshot, Memory], Iterator[Alarm]]
"""Returns the alarms of a snapshot."""


class Alarms:
    """The alarms of a pipeline, evaluated about once a second.

    `batch` is the longest batch duration of its queries: a stage cannot show progress more often.
    """

    def __init__(self, batch: timedelta = timedelta(0)) -> None:
        self._rules: Sequence[Rule] = (
            rules.missing,
            rules.discrepancies,
            rules.not_known,
            rules.overtaken,
            partial(rules.stalled, batch=batch),
            rules.away,
            rules.full_disk,
            rules.unheard,
            rules.unknown,
            rules.refused,
            rules.silent,
            rules.event_time,
        )
        self._memory = Memory()
        self._standing: dict[tuple[str, str], Alarm] = {}
        self._seen: dict[tuple[str, str], float] = {}

    def look(self, snapshot: Snapshot) -> list[Alarm]:
        """Return the active alarms, in the order in which they began."""
        elapsed = snapshot.elapsed
        for alarm in _united(alarm for rule in self._rules for alarm in rule(snapshot, self._memory)):
            before = self._standing.get(alarm.key)
            self._standing[alarm.key] = replace(alarm, since=before.since) if before else alarm
            self._seen[alarm.key] = elapsed
        for key in [key for key, seen in self._seen.items() if elapsed - seen >= ENDS_AFTER]:
            del self._standing[key], self._seen[key]
        return sorted(self._standing.values(), key=lambda alarm: alarm.since)


def _united(alarms: Iterable[Alarm]) -> Iterable[Alarm]:
    """Merge alarms of the same name and stage: a stage that reads two channels can have a problem with both."""
    found: dict[tuple[str, str], Alarm] = {}
    for alarm in alarms:
        before = found.get(alarm.key)
        found[alarm.key] = replace(before, text=f"{before.text} {alarm.text}") if before else alarm
    return found.values()


LOOP_DEATHS = 2
"""A process that ended this many times within a minute is in a restart loop."""
_NOT_RUNNING = ("starting", "restarting", "isolating", "stopped")
ERROR = 500
"""Maximum length of an error text: it names a file and a fix."""


class Doubts:
    """Evaluates every few seconds what is not known.

    `intervals` holds the seconds after which a stage shows progress at the earliest, such as the trigger interval of a
    query; `batch` the seconds of a batch in real time.
    """

    def __init__(self, intervals: Mapping[str, float] = MappingProxyType({}), batch: float = 0.0) -> None:
        self._intervals, self._batch = intervals, batch
        self._memory = Memory()

    def look(self, snapshot: Snapshot) -> list[Doubt]:
        """Return the doubts; `snapshot` holds the balance and the status of all processes."""
        found = [*self._processes(snapshot), *_nodes(snapshot), *self._stale(snapshot)]
        if snapshot.elapsed < snapshot.settings.away_after.total_seconds():
            # Before that, the auditor cannot decide whether a process is away.
            found.append(Doubt("audit", "audit", f"the auditor has run for only {snapshot.elapsed:.0f} s"))
        return found

    def _processes(self, snapshot: Snapshot) -> Iterator[Doubt]:
        for alarm in rules.away(snapshot, self._memory):
            yield Doubt("process", alarm.stage, alarm.text)
        for process, used in snapshot.usage.items():
            why = f": {named(used['error'], ERROR)}" if used.get("error") else ""
            if (times := int(number(used.get("lately")) or 0)) >= LOOP_DEATHS:
                yield Doubt("process", process, f"the process {process} ended {times} times in a row{why}")
            elif used.get("pid") is None and used.get("deaths"):
                yield Doubt("process", process, f"the process {process} is down{why}")
            elif _has_not_reported(snapshot.reports.get(process, {}), used):
                yield Doubt("process", process, f"the process {process} was restarted and has not reported yet")

    def _stale(self, snapshot: Snapshot) -> Iterator[Doubt]:
        """Find an audit that reads nothing, and stages whose account does not change, although they have input."""
        stale_after = snapshot.settings.stale_after.total_seconds()
        if (quiet := rules.unread_for(snapshot, self._memory)) >= stale_after:
            text = f"the auditor has read nothing for {lasting(quiet)}, while {snapshot.unread:,} entries wait"
            yield Doubt("audit", "audit", text)
        for one in rules.waiting_stages(snapshot, self._memory):
            limit = max(stale_after, 2 * self._intervals.get(one.stage, 0.0))
            if snapshot.nodes.get(one.stage, {}).get("mode") == "real-time":
                # Its rows are counted at once, refused and filtered records only when its batch ends.
                limit += self._batch
            if one.seconds >= limit:
                text = (
                    f"the account of {one.stage} is {lasting(one.seconds)} old, while {one.records:,} records of "
                    f"{one.reads} wait"
                )
                yield Doubt("account", one.stage, text)


def _has_not_reported(report: Json, used: Json) -> bool:
    """Whether the last report of a process is from the instance before it, which died."""
    reported, running = report.get("pid"), used.get("pid")
    return bool(used.get("deaths")) and None not in (reported, running) and reported != running


def _nodes(snapshot: Snapshot) -> Iterator[Doubt]:
    """Find doubts in the status reports of sources, queries and stores."""
    for node, figures in snapshot.nodes.items():
        why = f": {named(figures['error'], ERROR)}" if figures.get("error") else ""
        if spooled := int(number(figures.get("spooled")) or 0):
            yield Doubt("spool", node, f"{spooled:,} records of {node} wait on disk for their channel")
        if (state := figures.get("state")) in _NOT_RUNNING and node.startswith("query:"):
            yield Doubt("query", node, f"{node} is {state}{why}")
        if state == "waiting" and node.startswith("store:"):
            yield Doubt("store", node, f"{node} is not filled: {named(figures.get('why'), ERROR)}")
        if (accounting := figures.get("accounting")) not in (None, "current"):
            yield Doubt("account", node, f"the account of {node} is not complete: {named(accounting, ERROR)}")
