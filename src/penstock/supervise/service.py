"""A service: how a child process is started, and how one sees that it is ready."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


def running() -> bool:
    """The probe of a service that is ready as soon as it runs."""
    return True


@dataclass(frozen=True, slots=True)
class Service:
    """A description of a child process; nothing happens before a supervisor starts it.

    `ready` asks the service itself; it answers within a second or so, and never raises. `env` comes over the
    environment of the supervisor. `needs` names the services that have to be ready before this one starts, and that
    are stopped after it; those that it `uses` are only stopped after it. With
    `restart="on-failure"` an exit with code 0 is an end, not a death.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], bool] = running
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    patience: float = 60.0
    restart: Literal["always", "on-failure"] = "always"
    stop_signal: signal.Signals = signal.SIGTERM
    stdin: bool = False
    """It reads what is piped into us. A terminal is never passed on: it belongs to whoever sits there."""
