"""Why the verdict cannot be known at a moment: what the balance and the status of all processes leave open. No I/O."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.audit.alarm import lasting, named
from penstock.audit.judge import Doubt
from penstock.audit.rules.stages import Away
from penstock.audit.sight import Sight, number
from penstock.audit.trail import Standstill

LOOP_DEATHS = 2
"""A process that ended so often within a minute is in a restart loop."""
_NOT_RUNNING = ("starting", "restarting", "isolating", "stopped")
ERROR = 500
"""An error is told up to this length: it has a file and a way out."""


class Doubts:
    """What is not known, from looks every few seconds.

    `intervals` are the seconds in which a stage shows progress once at most, such as the trigger interval of a query;
    `batch` those that a batch in real time lasts.
    """

    def __init__(self, intervals: Mapping[str, float] = MappingProxyType({}), batch: float = 0.0) -> None:
        self._intervals, self._batch = intervals, batch
        self._stages: dict[tuple[str, str], Standstill] = {}
        self._audit = Standstill()
        self._away = Away()

    def look(self, sight: Sight) -> list[Doubt]:
        """`sight` holds the balance and the status of all processes at this moment."""
        found = [*self._processes(sight), *_nodes(sight), *self._unread(sight), *self._stale(sight)]
        if sight.elapsed < sight.settings.away_after.total_seconds():
            # Before that it cannot know whether a process is away.
            found.append(Doubt("audit", "audit", f"the auditor has watched for {sight.elapsed:.0f} s only"))
        return found

    def _processes(self, sight: Sight) -> Iterator[Doubt]:
        for alarm in self._away.look(sight):
            yield Doubt("process", alarm.stage, alarm.text)
        run = sight.processes.get("run")
        usage = run.get("usage") if isinstance(run, Mapping) else None
        for process, used in usage.items() if isinstance(usage, Mapping) else ():
            if not isinstance(used, Mapping):
                continue
            why = f": {named(used['error'], ERROR)}" if used.get("error") else ""
            if (times := int(number(used.get("lately")) or 0)) >= LOOP_DEATHS:
                yield Doubt("process", process, f"the process {process} ended {times} times in a row{why}")
            elif used.get("pid") is None and used.get("deaths"):
                yield Doubt("process", process, f"the process {process} is down{why}")
            elif _has_not_reported(sight.processes.get(process), used):
                yield Doubt("process", process, f"the process {process} was started again, and has not reported yet")

    def _unread(self, sight: Sight) -> Iterator[Doubt]:
        unread = sum(number(one.get("unread")) or 0 for one in sight.channels.values())
        quiet = self._audit.look(sight.elapsed, (sight.balance.get("as_of"),), unread > 0)
        if quiet >= sight.settings.stale_after.total_seconds():
            text = f"the auditor has read nothing for {lasting(quiet)}, while {unread:,.0f} entries wait"
            yield Doubt("audit", "audit", text)

    def _stale(self, sight: Sight) -> Iterator[Doubt]:
        """Stages that have input, and whose account says nothing new."""
        nodes = sight.nodes
        for hop in sight.hops:
            stage, reads = str(hop["stage"]), str(hop.get("reads") or "")
            if not reads:
                continue
            watch = self._stages.setdefault((stage, reads), Standstill())
            waiting = number(hop.get("in_flight")) or 0
            quiet = watch.look(sight.elapsed, (hop.get("taken"),), waiting > 0)
            limit = max(sight.settings.stale_after.total_seconds(), 2 * self._intervals.get(stage, 0.0))
            if nodes.get(stage, {}).get("mode") == "real-time":
                # Its rows are counted at once; what it has refused or filtered, when its batch ends.
                limit += self._batch
            if quiet >= limit:
                text = f"the account of {stage} is {lasting(quiet)} old, while {waiting:,.0f} records of {reads} wait"
                yield Doubt("account", stage, text)


def _has_not_reported(said: object, used: Mapping[str, Any]) -> bool:
    """Whether the last report of a process is that of its predecessor, which died."""
    reported = said.get("pid") if isinstance(said, Mapping) else None
    return bool(used.get("deaths")) and None not in (reported, used.get("pid")) and reported != used.get("pid")


def _nodes(sight: Sight) -> Iterator[Doubt]:
    """What parts of the pipeline say of themselves."""
    for node, figures in sight.nodes.items():
        why = f": {named(figures['error'], ERROR)}" if figures.get("error") else ""
        if spooled := int(number(figures.get("spooled")) or 0):
            yield Doubt("spool", node, f"{spooled:,} records of {node} wait on disk for their channel")
        if (state := figures.get("state")) in _NOT_RUNNING and node.startswith("query:"):
            yield Doubt("query", node, f"{node} is {state}{why}")
        if state == "waiting" and node.startswith("store:"):
            yield Doubt("store", node, f"{node} is not filled: {named(figures.get('why'), ERROR)}")
        if (accounting := figures.get("accounting")) not in (None, "current"):
            yield Doubt("account", node, f"the account of {node} is not complete: {named(accounting, ERROR)}")
