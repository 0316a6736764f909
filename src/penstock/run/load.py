"""The load process: fills the stores except lakes, which Spark fills in the analysis process."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

from penstock.audit.account import Account
from penstock.audit.writers import Writers
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description, StoreSpec
from penstock.pipeline.graph import store_node
from penstock.pipeline.stores import make_store
from penstock.run.accounts import accounting
from penstock.run.status import Figures, report_status
from penstock.run.tier import Ready, Tier
from penstock.stores.lake import LakeStore
from penstock.stores.loader import Loader


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Run a loader for each store of the pipeline except lakes."""
    channels, skip_lost = config.bind(), config.channels.lost == "skip"

    def loader(store: StoreSpec) -> Loader:
        opened = make_store(store, description, config, channels.topic_id(store.channel))
        assert not isinstance(opened, LakeStore)
        result = description.channels[store.channel].result_of is not None
        writers = Writers(channels, [description.bookmarks]) if result else None
        return Loader(channels, store.channel, opened, skip_lost=skip_lost, writers=writers)

    loaders = {store: loader(store) for store in description.stores if store not in description.lakes}

    def figures() -> Figures:
        return {"nodes": {store_node(store.url, store.channel): loader.figures() for store, loader in loaders.items()}}

    def accounts() -> list[Account]:
        found = [loader.account(store_node(store.url, store.channel)) for store, loader in loaders.items()]
        return [account for account in found if account is not None]

    with (
        report_status(channels, description.status, Tier.LOAD, figures),
        accounting(channels, description.bookmarks, accounts),
        ThreadPoolExecutor(max(1, len(loaders)), "load") as threads,
    ):
        running = [threads.submit(loader.run, stop) for loader in loaders.values()]
        ready()
        try:
            for done in as_completed(running):
                done.result()
            stop.wait()
        finally:
            # After an error, the other loaders end, too.
            stop.set()
