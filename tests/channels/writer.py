"""A process that sends numbers into a channel, and prints each one that is acknowledged."""

import asyncio
import pickle
import sys
from itertools import count, islice

from penstock.core.contracts import Channels
from penstock.core.record import Origin, Record


async def write(channels: Channels, channel: str, sender_name: str, most: int | None) -> None:
    async with channels.sender() as sender:
        for number in islice(count(1), most):
            await sender.send(
                channel, [Record(b"%d" % number, Origin(sender_name, 1, number, 1), b"k%d" % (number % 5))]
            )
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    pickled, into, name, limit = sys.argv[1:]
    asyncio.run(write(pickle.loads(bytes.fromhex(pickled)), into, name, int(limit) or None))
