"""The status of the processes of a run: they report it to the status channel, and commands read it."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import psutil

from penstock.audit.judge import Verdict
from penstock.core.clock import Micros, SystemClock, is_running
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import PenstockError, retry
from penstock.core.scan import scan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    processes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, channels: Channels, channel: str) -> "Status":
        """Read the last report of each process."""
        processes: dict[str, Mapping[str, Any]] = {}
        for entry in scan(channels, channel):
            _apply(processes, entry)
        return cls(processes)

    @property
    def nodes(self) -> dict[str, Mapping[str, Any]]:
        """The figures of each part of the pipeline."""
        return {name: figures for report in self.processes.values() for name, figures in report["nodes"].items()}

    @property
    def usage(self) -> Mapping[str, Mapping[str, Any]]:
        """Memory and restarts of each process, as reported by the supervisor."""
        usage: Mapping[str, Mapping[str, Any]] = self.processes.get("run", {}).get("usage", {})
        return usage

    @property
    def balance(self) -> Mapping[str, Any] | None:
        return self.processes.get("audit", {}).get("balance")

    @property
    def alarms(self) -> list[Mapping[str, Any]]:
        return list((self.balance or {}).get("alarms", ()))

    def verdict(self, now: Micros) -> Verdict:
        """The verdict of the audit; not known if the audit or another process of the run has stopped reporting."""
        found = Verdict((self.balance or {}).get("verdict", Verdict.NOT_KNOWN))
        # The channel may have reports of processes of earlier runs.
        current = {"run", *self.usage} if self.usage else self.processes.keys()
        silent = any(not is_running(report["at"], now) for name, report in self.processes.items() if name in current)
        return Verdict.NOT_KNOWN if found is Verdict.WHOLE and silent else found

    def to_json(self) -> dict[str, Any]:
        memory = sum(used["memory"] for used in self.usage.values())
        return {"nodes": self.nodes, "balance": self.balance, "usage": self.usage, "memory": memory}


@contextmanager
def follow_status(channels: Channels, channel: str) -> Iterator[Mapping[str, Mapping[str, Any]]]:
    """The last report of each process, updated while the body runs."""
    processes: dict[str, Mapping[str, Any]] = {}

    def follow(stop: threading.Event) -> None:
        def read(succeeded: Callable[[], None]) -> None:
            with channels.reader({channel: {}}) as reader:
                while not stop.is_set():
                    for entry in reader.read(1_000, 0.5):
                        _apply(processes, entry)
                    succeeded()

        retry(read, stop, log=log)

    with run_in_background("status", follow):
        yield processes


def _apply(processes: dict[str, Mapping[str, Any]], entry: Entry) -> None:
    """Apply a report of a process; ignore other entries."""
    try:
        report = orjson.loads(entry.value or b"")
        if isinstance(report, dict) and entry.key and "at" in report:
            processes[entry.key.decode()] = report
    except ValueError:
        log.warning("the status entry at %s/%s is not JSON", entry.partition, entry.offset)


Figures = Mapping[str, Any]
"""The report of a process. `nodes` has the figures of each part, such as `source:rsvps` or `query:by_country`."""

EVERY = 1.0
JOIN_TIMEOUT = 5.0


@contextmanager
def report_status(
    channels: Channels, channel: str, process: str, figures: Callable[[], Figures], every: float = EVERY
) -> Iterator[None]:
    """Report the figures of this process while the body runs, immediately and then every `every` seconds."""
    clock, this = SystemClock(), psutil.Process()

    def report() -> dict[str, Any]:
        about = {"process": process, "at": clock.now(), "pid": os.getpid(), "memory": this.memory_info().rss}
        return {**about, "nodes": {}, **figures()}

    def post_reports(stop: threading.Event) -> None:
        with channels.poster() as post:
            # `penstock status` shows missing reports.
            failure = f"{process} cannot report its status"
            repeat(stop, lambda: post(channel, process.encode(), orjson.dumps(report())), every, failure)

    with run_in_background("status reporter", post_reports):
        yield


def repeat(
    stop: threading.Event,
    work: Callable[[], object],
    every: float,
    failure: str,
    *,
    delay: float = 0,
    last: bool = False,
) -> None:
    """Call `work` every `every` seconds, first after `delay`, until `stop` is set; with `last`, then once more.

    After an error it continues. The log gets `failure` with the error, once until the error changes.
    """
    logged = ""
    ending = stop.wait(delay)
    while last or not ending:
        try:
            work()
            logged = ""
        except Exception as error:
            if logged != str(error):
                expected = isinstance(error, PenstockError)
                log.warning("%s: %s", failure, error, exc_info=not expected)
            logged = str(error)
        if ending:
            return
        ending = stop.wait(every)


@contextmanager
def run_in_background(name: str, work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run `work` in a thread while the body runs. It has to end soon after its event is set. Its errors are logged."""
    stop = threading.Event()

    def run() -> None:
        try:
            work(stop)
        except Exception:
            log.exception("%s failed", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_TIMEOUT)
