"""Posts and more of Bluesky, over Jetstream: `app.source(bluesky("app.bsky.feed.post"), into="posts")`."""

import re

from penstock.collect.websocket import WebSocketSource
from penstock.core.errors import Misconfigured

ADDRESS = "wss://jetstream2.us-east.bsky.network/subscribe"
AGENT = {"User-Agent": "penstock"}


def bluesky(*collections: str, name: str = "bluesky", address: str = ADDRESS) -> WebSocketSource:
    """A source of these collections, or of all. It resumes at the last `time_us`, for about a day."""
    for one in collections:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,300}(\.\*)?", one):
            raise Misconfigured(f"source {name}, collections", f"{one!r} is none", 'write it like "app.bsky.feed.post"')
    wanted = "&".join(f"wantedCollections={one}" for one in collections)
    return WebSocketSource(f"{address}?{wanted}" if wanted else address, name, cursor="time_us", headers=AGENT)
