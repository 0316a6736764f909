"""Which alarms stand: every rule is asked at each look, and what it says is kept steady. No I/O."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol

from penstock.audit.alarm import Alarm
from penstock.audit.rules.records import Discrepancies, Disorder, Missing, NotKnown, Refused, Unknown
from penstock.audit.rules.retention import Overtaken
from penstock.audit.rules.senders import Silent, SlowSender
from penstock.audit.rules.stages import Away, EventTime, Full, SlowStage, Stalled, Unheard
from penstock.audit.settings import AuditSettings
from penstock.audit.sight import Elapsed, Sight
from penstock.core.clock import Micros

ENDS_AFTER = 10.0
"""An alarm ends when it was absent for so many seconds: one that comes and goes is one alarm."""


class Rule(Protocol):
    def look(self, sight: Sight) -> Iterator[Alarm]:
        """The alarms of this moment."""


class Alarms:
    """The alarms of a pipeline, from looks about once a second.

    `batch` is how long the longest batch of its queries lasts: a stage cannot show progress more often. `reads` are the
    channels that each stage reads: one that never accounts for anything is then found, too.
    """

    def __init__(
        self,
        settings: AuditSettings,
        batch: timedelta = timedelta(0),
        reads: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._settings = settings
        self._rules: Sequence[Rule] = (
            Missing(),
            Discrepancies(),
            NotKnown(),
            Overtaken(),
            Stalled(batch, reads),
            Away(),
            Full(),
            Unheard(),
            Unknown(),
            Refused(),
            Silent(),
            EventTime(),
            SlowStage(),
            SlowSender(),
            Disorder(),
        )
        self._elapsed = Elapsed()
        self._standing: dict[tuple[str, str], Alarm] = {}
        self._seen: dict[tuple[str, str], float] = {}

    def look(self, now: Micros, balance: Mapping[str, Any], processes: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that stand, alarms before notices, in the order in which they began.

        `balance` is that of `Balance.to_json()`; with all senders if silent and slow ones are to be found among all.
        `processes` are the last words of all processes.
        """
        elapsed = self._elapsed.at(now)
        sight = Sight(now, elapsed, self._settings, balance, processes)
        for alarm in _united(alarm for rule in self._rules for alarm in rule.look(sight)):
            before = self._standing.get(alarm.key)
            self._standing[alarm.key] = replace(alarm, since=before.since) if before else alarm
            self._seen[alarm.key] = elapsed
        for key in [key for key, seen in self._seen.items() if elapsed - seen >= ENDS_AFTER]:
            del self._standing[key], self._seen[key]
        return sorted(self._standing.values(), key=lambda alarm: (alarm.level, alarm.since))


def _united(alarms: Iterable[Alarm]) -> Iterable[Alarm]:
    """One alarm for each name and stage: a stage that reads two channels may have trouble with both."""
    found: dict[tuple[str, str], Alarm] = {}
    for alarm in alarms:
        before = found.get(alarm.key)
        found[alarm.key] = replace(before, text=f"{before.text} {alarm.text}") if before else alarm
    return found.values()
