"""The stores of a pipeline: what its description asks for, at the place that the wiring gives."""

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


def store_of(spec: StoreSpec, description: Description, config: Config, topic_id: str = "") -> RedisStore | LakeStore:
    """The store that a specification means. With a topic's id, it refuses to be filled from another topic."""
    if spec.url.startswith("delta://"):
        channel = description.channels[spec.channel]
        # Whether a result is a table is for its query to say; its rows have keys in any case.
        keyed = channel.table or channel.result_of is not None
        return LakeStore(config.path(spec.url), spec.channel, topic_id, keyed=keyed)
    url = config.redis.url if spec.url == "redis://" else spec.url
    return RedisStore(url, spec.channel, spec.ttl, topic_id)


def check_of(
    spec: StoreSpec, description: Description, config: Config, channels: Channels, clock: Clock, most: int | None = ROWS
) -> Check:
    """The comparison of a store with its channel. Of a table, only the rows that changed last, `most` of them."""
    store, channel = store_of(spec, description, config), description.channels[spec.channel]
    stage = store_node(spec.url, spec.channel)
    if isinstance(store, LakeStore):
        dead = "" if channel.result_of else channel.dead
        return RecordCheck(stage, spec.channel, LakeRows(store.path, spec.channel), channels, dead)
    writers = Writers(channels, [description.bookmarks]) if channel.result_of else None
    return TableCheck(stage, spec.channel, store.open(), channels, clock, writers, most)
