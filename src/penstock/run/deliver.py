"""The delivery tier."""

import asyncio
import threading
from datetime import timedelta

from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.deliver.app import build, serve
from penstock.deliver.delivery import FeedSpec
from penstock.deliver.feed import MAX_ABSENCE
from penstock.deliver.site import ChartSpec
from penstock.pipeline.config import Config
from penstock.pipeline.description import ROWS, Channel, Description, PageSpec
from penstock.pipeline.graph import graph
from penstock.run.accounts import accounting
from penstock.run.status import report_status
from penstock.run.tier import Ready, Tier, wait_until_set
from penstock.supervise.java import cache_folder
from penstock.web.server import wait_first


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    channels = config.bind()
    feeds = [
        FeedSpec(name, name, channels.topic_id(name), channel.retention, _start(channels, channel))
        for name, channel in description.channels.items()
        if channel.result_of
    ]
    app = build(
        channels,
        feeds,
        [chart_of(page) for page in description.pages],
        graph(description, config),
        description.status,
        description.name,
        settings=config.page,
        cache=cache_folder().parent / "page",
        bookmarks=description.bookmarks,
    )

    async def serve_all() -> None:
        stopping, page = asyncio.Event(), config.page
        server = asyncio.create_task(serve(app, page.host, page.port or 0, stopping, lambda _: ready()))
        await wait_first(server, wait_until_set(stop))
        stopping.set()
        await server

    with (
        report_status(channels, description.status, Tier.DELIVER, lambda: {"nodes": app.state.delivery.figures()}),
        accounting(channels, description.bookmarks, app.state.delivery.accounts),
    ):
        asyncio.run(serve_all())


def _start(channels: Channels, channel: Channel) -> Offsets:
    """Where reading begins: older entries are expired, and no client may resume before them."""
    if channel.retention is None:
        return {}
    microseconds = (channel.retention + 2 * MAX_ABSENCE) // timedelta(microseconds=1)
    return channels.since(channel.name, SystemClock().now() - microseconds)


def chart_of(page: PageSpec) -> ChartSpec:
    spec = page.spec()
    if spec is not None:
        spec = {"data": {"name": ROWS}, **spec}
    return ChartSpec(page.channel, page.channel, page.title, page.doc, spec)
