"""The collection tier: every source of a pipeline, each with a pump into its channel."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from penstock.audit.account import Account, Outcome, Share
from penstock.channels.kafka import Kafka
from penstock.collect.ingest import DEFAULT_RECORD_BYTES, IngestLoop
from penstock.collect.numbers import other_collectors
from penstock.collect.shedding import shedding
from penstock.collect.standby import LeaderLease, run_as_leader
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Source, SourceContext, Topic
from penstock.core.errors import Misconfigured, PenstockError
from penstock.pipeline.config import Config, parse_simulation
from penstock.pipeline.description import Description, SourceSpec
from penstock.pipeline.sources import can_be_shared, make_source, worker_name
from penstock.run.accounts import accounting
from penstock.run.spools import forward, orphaned, spool_of
from penstock.run.status import Figures, Status, follow_status, report_status
from penstock.run.tier import Ready, Tier, wait_until_set
from penstock.supervise.limits import DiskSpace

_TRY_FOR = 60.0
"""Seconds that sources have at the start, until the tier is ready without them."""


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Every source of the pipeline, each with a pump into its channel; another worker, those that listen."""
    # Records come and go by the thousand and refer to nothing: to look for cycles among them so often is in vain.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    channels, clock, worker = config.bind(), SystemClock(), config.collect.worker
    specs = [source for source in description.sources if not worker or can_be_shared(source, config)]
    space = DiskSpace(config.state, config.local.reserve)
    abandoned = [] if worker else orphaned(description, config, channels)
    with ExitStack() as stack:
        lags = stack.enter_context(_lags(description, channels))
        pumps = {
            name: IngestLoop(
                _shed(source, _source(source, name, description, config, channels), lags),
                source.into,
                channels,
                heartbeats=description.heartbeats,
                bookmarks=description.bookmarks,
                dead=description.channels[source.into].dead,
                key=source.partition_by[0] if len(source.partition_by) == 1 else source.partition_by or None,
                max_record_bytes=limit(channels, source.into),
                max_bookmark_bytes=limit(channels, description.bookmarks),
                spool=spool_of(name, config, channels),
                is_other_collector=other_collectors(
                    name, [one.name for one in description.sources if one.into == source.into]
                ),
                pause_reason=space.shortage,
            )
            for source in specs
            for name in [worker_name(source.name, worker)]
        }

        def figures() -> Figures:
            nodes = {f"source:{name}": _state(pump.figures()) for name, pump in pumps.items()}
            return {"nodes": nodes, "disk": space.figures()}

        def accounts() -> list[Account]:
            """What was dropped before the channel; what came into it, the audit counts there."""
            return [
                Account(
                    f"source:{name}",
                    description.name,
                    clock.now(),
                    {source.into: Share({}, {}, total_duplicates, {Outcome.DUPLICATE: total_duplicates})},
                    step=total_duplicates,
                )
                for source, (name, pump) in zip(specs, pumps.items(), strict=True)
                if (total_duplicates := pump.total_duplicates)
            ]

        async def collect() -> None:
            asked = asyncio.Event()

            async def pump_all() -> None:
                # First, so that it is in the channel when the others look what is there, and before what comes now.
                for spool in abandoned:
                    await forward(spool, channels, asked)
                async with asyncio.TaskGroup() as tasks:
                    for pump in pumps.values():
                        tasks.create_task(pump.run(asked))

            async with asyncio.TaskGroup() as tasks:
                seat = _seat(description, config, channels)
                pumping = tasks.create_task(pump_all() if seat is None else run_as_leader(seat, pump_all))
                if seat is None:
                    # Who cannot listen where it is told to is not ready, and says why.
                    await _tried(pumps.values(), stop)
                ready()
                await wait_until_set(stop)
                asked.set()
                if seat is not None and not any(pump.figures()["connected"] for pump in pumps.values()):
                    # Nobody collects here: there is nothing that would have to arrive.
                    pumping.cancel()
                await asyncio.wait((pumping,))

        stack.enter_context(
            report_status(channels, description.status, f"{Tier.COLLECT}-{worker}" if worker else Tier.COLLECT, figures)
        )
        stack.enter_context(accounting(channels, description.bookmarks, accounts))
        _unwrapped(lambda: asyncio.run(collect()))


def _seat(description: Description, config: Config, channels: Channels) -> LeaderLease | None:
    """What a collector has to hold that has others standing by."""
    if not config.collect.standby:
        return None
    name = worker_name(f"penstock.{description.name}.seat", config.collect.worker)
    channels.ensure([Topic(name)])
    return LeaderLease(channels, name, name)


Lags = Callable[[str], int]
"""How far the slowest query is behind in a channel."""


@contextmanager
def _lags(description: Description, channels: Channels) -> Iterator[Lags]:
    """What the queries say of themselves, where a source wants to know it."""
    if not any(source.shed and source.shed.lag for source in description.sources):
        yield lambda channel: 0
        return
    with follow_status(channels, description.status) as processes:

        def behind(channel: str) -> int:
            nodes = Status(dict(processes)).nodes
            readers = [query for query in description.queries if channel in query.inputs]
            told = (nodes.get(f"query:{query.name}", {}).get("lag") for query in readers)
            return max((int(lag) for lag in told if lag), default=0)

        yield behind


def _shed(spec: SourceSpec, source: Source, lags: Lags) -> Source:
    return source if spec.shed is None else shedding(source, spec.shed, partial(lags, spec.into))


def _source(spec: SourceSpec, name: str, description: Description, config: Config, channels: Channels) -> Source:
    if parse_simulation(config.source_address(spec)) is not None:
        raise Misconfigured(
            f"source {spec.name}",
            "it is simulated, and nobody started the simulation here",
            f'use "penstock run", or give the address of a feed: [sources] {spec.name} = "ws://…"',
        )
    dead = description.channels[spec.into].dead
    home = SourceContext(channels, spec.into, dead, description.bookmarks, config.state)
    return make_source(spec, config, description.delivery, os.environ, home, name)


def limit(channels: Channels, channel: str) -> int:
    """How many bytes a record may have there, with its key: what the topic takes, less room for headers and frames."""
    told = channels.limit(channel) if isinstance(channels, Kafka) else None
    # The name of a sender has up to 200 characters; a cursor, which lies in the headers, too, can be longer.
    return DEFAULT_RECORD_BYTES if told is None else max(0, told - max(told // 8, 1_024))


def _state(figures: Mapping[str, Any]) -> dict[str, Any]:
    if figures["done"]:
        return {**figures, "state": "done", "note": "it has given all that it had"}
    if figures["paused"]:
        return {**figures, "state": "waiting", "note": figures["paused"]}
    note = figures["trouble"] or ""
    if figures.get("away"):
        note = f"its channel is away: {figures['spooled']:,} records wait on disk"
    return {**figures, "state": "connected" if figures["connected"] else "waiting", "note": note}


async def _tried(pumps: Collection[IngestLoop], stop: threading.Event) -> None:
    """Wait until each source was opened or could not be. Not for ever: what the channels hold may be long to read."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_TRY_FOR):
            while not stop.is_set() and not all(pump.attempted for pump in pumps):  # noqa: ASYNC110 (as in until_set)
                await asyncio.sleep(0.02)


def _unwrapped(work: Callable[[], None]) -> None:
    """Run; of a group of errors, raise the one that tells."""
    try:
        work()
    except BaseExceptionGroup as group:
        known, _ = group.split(PenstockError)
        error: BaseException = known or group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
