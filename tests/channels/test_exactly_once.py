"""The recipe of docs/console.md, as it stands in examples/exactly_once: killed again and again, it counts right."""

import asyncio
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Record

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

CONSUMER = Path(__file__).parents[2] / "examples" / "exactly_once" / "consumer.py"
PAYMENTS, ACCOUNTS, PARTITIONS = 20_000, 50, 4
KILLS = 3


def payments(seed: int) -> list[tuple[str, int]]:
    chance = random.Random(seed)
    return [(f"account-{chance.randrange(ACCOUNTS)}", chance.randrange(1, 10_000)) for _ in range(PAYMENTS)]


def send(kafka: Kafka, channel: str, paid: list[tuple[str, int]]) -> None:
    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, [Record(b"%d" % cents, None, account.encode()) for account, cents in paid])

    asyncio.run(go())


@contextmanager
def members(count: int, *arguments: str) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """So many processes of the example, which are killed in the end."""
    processes = [subprocess.Popen([sys.executable, str(CONSUMER), *arguments]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def balances(database: Path) -> tuple[dict[str, int], int]:
    """The cents of each account, and how many payments they are."""
    if not database.exists():
        return {}, 0
    with closing(sqlite3.connect(database, timeout=30)) as db:
        try:
            rows = db.execute("SELECT account, payments, cents FROM balances").fetchall()
        except sqlite3.OperationalError:
            return {}, 0  # Its tables are just being made.
    return {account: cents for account, _, cents in rows}, sum(count for _, count, _ in rows)


def test_a_result_with_its_position_in_one_transaction_is_exact_whatever_is_killed_and_committed(
    kafka: Kafka, fresh: Fresh, tmp_path: Path, eventually: Eventually
) -> None:
    channel, group, database = fresh("payments"), fresh("balances"), tmp_path / "balances.db"
    kafka.ensure([Topic(channel, PARTITIONS)])
    paid, more = payments(1), payments(2)
    arguments = (channel, str(database), "--group", group, "--channels", kafka.where)
    send(kafka, channel, paid)
    for _ in range(KILLS):
        before = balances(database)[1]
        with members(2, *arguments):
            eventually(lambda before=before: balances(database)[1] > before)
        # Both were killed in the midst of it.
    assert balances(database)[1] < PAYMENTS

    def moved(to: int) -> bool:
        """What the group has committed is wrong now, in one way or the other."""
        try:
            kafka.move(group, {channel: {location: bound[to] for location, bound in kafka.bounds(channel).items()}})
        except Unavailable:
            return False  # The dead are still thought to be members.
        return True

    eventually(lambda: moved(1))
    send(kafka, channel, more)
    with members(2, *arguments):
        eventually(lambda: balances(database)[1] >= PAYMENTS + PAYMENTS // 2)
    eventually(lambda: moved(0))
    due: Counter[str] = Counter()
    for account, cents in [*paid, *more]:
        due[account] += cents
    with members(2, *arguments):
        eventually(lambda: balances(database)[1] >= 2 * PAYMENTS)
        until = time.monotonic() + 60
        # Until the group has dealt everything, so that what is wrongly applied twice would show.
        while len(kafka.group(group).members) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert balances(database) == (dict(due), 2 * PAYMENTS)
