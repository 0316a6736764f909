"""Makes the stores of a pipeline, and their comparison with the channels."""

from penstock.audit.reconcile import ROWS, Check, RecordCheck, TableCheck
from penstock.audit.writers import Writers
from penstock.core.clock import Clock
from penstock.core.contracts import Channels
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description, StoreSpec
from penstock.pipeline.graph import store_node
from penstock.stores.lake import LakeStore
from penstock.stores.lake_rows import LakeRows
from penstock.stores.redis import RedisStore


def make_store(spec: StoreSpec, description: Description, config: Config, topic_id: str = "") -> RedisStore | LakeStore:
    """Make a store. With the id of its topic, it refuses to be filled from another topic."""
    if spec.url.startswith("delta://"):
        channel = description.channels[spec.channel]
        # The rows of a result always have keys.
        keyed = channel.table or channel.result_of is not None
        return LakeStore(config.lake_path(spec.url), spec.channel, topic_id, keyed=keyed)
    url = config.redis.url if spec.url == "redis://" else spec.url
    return RedisStore(url, spec.channel, spec.ttl, topic_id)


def make_check(
    spec: StoreSpec, description: Description, config: Config, channels: Channels, clock: Clock, most: int | None = ROWS
) -> Check:
    """Make the comparison of a store with its channel. Of a table, only the newest `most` rows are compared."""
    store, channel = make_store(spec, description, config), description.channels[spec.channel]
    stage = store_node(spec.url, spec.channel)
    if isinstance(store, LakeStore):
        dead = "" if channel.result_of else channel.dead
        return RecordCheck(stage, spec.channel, LakeRows(store.path, spec.channel), channels, dead)
    writers = Writers(channels, [description.bookmarks]) if channel.result_of else None
    return TableCheck(stage, spec.channel, store.open(), channels, clock, writers, most)
