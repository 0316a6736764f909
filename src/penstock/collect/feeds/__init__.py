"""Public feeds, ready by name: `feed://wikimedia`, `feed://bluesky`, `feed://coinbase`."""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from penstock.collect.feeds.coinbase import HISTORY, Coinbase
from penstock.collect.sse import SseSource
from penstock.collect.websocket import WebSocketSource
from penstock.core.contracts import Source
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean

ADDRESSES = {
    "wikimedia": "https://stream.wikimedia.org/v2/stream/recentchange",
    "bluesky": "wss://jetstream2.us-east.bsky.network/subscribe",
    "coinbase": "wss://ws-feed.exchange.coinbase.com",
}
AGENT = {"User-Agent": "penstock"}
"""Some of them turn away who does not say what it is."""
OPTIONS = {"collections": "bluesky", "products": "coinbase", "history": "coinbase"}


def feed_at(
    url: str,
    name: str,
    *,
    address: str | None = None,
    collections: str | Sequence[str] = (),
    products: str | Sequence[str] = (),
    history: str | None = None,
    fill: int = 100_000,
) -> Source:
    """The source of a public feed.

    `address` is another server that speaks the same, such as a mirror. `collections`: of bluesky, such as
    "app.bsky.feed.post"; all if none is said. `products`: of coinbase, such as "BTC-USD". `history`: where coinbase is
    asked for trades that were missed. `fill`: so many of them at most are asked for, per product.
    """
    feed = url.partition("://")[2].strip("/").lower()
    if feed not in ADDRESSES:
        way_out = did_you_mean(feed, ADDRESSES, f"there are {', '.join(sorted(ADDRESSES))}", "feed://{}")
        raise Misconfigured(f"source {name}", f'"{feed}" is no feed that is known here', way_out)
    said = {"collections": collections, "products": products, "history": history}
    for option, whose in OPTIONS.items():
        if said[option] and feed != whose:
            raise Misconfigured(f"source {name}, {option}", f"{feed} has none", f"it is an option of feed://{whose}")
    address = _address(name, feed, address or ADDRESSES[feed])
    if feed == "wikimedia":
        return SseSource(f"sse+{address}", name, headers=AGENT)
    if feed == "bluesky":
        wanting = _wanting(name, address, _listed(collections))
        return WebSocketSource(wanting, name, cursor="time_us", headers=AGENT)
    return Coinbase(address, name, _listed(products), history or HISTORY, fill)


def _address(name: str, feed: str, address: str) -> str:
    schemes = ("http", "https") if feed == "wikimedia" else ("ws", "wss")
    if address.partition("://")[0].lower() not in schemes or not urlsplit(address).netloc:
        shown = address.partition("?")[0]
        raise Misconfigured(f"source {name}, address", f"{shown} is none of {feed}", f"write {schemes[1]}://host/path")
    return address


def _listed(said: str | Sequence[str]) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(said)


def _wanting(name: str, address: str, collections: Sequence[str]) -> str:
    for one in collections:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,300}(\.\*)?", one):
            raise Misconfigured(f"source {name}, collections", f"{one!r} is none", 'write it like "app.bsky.feed.post"')
    wanted = "&".join(f"wantedCollections={one}" for one in collections)
    return address + ("&" if "?" in address else "?") + wanted if wanted else address
