"""The tiers, each as it runs in a process of its own. Here the strangers are introduced to each other."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from enum import StrEnum
from typing import Any

from penstock.audit.auditor import Auditor
from penstock.audit.balance import balance
from penstock.audit.findings import Kind, Watched
from penstock.audit.ledger import Ledger
from penstock.audit.rate import Rate
from penstock.clock import SystemClock
from penstock.collect.pump import Pump
from penstock.collect.websocket import WebSocketSource
from penstock.deliver.app import build
from penstock.deliver.outlet import FeedSpec
from penstock.deliver.serving import serve
from penstock.deliver.site import ChartSpec
from penstock.errors import Misconfigured, PenstockError
from penstock.pipeline.description import Description, PageSpec, SourceSpec, StoreSpec
from penstock.pipeline.graph import graph, store_node
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.wiring import Wiring, simulated, topics
from penstock.stores.lake import LakeStore
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore

log = logging.getLogger(__name__)


class Tier(StrEnum):
    COLLECT = "collect"
    ANALYSE = "analyse"
    LOAD = "load"
    AUDIT = "audit"
    DELIVER = "deliver"


Ready = Callable[[], None]


def run(tier: Tier, description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Run a tier until `stop`; `ready` is called once it does its work."""
    if tier is Tier.ANALYSE:
        # Not above: this is the one tier that needs pyspark.
        from penstock.pipeline.analyse import analyse

        analyse(description, wiring, stop, ready)
        return
    wiring.channels().ensure(topics(description))
    {Tier.COLLECT: collect, Tier.LOAD: load, Tier.AUDIT: audit, Tier.DELIVER: deliver}[tier](
        description, wiring, stop, ready
    )


def collect(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Every source of the pipeline, each with a pump into its channel."""
    kafka = wiring.channels()
    pumps = {
        source.name: Pump(
            _source(source, wiring),
            source.into,
            kafka,
            heartbeats=description.heartbeats,
            bookmarks=description.bookmarks,
            dead=description.channels[source.into].dead,
            key=source.key[0] if len(source.key) == 1 else source.key or None,
        )
        for source in description.sources
    }

    def figures() -> Figures:
        return {"nodes": {f"source:{name}": _state(pump.figures()) for name, pump in pumps.items()}}

    async def pump_all() -> None:
        asked = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(pump.run(asked)) for pump in pumps.values()]
            ready()
            await asyncio.to_thread(stop.wait)
            asked.set()
            await asyncio.wait(running)

    with pulse(kafka, description.status, Tier.COLLECT, figures):
        _unwrapped(lambda: asyncio.run(pump_all()))


def _source(source: SourceSpec, wiring: Wiring) -> WebSocketSource:
    url = wiring.address(source)
    if simulated(url) is not None:
        raise Misconfigured(
            f"source {source.name}",
            "it is simulated, and nobody started the simulation here",
            f'use "penstock run", or give the address of a feed: [sources] {source.name} = "ws://…"',
        )
    if not url.startswith(("ws://", "wss://")):
        raise Misconfigured(f"source {source.name}", f"{url} is no address of a feed", 'write "ws://…" or "wss://…"')
    return WebSocketSource(url, source.name, source.numbered, source.resume and source.numbered is not None)


def _state(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {**figures, "state": "connected" if figures["connected"] else "waiting", "note": figures["trouble"] or ""}


def load(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Every store of the pipeline, each with a loader from its channel."""
    kafka = wiring.channels()
    loaders = {
        store: Loader(kafka, store.channel, _store(store, description, wiring, kafka.topic_id(store.channel)))
        for store in description.stores
    }

    def figures() -> Figures:
        return {"nodes": {store_node(store.url, store.channel): loader.figures() for store, loader in loaders.items()}}

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
    with pulse(kafka, description.status, Tier.LOAD, figures):
        for thread in threads:
            thread.start()
        ready()
        for thread in threads:
            thread.join()
        stop.wait()
    if failures:
        raise failures[0]


def _store(store: StoreSpec, description: Description, wiring: Wiring, topic_id: str) -> RedisStore | LakeStore:
    if store.url.startswith(("redis://", "rediss://", "unix://")):
        url = wiring.redis.url if store.url == "redis://" else store.url
        return RedisStore(url, store.channel, store.ttl, topic_id)
    if store.url.startswith("delta://"):
        if store.ttl is not None:
            raise Misconfigured(
                f"store {store.url}", "a lake keeps everything: it has no time to live", "leave ttl out"
            )
        schema = description.channels[store.channel].schema
        return LakeStore(wiring.path(store.url), store.channel, schema, topic_id)
    raise Misconfigured(f"store {store.url}", "no store has such an address", 'the stores are "redis://…", "delta://…"')


def audit(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """The ledger of all channels of the pipeline, and its balance told every second."""
    kafka = wiring.channels()
    watched = []
    for channel in description.channels.values():
        watched.append(Watched(channel.name, Kind.RESULT if channel.result_of else Kind.SOURCE))
        if not channel.result_of:
            watched.append(Watched(channel.dead, Kind.DEAD))
    clock = SystemClock()
    rates = {one.channel: Rate(clock) for one in watched}

    def figures() -> Figures:
        # The pulse beats in a thread of its own, and a ledger belongs to the thread that opened it.
        with closing(Ledger(wiring.ledger, read_only=True)) as reader:
            told = balance(reader.content(), clock.now()).to_json()
        nodes = {f"channel:{one['channel']}": _counted(one, rates[one["channel"]]) for one in told["channels"]}
        return {"nodes": nodes, "balance": told}

    with closing(Ledger(wiring.ledger)) as ledger, pulse(kafka, description.status, Tier.AUDIT, figures):
        ready()
        Auditor(kafka, ledger, watched, description.heartbeats).run(stop)


def _counted(channel: Mapping[str, Any], rate: Rate) -> dict[str, Any]:
    rate.reach(channel["records"])
    return {
        "count": channel["records"],
        "rate": rate.per_second(),
        "lag": None,
        "latency": channel["latency"],
        "state": "missing" if channel["missing"] else "whole",
        "note": f"{channel['duplicates']} duplicates, {channel['missing']} missing",
    }


def deliver(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """The page, and a feed for each result."""
    kafka = wiring.channels()
    feeds = [
        FeedSpec(channel.name, channel.name, kafka.topic_id(channel.name), channel.keep)
        for channel in description.channels.values()
        if channel.result_of
    ]
    app = build(
        kafka,
        feeds,
        [_chart(page) for page in description.pages],
        graph(description, wiring),
        description.status,
        description.name,
        settings=wiring.page,
        cache=wiring.state / "cache",
    )

    async def serve_all() -> None:
        asked = asyncio.Event()
        server = asyncio.create_task(serve(app, wiring.page.host, wiring.page.port or 0, asked, lambda _: ready()))
        stopping = asyncio.create_task(asyncio.to_thread(stop.wait))
        await asyncio.wait((server, stopping), return_when=asyncio.FIRST_COMPLETED)
        asked.set()
        stop.set()
        await server

    with pulse(kafka, description.status, Tier.DELIVER, lambda: {"nodes": app.state.delivery.figures()}):
        asyncio.run(serve_all())


def _chart(page: PageSpec) -> ChartSpec:
    made: Any = page.chart
    if callable(made) and not hasattr(made, "to_dict"):
        made = made()
    if hasattr(made, "to_dict"):
        made = made.to_dict()
    if not isinstance(made, Mapping):
        raise Misconfigured(
            f"page {page.channel}", f"its chart is {type(made).__name__}", "give a Vega-Lite dict or an Altair chart"
        )
    return ChartSpec(page.channel, page.channel, page.title, page.doc, {"data": {"name": "rows"}, **made})


def _unwrapped(work: Callable[[], None]) -> None:
    """Run; of a group of errors, raise the one that tells."""
    try:
        work()
    except BaseExceptionGroup as group:
        known, _ = group.split(PenstockError)
        raise (known or group).exceptions[0] from group
