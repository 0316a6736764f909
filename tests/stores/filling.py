"""Fills a store from a channel whose content is always the same: a program, so that tests can kill it."""

import random
import sys
import threading
from datetime import timedelta

from tests.stores.lakes import LoadedLake

from penstock.core.record import Origin
from penstock.stores.base import Loadable
from penstock.stores.lake import LakeStore
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore
from penstock.testing import MemoryChannels

CHANNEL = "rsvps"
RECORDS, KEYS = 12_000, 97


def described(kind: str, location: str, every: float = 0.005) -> Loadable:
    if kind == "redis":
        return RedisStore(location, CHANNEL, topic_id="one", every=timedelta(seconds=every))
    return LoadedLake(LakeStore(location, CHANNEL, "one", compact_every=7), typed=True, every=timedelta(seconds=every))


def filled() -> MemoryChannels:
    """Numbered records in three partitions; some come twice, some do not fit, versions repeat and step back."""
    channels, chance = MemoryChannels(partitions=3), random.Random(11)
    for n in range(RECORDS):
        again = n - chance.randrange(1, 300) if n > 300 and chance.random() < 0.1 else None
        for number in (n, again):
            if number is not None:
                key, version = b"k%d" % (number % KEYS), b"%d" % number
                headers = [*Origin(f"s{number % 5}", 1, number // 5, number).headers(), ("version", version)]
                channels.append(CHANNEL, b'{"n": %d}' % number, key, headers)
        if n % 500 == 0:
            channels.append(CHANNEL, b'{"n": "?"}', b"k0", [("version", b"0")])
    return channels


if __name__ == "__main__":
    stop = threading.Event()
    loader = Loader(filled(), CHANNEL, described(sys.argv[1], sys.argv[2]), most=200)
    loading = threading.Thread(target=loader.run, args=(stop,))
    loading.start()
    done = {partition: end for partition, (_, end) in filled().bounds(CHANNEL).items()}
    store = described(sys.argv[1], sys.argv[2]).open()
    while dict(store.positions()) != done and loading.is_alive():
        stop.wait(0.02)
    stop.set()
    loading.join()
