"""Sends numbered updates: each sender sends 10 every 100 ms.

The address selects the transport: `CHANNELS=tcp://127.0.0.1:7700` or `CHANNELS=kafka://localhost:9092`.
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

log = logging.getLogger("producer").info


async def produce(channels: Channels, channel: str, options: Updates, left_out: int | None) -> None:
    channels.ensure([Topic(channel)])
    clock = SystemClock()
    epoch, last_report = new_epoch(clock), clock.elapsed()
    async with channels.sender() as sender:
        async for batch in updates(options, epoch, clock, behind=fell_behind):
            some = [update for update in batch if number(update) != left_out]
            while True:
                try:
                    # When this returns, the updates are stored as durably as the binder guarantees.
                    await sender.send(channel, some)
                    break
                except Unavailable as error:
                    # Sending again is safe: readers recognize duplicates by their numbers.
                    log(f"{error}; sending again")
                    await asyncio.sleep(1)
            last = number(batch[-1])
            if clock.elapsed() >= last_report + 1 or last == options.limit:
                last_report = clock.elapsed()
                log(f"{options.senders} of {options.name}, epoch {epoch}: acknowledged up to {last}")


def number(update: Record) -> int:
    return update.origin.seq if update.origin else 0


def fell_behind(ticks: int) -> None:
    log(f"the channel is slower than this producer: {ticks} ticks were skipped")


def main() -> None:
    parser = argparse.ArgumentParser(description="Send numbered updates to a channel.")
    parser.add_argument("--channels", default=os.environ.get("CHANNELS", "tcp://127.0.0.1:7700"), metavar="ADDRESS")
    parser.add_argument("--channel", default="updates")
    parser.add_argument("--every", type=duration, default="100ms", help="the interval of a tick")
    parser.add_argument("--count", type=int, default=10, help="updates per sender and tick")
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--name", default="sender", help="unique among the producers that run at the same time")
    parser.add_argument("--limit", type=int, help="updates per sender, then stop; default: no limit")
    parser.add_argument("--leave-out", type=int, metavar="NUMBER", help="skip this update, to test the verifier")
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        options = Updates(args.every, args.count, args.senders, args.limit, args.name)
        with suppress(KeyboardInterrupt):
            asyncio.run(produce(bind(args.channels), args.channel, options, args.leave_out))
    except PenstockError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
