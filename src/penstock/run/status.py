"""What all processes of a run said last, read from the status channel."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import psutil

from penstock.audit.judge import Verdict
from penstock.core.clock import Micros, SystemClock, is_running
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import PenstockError
from penstock.core.retry import retry
from penstock.core.scan import scan
from penstock.run.background import beside

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    processes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, channels: Channels, channel: str) -> "Status":
        """The last word of each process."""
        processes: dict[str, Mapping[str, Any]] = {}
        for entry in scan(channels, channel):
            _hear(processes, entry)
        return cls(processes)

    @property
    def nodes(self) -> dict[str, Mapping[str, Any]]:
        """The figures of each part of the pipeline."""
        return {name: figures for said in self.processes.values() for name, figures in said["nodes"].items()}

    @property
    def usage(self) -> Mapping[str, Mapping[str, Any]]:
        """Memory and restarts of each process, as the supervisor sees them."""
        told: Mapping[str, Mapping[str, Any]] = self.processes.get("run", {}).get("usage", {})
        return told

    @property
    def balance(self) -> Mapping[str, Any] | None:
        return self.processes.get("audit", {}).get("balance")

    @property
    def alarms(self) -> list[Mapping[str, Any]]:
        return list((self.balance or {}).get("alarms", ()))

    def verdict(self, now: Micros) -> Verdict:
        """That of the audit; not known when it, or another process of the run, has reported nothing lately."""
        found = Verdict((self.balance or {}).get("verdict", Verdict.NOT_KNOWN))
        # A process of an earlier run that is none of this one any more reported last long ago.
        ours = {"run", *self.usage} if self.usage else self.processes.keys()
        silent = any(not is_running(said["at"], now) for name, said in self.processes.items() if name in ours)
        return Verdict.NOT_KNOWN if found is Verdict.WHOLE and silent else found

    def to_json(self) -> dict[str, Any]:
        memory = sum(used["memory"] for used in self.usage.values())
        return {"nodes": self.nodes, "balance": self.balance, "usage": self.usage, "memory": memory}


@contextmanager
def listening(channels: Channels, channel: str) -> Iterator[Mapping[str, Mapping[str, Any]]]:
    """The last word of each process, kept up to date while the body runs."""
    processes: dict[str, Mapping[str, Any]] = {}

    def listen(stop: threading.Event) -> None:
        def hear(well: Callable[[], None]) -> None:
            with channels.reader({channel: {}}) as reader:
                while not stop.is_set():
                    for entry in reader.read(1_000, 0.5):
                        _hear(processes, entry)
                    well()

        retry(hear, stop, log=log)

    with beside("listening", listen):
        yield processes


def _hear(processes: dict[str, Mapping[str, Any]], entry: Entry) -> None:
    """Take a process's word; what is no word of a process says nothing."""
    try:
        said = orjson.loads(entry.value or b"")
        if isinstance(said, dict) and entry.key and "at" in said:
            processes[entry.key.decode()] = said
    except ValueError:
        log.warning("an entry of the status at %s/%s cannot be read", entry.partition, entry.offset)


Figures = Mapping[str, Any]
"""What a process tells: under `nodes`, per part of the pipeline (`source:rsvps`, `query:by_country`, …) its figures."""

EVERY = 1.0


class Posting(Protocol):
    """The part of a binder that figures need: `post(channel, key, value)`, without waiting."""

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]: ...


@contextmanager
def pulse(
    channels: Posting, channel: str, process: str, figures: Callable[[], Figures], every: float = EVERY
) -> Iterator[None]:
    """Tell the figures of this process while the body runs, at once and then every so many seconds."""
    clock, this = SystemClock(), psutil.Process()

    def said() -> dict[str, Any]:
        about = {"process": process, "at": clock.now(), "pid": os.getpid(), "memory": this.memory_info().rss}
        return {**about, "nodes": {}, **figures()}

    def beat(stop: threading.Event) -> None:
        logged = ""
        with channels.poster() as post:
            while True:
                try:
                    post(channel, process.encode(), orjson.dumps(said()))
                    logged = ""
                except PenstockError as error:
                    # The pipeline does not end because its figures cannot be told; `penstock status` sees the silence.
                    if logged != str(error):
                        log.warning("the figures of %s cannot be told: %s", process, error)
                    logged = str(error)
                except Exception:
                    log.exception("the figures of %s cannot be told", process)
                if stop.wait(every):
                    return

    with beside("pulse", beat):
        yield
