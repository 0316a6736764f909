"""A class that keeps state of every kind, the records that it gets, and what it has to make of them."""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame

from penstock import Keyed, ListState, MapState, ValueState
from penstock.analysis.query import Mode, Query, Shape
from penstock.core.contracts import Channels
from penstock.core.record import Origin, Record

TEN_MINUTES = timedelta(minutes=10)


class Approve(Keyed):
    """Declines a card that is used in another city within ten minutes."""

    last = ValueState("city STRING, at TIMESTAMP")
    recent = ListState("amount DOUBLE")
    cities = MapState("city STRING", "times INT")
    schema = "card STRING, n BIGINT, verdict STRING, total DOUBLE, times INT"

    def process(self, key: str, row: Any) -> Iterator[dict[str, Any]]:
        before = self.last.get()
        self.last.set(city=row.city, at=row.event_time)
        self.recent.append(row.amount)
        self.recent.set(list(self.recent)[-3:])
        self.cities[row.city] = self.cities.get(row.city, 0) + 1
        elsewhere = before is not None and before.city != row.city and row.event_time - before.at < TEN_MINUTES
        yield {
            "n": row.n,
            "verdict": "declined" if elsewhere else "approved",
            "total": sum(self.recent),
            "times": self.cities[row.city],
        }


Used = tuple[int, str, str, int, int]
"""A card that was used: number, card, city, amount, and when, in milliseconds."""


def used(seed: int, size: int) -> list[Used]:
    """Some cards, used in some cities, minutes apart."""
    made = random.Random(seed)
    moments = [1_700_000_000_000 + made.randrange(0, 15 * 60_000) + n * 60_000 for n in range(size)]
    cities = ("Oslo", "Paris", "Rome")
    return [
        (n, f"card-{made.randrange(7)}", made.choice(cities), made.randrange(100), at)
        for n, at in enumerate(moments, start=1)
    ]


def verdicts(uses: Sequence[Used]) -> dict[int, tuple[str, str, float, int]]:
    """What is to be said of each: card, verdict, the sum of its last three amounts, and how often it was there."""
    last: dict[str, tuple[str, int]] = {}
    amounts: defaultdict[str, list[int]] = defaultdict(list)
    times: Counter[tuple[str, str]] = Counter()
    found = {}
    for n, card, city, amount, at in uses:
        elsewhere = (
            card in last and last[card][0] != city and at - last[card][1] < TEN_MINUTES / timedelta(milliseconds=1)
        )
        last[card] = (city, at)
        amounts[card].append(amount)
        times[card, city] += 1
        verdict = "declined" if elsewhere else "approved"
        found[n] = (card, verdict, float(sum(amounts[card][-3:])), times[card, city])
    return found


def shape(channel: str) -> Shape:
    columns = (
        "n BIGINT NOT NULL, card STRING NOT NULL, city STRING NOT NULL, amount BIGINT NOT NULL, at BIGINT NOT NULL"
    )
    return Shape(channel, columns, "timestamp_millis(at)")


def approved(uses: DataFrame) -> DataFrame:
    return Approve.over(uses, key="card")


def query(channel: str, into: str) -> Query:
    return Query("approved", (channel,), into, ("card", "n"), approved, Mode.MICRO_BATCH)


def send(channels: Channels, channel: str, uses: Sequence[Used]) -> None:
    names = ("n", "card", "city", "amount", "at")
    records = [
        Record(json.dumps(dict(zip(names, use, strict=True))).encode(), Origin("s", 1, use[0], use[4]), use[1].encode())
        for use in uses
    ]

    async def go() -> None:
        async with channels.sender() as sender:
            await sender.send(channel, records)

    asyncio.run(go())
