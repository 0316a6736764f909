"""kill -9 of the auditor, again and again, while records flow: the balance is exact in the end."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from tests.soak import auditing
from tests.soak.line import until
from tests.soak.posting import post
from tests.soak.sizes import FULL, KILLED, KILLS, PATIENCE, figure
from tests.soak.things import PARTITIONS, SENDERS, Change, Placed, Who, things

from penstock.audit.auditor import Auditor
from penstock.audit.balance import balance
from penstock.audit.hops import Gap
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic

PARTS = KILLS + 1
"""The records flow in so many parts, each of which has a life of the auditor to itself at first."""
CHUNK, PACE = 200, 0.01
"""So many records come together, and so many seconds apart."""


def test_an_auditor_that_is_killed_again_and_again_is_exact(
    kafka: Kafka, fresh: Callable[[str], str], tmp_path: Path
) -> None:
    channel, chance, turns = fresh("killed"), random.Random(7), threading.Semaphore(1)
    changes = some_changes(chance)
    kafka.ensure([Topic(channel, PARTITIONS)])
    Ledger(auditing.ledger_in(tmp_path)).close()
    generations = {"python": 0, "spark": 0}
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(post, kafka, channel, paced(things(range(KILLED), KILLED, changes), turns))
        while not feeding.done():
            engine = "spark" if FULL and sum(generations.values()) % 10 == 5 else "python"
            live_and_die(kafka, channel, tmp_path, engine, chance, feeding.done)
            generations[engine] += 1
            turns.release()
        sent = feeding.result()
    assert sum(generations.values()) >= KILLS

    with closing(Ledger(auditing.ledger_in(tmp_path))) as ledger:
        auditor = Auditor(kafka, ledger, auditing.watching(channel), "")
        while auditor.step(1.0) or auditor.behind():
            pass
        auditor.close()
        content = ledger.content()
    [found] = balance(content, SystemClock().now(), grace=0).channels
    dropped = sorted(who for who, change in changes.items() if change is Change.DROPPED)
    doubled, swapped = (sum(one is change for one in changes.values()) for change in (Change.DOUBLED, Change.SWAPPED))
    assert sent == KILLED - len(dropped) + doubled
    assert (found.records, found.distinct, found.duplicates) == (sent, KILLED - len(dropped), doubled)
    assert found.gaps == tuple(Gap(sender, 1, seq, seq) for sender, seq in dropped)
    assert sum(one.reordered for one in found.by_sender) == swapped
    assert content.latencies[channel].count == sum(number for _, number in content.minutes[channel]) == sent
    figure(
        f"kill -9 of the auditor while {KILLED:,} records flow",
        f"{generations['python']} times by Python, {generations['spark']} by Spark, "
        f"in {time.monotonic() - began:.0f} s: exact",
    )


def live_and_die(
    kafka: Kafka, channel: str, folder: Path, engine: str, chance: random.Random, done: Callable[[], bool]
) -> None:
    """One life of the auditor: it gets somewhere, and is killed at any moment after that."""
    before = so_far(folder)
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, auditing.__file__, str(folder), kafka.servers, channel, engine], stdout=log, stderr=log
        )
    try:
        until(lambda: so_far(folder) > before or done() or child.poll() is not None, PATIENCE)
        time.sleep(chance.uniform(0, 0.3))
        assert child.poll() is None, (folder / "log").read_text()
    finally:
        child.kill()
        child.wait()


def so_far(folder: Path) -> int:
    """How many entries the ledger knows."""
    with closing(Ledger(auditing.ledger_in(folder), read_only=True)) as ledger:
        return sum(sum(positions.values()) for positions in ledger.positions().values())


def some_changes(chance: random.Random) -> dict[Who, Change]:
    """A few hundred records are harmed; no two of them are neighbours."""
    last = KILLED // SENDERS
    numbers = chance.sample([(f"s{sender}", seq) for sender in range(SENDERS) for seq in range(5, last - 5, 3)], 300)
    kinds = [Change.DROPPED, Change.DOUBLED, Change.SWAPPED]
    return {who: kinds[number % len(kinds)] for number, who in enumerate(numbers)}


def paced(records: Iterable[Placed], turns: threading.Semaphore) -> Iterator[Placed]:
    """The records, part after part: a part begins when it is its turn."""
    for number, record in enumerate(records):
        if number % (KILLED // PARTS) == 0:
            turns.acquire(timeout=PATIENCE)
        if number % CHUNK == 0:
            time.sleep(PACE)
        yield record
