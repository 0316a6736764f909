"""The stores of a pipeline: what its description asks for, at the place that the wiring gives."""

from penstock.pipeline.description import Description, StoreSpec
from penstock.pipeline.wiring import Wiring
from penstock.stores.lake import LakeStore
from penstock.stores.redis import RedisStore


def store_of(spec: StoreSpec, description: Description, wiring: Wiring, topic_id: str = "") -> RedisStore | LakeStore:
    """The store that a specification means. With a topic's id, it refuses to be filled from another topic."""
    if spec.url.startswith("delta://"):
        channel = description.channels[spec.channel]
        # Whether a result is a table is for its query to say; its rows have keys in any case.
        keyed = channel.table or channel.result_of is not None
        return LakeStore(wiring.path(spec.url), spec.channel, channel.schema, topic_id, keyed=keyed)
    url = wiring.redis.url if spec.url == "redis://" else spec.url
    return RedisStore(url, spec.channel, spec.ttl, topic_id)
