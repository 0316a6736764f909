"""What a supervisor tells of its services while they come and go."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    STARTED = "started"
    READY = "ready"
    DIED = "died"
    FINISHED = "finished"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    KILLED = "killed"


_LONGEST = 500
_OURS = "penstock: "
"""How our own processes begin the sentence in which they say why they end."""
_DAMAGE = re.compile(r"corrupt|redis-check-aof|bad file format|invalid record|checksum", re.IGNORECASE)
"""What Kafka and Redis say of files that are damaged."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one service, with the facts that belong to it."""

    service: str
    kind: Kind
    pid: int | None = None
    code: int | None = None
    """The exit code of one that died; negative: the signal that ended it."""
    delay: float | None = None
    """Seconds: until it starts again, or that it took to become ready."""
    lines: tuple[str, ...] = ()
    """The last lines that it logged before it died."""

    def __str__(self) -> str:
        match self.kind:
            case Kind.STARTED:
                told = f"started as process {self.pid}"
            case Kind.READY:
                told = f"is ready after {self.delay or 0:.1f} s"
            case Kind.DIED:
                told = f"died: {reason(self.code)}"
            case Kind.FINISHED:
                told = "finished"
            case Kind.RESTARTING:
                told = f"starts again in {self.delay or 0:g} s"
            case Kind.STOPPED:
                told = "stopped"
            case Kind.KILLED:
                told = "did not stop in time and was killed"
        return f"{self.service} {told}"


def reason(code: int | None) -> str:
    """Why a process ended, in words."""
    if code is None:
        return "it did not become ready"
    if code >= 0:
        return f"it ended with code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def last_line(lines: Sequence[str]) -> str:
    """The line of a log that says why its process ended: our own error if there is one, otherwise the last line."""
    said = [line.strip() for line in lines if line.strip()]
    ours = [line.removeprefix(_OURS) for line in said if line.startswith(_OURS)]
    return (ours or said or [""])[-1][:_LONGEST]


def repair_of(lines: Sequence[str]) -> str:
    """What to do about files that are damaged, if the log says that they are."""
    damaged = any(_DAMAGE.search(line) for line in lines)
    return "; its files are damaged: stop the pipeline and run penstock repair" if damaged else ""
