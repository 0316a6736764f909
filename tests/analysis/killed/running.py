"""A driver that is fed and killed: at which moments, and what is left of it."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pyspark.sql import SparkSession
from tests.analysis.killed.feeding import Feeding, Streams, generate
from tests.analysis.killed.queries import UP, Trial, bookmarks, channel, topics, trials

from penstock.analysis.checkpoints.batches import Batch, batches, covered, numbers, unfinished
from penstock.analysis.checkpoints.rescale import Rescaled, rescale
from penstock.audit.account import Account
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Entry, Offsets
from penstock.core.scan import scan
from penstock.run.accounts import last_accounts

BEGUN, WRITTEN, COMMITTED = "a batch has begun", "a batch has written rows", "a batch is committed"
_ROOT = Path(__file__).parents[3]
PATIENCE = 300.0
SPREAD = {"approved": (5,), "latest": (1, 4)}
"""Whose state is spread anew, over how many partitions, one after the other."""
LAST = 6
"""So many are started after those in real time, whose first batches take some seconds meanwhile."""
SOON = 3
"""One of the first so many is waited for by who does not want to wait until all are started."""


@dataclass(frozen=True)
class Moment:
    """Something that a query does, and how to tell that it has."""

    description: str
    query: str
    come: Callable[[], bool]


@dataclass(frozen=True)
class Kill:
    """When a driver was killed: what was waited for, and which queries had a batch then that was not finished."""

    timestamp: Moment
    unfinished: list[str]


@dataclass(frozen=True)
class Rest:
    """A moment at which everything was taken: after so many steps, with so many rows written by each query."""

    steps: int
    written: dict[str, int]


@dataclass(frozen=True)
class Spread:
    """State that was spread over another number of partitions while there was no driver."""

    done: Rescaled
    said: list[str]
    reads: Mapping[str, Offsets]
    """Up to where the state knew the channels."""


@dataclass
class Run:
    """One life of all queries, through several lives of their driver."""

    name: str
    seed: int
    kafka: Kafka
    folder: Path
    kills: list[Kill] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    spread: list[Spread] = field(default_factory=list)
    begun: list[dict[str, int]] = field(default_factory=list)
    """What lay there when each driver began: so many rows of each query."""

    @cached_property
    def streams(self) -> Streams:
        return generate(self.seed)

    @cached_property
    def trials(self) -> dict[str, Trial]:
        return trials(self.name)

    def through(self, spark: SparkSession) -> None:
        """Feed all steps; of three drivers, kill two: one at work, and one that is catching up.

        Between the first two, the state of some queries is spread over other numbers of partitions, by this Spark.
        """
        chance = random.Random(self.seed)
        feeding = Feeding(self.kafka, self.name, self.streams)
        self.kafka.ensure(topics(self.name))
        feeding.step()
        with self._driver(self._order(chance)) as driver:
            self._rest(driver, feeding)
            self._wait(driver, self._all_know_the_time)
            come = self._timestamp(chance.choice((BEGUN, WRITTEN)), chance.choice(self._telling(self.trials)))
            begun = [self._timestamp(BEGUN, name) for name, trial in self.trials.items() if not trial.live]
            feeding.step()
            self._kill(driver, *begun, come)
        feeding.step()
        for name, number in ((name, number) for name, some in SPREAD.items() for number in some):
            self._spread(spark, name, number)
        order = self._order(chance)
        with self._driver(order) as driver:
            timestamp = chance.choice((BEGUN, WRITTEN, COMMITTED))
            self._kill(driver, self._timestamp(timestamp, self._telling(order)[chance.randrange(SOON)]))
        order = self._order(chance)
        accounted = [name for name in order if self.trials[name].accounted]
        with self._driver([*accounted, *(name for name in order if name not in accounted)]) as driver:
            # What closes the two sides is taken before what is to be late for it; others may still be on their way.
            self._wait(driver, lambda: not self._lacking(accounted))
            feeding.step()
            self._rest(driver, feeding)
            self._wait(driver, self._all_final)
            self._wait(driver, self._all_accounted)

    def _spread(self, spark: SparkSession, name: str, number: int) -> None:
        folder, said = Path(self.checkpoint(name)), list[str]()
        if unfinished(str(folder)) is None and not any(one.done.query == name for one in self.spread):
            # As if it was killed between its last row and its note of that.
            (folder / "commits" / str(max(numbers(folder / "commits")))).unlink()
        reads = covered(str(folder)) or {}
        self.spread.append(Spread(rescale(spark, name, str(folder), number, said.append), said, reads))

    def _order(self, chance: random.Random) -> list[str]:
        """In which the queries are started: those in real time not at once, they would take time from the others."""
        some = chance.sample(list(self.trials), len(self.trials))
        live, others = ([name for name in some if self.trials[name].live is one] for one in (True, False))
        return [*others[:-LAST], *live, *others[-LAST:]]

    def _telling(self, names: Iterable[str]) -> list[str]:
        """Of these, the queries that note a batch when it begins, and write something in each."""
        return [name for name in names if not self.trials[name].live and name not in _FINAL]

    # --- what is left -------------------------------------------------------------------------------------------------

    def checkpoint(self, name: str) -> str:
        return str(self.folder / "checkpoints" / name)

    def batches(self, name: str) -> list[Batch]:
        """Those that count. One that was not finished when its state was spread anew is followed by one that read less,
        and what it had read is read again."""
        found = batches(self.checkpoint(name))
        assert [one.number for one in found] == list(range(len(found))), "the checkpoint has forgotten some"
        return [one for at, one in enumerate(found) if not any(_less(later, one) for later in found[at + 1 :])]

    def lying(self, name: str) -> list[Entry]:
        """What one of the channels holds that are fed."""
        return list(scan(self.kafka, channel(self.name, name)))

    def written(self, name: str) -> list[Entry]:
        """What a query has written, all of it."""
        return list(scan(self.kafka, self.trials[name].query.into))

    def account(self, name: str) -> Account:
        return last_accounts(self.kafka, bookmarks(self.name))[f"query:{name}"]

    # --- what is waited for -------------------------------------------------------------------------------------------

    def _lacking(self, names: Iterable[str]) -> list[str]:
        """Which of these have not taken all that there is."""
        wanted = {name: self.trials[name].query.inputs for name in names}
        read = {one for inputs in wanted.values() for one in inputs}
        ends = {one: {at: end for at, (_, end) in self.kafka.bounds(one).items()} for one in read}
        due = {name: {one: ends[one] for one in inputs} for name, inputs in wanted.items()}
        return [name for name, some in due.items() if covered(self.checkpoint(name)) != some]

    def _rest(self, driver: "subprocess.Popen[bytes]", feeding: Feeding) -> None:
        self._wait(driver, lambda: not self._lacking(self.trials))
        self.rests.append(Rest(feeding.fed, self._sizes()))

    def _all_know_the_time(self) -> bool:
        """In real time, what is late is known in the batch after the one that has noted the watermark."""
        live = [name for name, trial in self.trials.items() if trial.live and trial.query.watermark]
        return all(batches(self.checkpoint(name))[-1].watermark for name in live)

    def _all_final(self) -> bool:
        """Those whose rows come when they are final have done what the last records made possible."""
        newest = {1: max(event.at for some in self.streams.events for event in some), 2: self.streams.closing.at}
        for name in _FINAL:
            query = self.trials[name].query
            assert query.max_lateness is not None
            last = newest[len(query.inputs)] - query.max_lateness.total_seconds() * 1_000
            if batches(self.checkpoint(name))[-1].watermark != last:
                return False
        return True

    def _all_accounted(self) -> bool:
        told = last_accounts(self.kafka, bookmarks(self.name))
        return all(
            f"query:{name}" in told
            and {one: share.until for one, share in told[f"query:{name}"].shares.items()}
            == covered(self.checkpoint(name))
            for name, trial in self.trials.items()
            if trial.accounted
        )

    def _timestamp(self, timestamp: str, name: str) -> Moment:
        """A moment of one of the queries from now on."""
        folder, into = Path(self.checkpoint(name)), self.trials[name].query.into
        (begun, finished), size = _noted(folder), self._size(into)

        def come() -> bool:
            if timestamp == WRITTEN:
                return self._size(into) > size
            now = _noted(folder)
            return now[1] > finished if timestamp == COMMITTED else now[0] > begun

        return Moment(timestamp, name, come)

    def _sizes(self) -> dict[str, int]:
        return {name: self._size(trial.query.into) for name, trial in self.trials.items()}

    def _size(self, into: str) -> int:
        return sum(end for _, end in self.kafka.bounds(into).values())

    # --- its drivers --------------------------------------------------------------------------------------------------

    @contextmanager
    def _driver(self, order: Iterable[str]) -> Iterator["subprocess.Popen[bytes]"]:
        """In a zone that turns its clocks back, and with nothing of the local files that an earlier one had."""
        local = self.folder / f"local-{len(self.begun)}"
        local.mkdir()
        script = str(Path(__file__).with_name("driver.py"))
        locations = (self.kafka.servers, self.name, str(self.folder / "checkpoints"), str(local), ",".join(order))
        modules = os.pathsep.join((str(_ROOT), *filter(None, sys.path)))
        env = {**os.environ, "TZ": "America/New_York", "PYTHONPATH": modules}
        with self._log.open("wb") as log:
            process = subprocess.Popen([sys.executable, script, *locations], env=env, stdout=log, stderr=log)
        try:
            # By now, what the one before it had on its way is there.
            self._wait(process, lambda: UP in self._log.read_text(), pause=0.05)
            self.begun.append(self._sizes())
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def _log(self) -> Path:
        return self.folder / "driver.log"

    def _wait(self, driver: "subprocess.Popen[bytes]", condition: Callable[[], bool], pause: float = 0.5) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert driver.poll() is None, f"seed {self.seed}: the driver has ended: {self._log.read_text()[-4_000:]}"
            assert time.monotonic() < until, f"seed {self.seed}: {self._lacking(self.trials)} lack records"
            time.sleep(pause)

    def _kill(self, driver: "subprocess.Popen[bytes]", *moments: Moment) -> None:
        """When all of these have come."""
        self._wait(driver, lambda: all(timestamp.come() for timestamp in moments), pause=0.002)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        left = [name for name in self.trials if unfinished(self.checkpoint(name)) is not None]
        self.kills.append(Kill(moments[-1], left))


def _less(later: Batch, one: Batch) -> bool:
    return any(
        later.ends[channel].get(partition, offset) < offset
        for channel, ends in one.ends.items()
        for partition, offset in ends.items()
    )


def _noted(folder: Path) -> tuple[int, int]:
    """The last batch that a checkpoint tells of, and the last that is finished."""
    begun, finished = (max(numbers(folder / log), default=-1) for log in ("offsets", "commits"))
    return begun, finished


_OUTER = (f"{how}-join" for how in ("left", "right", "full"))
_FINAL = {"final", "final-of-all", "sessions", "buried-sessions", "idle", *_OUTER}
"""Queries some of whose rows come when the watermark has passed them."""
