"""The collection tier: every source of a pipeline, each with a pump into its channel."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.audit.account import Account, Outcome, Share
from penstock.channels.files import Files
from penstock.clock import SystemClock
from penstock.collect.pump import Pump
from penstock.collect.spooling import Spool
from penstock.collect.websocket import WebSocketSource
from penstock.contracts import Channels
from penstock.errors import Misconfigured, PenstockError
from penstock.pipeline.accounts import accounting
from penstock.pipeline.delivery import resumes
from penstock.pipeline.description import Delivery, Description, SourceSpec
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.tiers import Ready, Tier
from penstock.pipeline.tiers.waiting import until_set
from penstock.pipeline.wiring import Wiring, simulated


def run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Every source of the pipeline, each with a pump into its channel."""
    channels, clock = wiring.bind(), SystemClock()
    pumps = {
        source.name: Pump(
            _source(source, wiring, description.delivery),
            source.into,
            channels,
            heartbeats=description.heartbeats,
            bookmarks=description.bookmarks,
            dead=description.channels[source.into].dead,
            key=source.key[0] if len(source.key) == 1 else source.key or None,
            spool=_spool(source, wiring, channels),
        )
        for source in description.sources
    }

    def figures() -> Figures:
        return {"nodes": {f"source:{name}": _state(pump.figures()) for name, pump in pumps.items()}}

    def accounts() -> list[Account]:
        """What was dropped before the channel; what came into it, the audit counts there."""
        return [
            Account(
                f"source:{source.name}",
                description.name,
                clock.now(),
                {source.into: Share({}, {}, doubled, {Outcome.DUPLICATE: doubled})},
                step=doubled,
            )
            for source in description.sources
            if (doubled := pumps[source.name].doubled)
        ]

    async def pump_all() -> None:
        asked = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(pump.run(asked)) for pump in pumps.values()]
            ready()
            await until_set(stop)
            asked.set()
            await asyncio.wait(running)

    with (
        pulse(channels, description.status, Tier.COLLECT, figures),
        accounting(channels, description.bookmarks, accounts),
    ):
        _unwrapped(lambda: asyncio.run(pump_all()))


def _source(source: SourceSpec, wiring: Wiring, delivery: Delivery) -> WebSocketSource:
    url = wiring.address(source)
    if simulated(url) is not None:
        raise Misconfigured(
            f"source {source.name}",
            "it is simulated, and nobody started the simulation here",
            f'use "penstock run", or give the address of a feed: [sources] {source.name} = "ws://…"',
        )
    return WebSocketSource(url, source.name, source.numbered, resumes(source, delivery))


def _spool(source: SourceSpec, wiring: Wiring, channels: Channels) -> Spool | None:
    """Where its records wait while the channels are away, which those in files of this machine never are."""
    # A tier that was started alone has no folder yet.
    wiring.state.mkdir(exist_ok=True)
    spool = Spool(Files(wiring.state / "spool"), source.name, wiring.collect.spool)
    if wiring.collect.spool and channels.promise.durable and not isinstance(channels, Files):
        return spool
    if next(spool.waiting(), None):
        raise Misconfigured(
            f"source {source.name}",
            "records that were acknowledged wait on disk, and as it is set now nobody brings them to their channel",
            "run it with the channels that it had, and [collect] spool above 0, until none waits",
        )
    return None


def _state(figures: Mapping[str, Any]) -> dict[str, Any]:
    note = figures["trouble"] or ""
    if figures.get("away"):
        note = f"its channel is away: {figures['spooled']:,} records wait on disk"
    return {**figures, "state": "connected" if figures["connected"] else "waiting", "note": note}


def _unwrapped(work: Callable[[], None]) -> None:
    """Run; of a group of errors, raise the one that tells."""
    try:
        work()
    except BaseExceptionGroup as group:
        known, _ = group.split(PenstockError)
        raise (known or group).exceptions[0] from group
