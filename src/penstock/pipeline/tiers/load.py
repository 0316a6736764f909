"""The tier of the stores: each with a loader from its channel."""

import threading
from dataclasses import replace

from penstock.audit.account import Account
from penstock.pipeline.accounts import accounting
from penstock.pipeline.description import Description, StoreSpec
from penstock.pipeline.graph import store_node
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.tiers import Ready, Tier
from penstock.pipeline.wiring import Wiring
from penstock.stores.lake import LakeStore
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore


def run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Every store of the pipeline, each with a loader from its channel."""
    kafka = wiring.channels()
    loaders = {
        store: Loader(kafka, store.channel, _store(store, description, wiring, kafka.topic_id(store.channel)))
        for store in description.stores
    }

    def figures() -> Figures:
        return {"nodes": {store_node(store.url, store.channel): loader.figures() for store, loader in loaders.items()}}

    def accounts() -> list[Account]:
        return [
            replace(account, latency=loader.figures()["latency"])
            for store, loader in loaders.items()
            if (account := loader.account(store_node(store.url, store.channel))) is not None
        ]

    failures: list[BaseException] = []

    def work(loader: Loader) -> None:
        try:
            loader.run(stop)
        except BaseException as error:  # noqa: BLE001 (told by the thread that waits)
            failures.append(error)
            stop.set()

    threads = [
        threading.Thread(target=work, args=(loader,), name=f"load {store.url}") for store, loader in loaders.items()
    ]
    with pulse(kafka, description.status, Tier.LOAD, figures), accounting(kafka, description.bookmarks, accounts):
        for thread in threads:
            thread.start()
        ready()
        for thread in threads:
            thread.join()
        stop.wait()
    if failures:
        raise failures[0]


def _store(store: StoreSpec, description: Description, wiring: Wiring, topic_id: str) -> RedisStore | LakeStore:
    if store.url.startswith("delta://"):
        schema = description.channels[store.channel].schema
        return LakeStore(wiring.path(store.url), store.channel, schema, topic_id)
    url = wiring.redis.url if store.url == "redis://" else store.url
    return RedisStore(url, store.channel, store.ttl, topic_id)
