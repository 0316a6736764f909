"""Visitors of a site: they see ads, and click on some of them seconds or minutes later."""

import argparse
import asyncio
import heapq
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock import Origin, Record, bind
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import PenstockError
from penstock.pipeline.config import Config
from penstock.run.services import RunningPipeline

ADS = ("a1", "a2", "a3", "a4", "a5")
Visit = tuple[float, str, dict[str, object]]
"""When, in seconds from the beginning; the channel; and the record."""


def visits(chance: random.Random, generation: int, every: float = 0.2) -> Iterator[Visit]:
    """An ad is shown every so often; one in three is clicked, after 10 seconds on average, and some after a minute."""
    coming: list[tuple[float, str]] = []
    impressions, now = 0, 0.0
    while True:
        while coming and coming[0][0] <= now:
            at, impression = heapq.heappop(coming)
            yield at, "clicks", {"impression": impression}
        impressions += 1
        impression = f"{generation}-{impressions}"
        yield now, "impressions", {"impression": impression, "ad": chance.choice(ADS)}
        if chance.random() < 1 / 3:
            heapq.heappush(coming, (now + chance.expovariate(1 / 10), impression))
        now += every


async def send(channels: Channels, limit: int | None) -> None:
    clock = SystemClock()
    began, generation = clock.elapsed(), clock.now()
    numbers = {"impressions": 0, "clicks": 0}
    async with channels.sender() as sender:
        for at, channel, record in visits(random.Random(generation), generation):
            if sum(numbers.values()) == limit:
                return
            await asyncio.sleep(max(0.0, began + at - clock.elapsed()))
            numbers[channel] += 1
            value = json.dumps({**record, "at": (generation + round(at * 1e6)) // 1_000}).encode()
            origin = Origin("visitors", generation, numbers[channel], clock.now())
            await sender.send(channel, [Record(value, origin, str(record["impression"]).encode())])


def main() -> None:
    parser = argparse.ArgumentParser(description="Show ads to visitors who click on some of them.")
    parser.add_argument("--channels", metavar="ADDRESS", help="address; default: the running pipeline")
    parser.add_argument("--limit", type=int, help="stop after so many records")
    options = parser.parse_args()
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(
                send(bind(options.channels or RunningPipeline.find(Config.read(Path())).address), options.limit)
            )
    except PenstockError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
