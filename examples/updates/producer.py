"""Numbered updates, forever: every 100 ms, each sender sends 10 of them.

It does not know what carries them. The address does: `CHANNELS=tcp://127.0.0.1:7700`, `CHANNELS=kafka://localhost:9092`.
"""

import argparse
import asyncio
import logging
import os
import sys
from contextlib import suppress

from penstock import Record, Topic, bind
from penstock.core.clock import SystemClock, duration
from penstock.core.contracts import Channels
from penstock.core.errors import PenstockError, Unavailable
from penstock.simulate.updates import Updates, new_epoch, updates

say = logging.getLogger("producer").info


async def produce(channels: Channels, channel: str, wanted: Updates, left_out: int | None) -> None:
    channels.ensure([Topic(channel)])
    clock = SystemClock()
    epoch, told = new_epoch(clock), clock.elapsed()
    async with channels.sender() as sender:
        async for batch in updates(wanted, epoch, clock, behind=fell_behind):
            some = [update for update in batch if number(update) != left_out]
            while True:
                try:
                    # When this returns, they are safe: as safe as the binder promises it.
                    await sender.send(channel, some)
                    break
                except Unavailable as away:
                    # To send them again is safe, too: whoever reads knows an update that it has seen.
                    say(f"{away}; sending again")
                    await asyncio.sleep(1)
            last = number(batch[-1])
            if clock.elapsed() >= told + 1 or last == wanted.limit:
                told = clock.elapsed()
                say(f"{wanted.senders} of {wanted.name}, epoch {epoch}: acknowledged up to {last}")


def number(update: Record) -> int:
    return update.origin.seq if update.origin else 0


def fell_behind(ticks: int) -> None:
    say(f"the channel is slower than this producer: {ticks} ticks were given up")


def main() -> None:
    options = argparse.ArgumentParser(description="Send numbered updates to a channel.")
    options.add_argument("--channels", default=os.environ.get("CHANNELS", "tcp://127.0.0.1:7700"), metavar="ADDRESS")
    options.add_argument("--channel", default="updates")
    options.add_argument("--every", type=duration, default="100ms", help="the tick")
    options.add_argument("--count", type=int, default=10, help="updates of each sender in a tick")
    options.add_argument("--senders", type=int, default=1)
    options.add_argument("--name", default="sender", help="each producer that runs at once needs another one")
    options.add_argument("--limit", type=int, help="stop after so many updates of each sender")
    options.add_argument("--leave-out", type=int, metavar="NUMBER", help="lose this one, to see that it is found")
    given = options.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        wanted = Updates(given.every, given.count, given.senders, given.limit, given.name)
        with suppress(KeyboardInterrupt):
            asyncio.run(produce(bind(given.channels), given.channel, wanted, given.leave_out))
    except PenstockError as error:
        options.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
