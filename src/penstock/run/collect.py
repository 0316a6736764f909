"""The collection tier: each source of a pipeline with an ingest loop into its channel."""

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
from penstock.collect.shedding import Shedding
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
from penstock.supervise.folder import DiskSpace

_START_TIMEOUT = 60.0
"""Seconds to wait at the start for sources; then the tier is ready without them."""


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Run all sources of the pipeline; a further worker runs those that listen."""
    # Records have no reference cycles: collect garbage less often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    channels, clock, worker = config.bind(), SystemClock(), config.collect.worker
    specs = [source for source in description.sources if not worker or can_be_shared(source, config)]
    space = DiskSpace(config.state, config.local.reserve)
    abandoned = [] if worker else orphaned(description, config, channels)
    with ExitStack() as stack:
        lags = stack.enter_context(_lags(description, channels))
        loops = {
            name: IngestLoop(
                _source(source, name, description, config, channels, lags),
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
            nodes = {f"source:{name}": _state(loop.figures()) for name, loop in loops.items()}
            return {"nodes": nodes, "disk": space.figures()}

        def accounts() -> list[Account]:
            """The duplicates that were dropped before the channel. The audit counts what is in the channel."""
            return [
                Account(
                    f"source:{name}",
                    description.name,
                    clock.now(),
                    {source.into: Share({}, {}, total_duplicates, {Outcome.DUPLICATE: total_duplicates})},
                    step=total_duplicates,
                )
                for source, (name, loop) in zip(specs, loops.items(), strict=True)
                if (total_duplicates := loop.total_duplicates)
            ]

        async def collect() -> None:
            stopping = asyncio.Event()

            async def run_all() -> None:
                # First: the other loops then see these records in the channel.
                for spool in abandoned:
                    await forward(spool, channels, stopping)
                async with asyncio.TaskGroup() as tasks:
                    for loop in loops.values():
                        tasks.create_task(loop.run(stopping))

            async with asyncio.TaskGroup() as tasks:
                lease = _lease(description, config, channels)
                running = tasks.create_task(run_all() if lease is None else run_as_leader(lease, run_all))
                if lease is None:
                    # A source that cannot listen at its address is not ready, and fails.
                    await _attempted(loops.values(), stop)
                ready()
                await wait_until_set(stop)
                stopping.set()
                if lease is not None and not any(loop.figures()["connected"] for loop in loops.values()):
                    # This process is not the leader: it has nothing in flight.
                    running.cancel()
                await asyncio.wait((running,))

        stack.enter_context(
            report_status(channels, description.status, f"{Tier.COLLECT}-{worker}" if worker else Tier.COLLECT, figures)
        )
        stack.enter_context(accounting(channels, description.bookmarks, accounts))
        _unwrapped(lambda: asyncio.run(collect()))


def _lease(description: Description, config: Config, channels: Channels) -> LeaderLease | None:
    """The lease of the leader, if there are standby collectors."""
    if not config.collect.standby:
        return None
    name = worker_name(f"penstock.{description.name}.seat", config.collect.worker)
    channels.ensure([Topic(name)])
    return LeaderLease(channels, name, name)


Lags = Callable[[str], int]
"""The lag of the slowest query in a channel."""


@contextmanager
def _lags(description: Description, channels: Channels) -> Iterator[Lags]:
    """The lag that queries report, if a source needs it."""
    if not any(source.shed and source.shed.lag for source in description.sources):
        yield lambda channel: 0
        return
    with follow_status(channels, description.status) as processes:

        def behind(channel: str) -> int:
            nodes = Status(dict(processes)).nodes
            readers = [query for query in description.queries if channel in query.inputs]
            max_bytes = (nodes.get(f"query:{query.name}", {}).get("lag") for query in readers)
            return max((int(lag) for lag in max_bytes if lag), default=0)

        yield behind


def _source(
    spec: SourceSpec, name: str, description: Description, config: Config, channels: Channels, lags: Lags
) -> Source:
    if parse_simulation(config.source_address(spec)) is not None:
        raise Misconfigured(
            f"source {spec.name}",
            "it is simulated, but the simulation is not running",
            f'use "penstock run", or set the address of a feed: [sources] {spec.name} = "ws://…"',
        )
    dead = description.channels[spec.into].dead
    context = SourceContext(channels, spec.into, dead, description.bookmarks, config.state)
    source = make_source(spec, config, description.delivery, os.environ, context, name)
    return source if spec.shed is None else Shedding(source, spec.shed, partial(lags, spec.into))


def limit(channels: Channels, channel: str) -> int:
    """The bytes of a record with its key: the limit of the topic, less space for headers."""
    max_bytes = channels.limit(channel) if isinstance(channels, Kafka) else None
    # A sender name has up to 200 characters; a cursor can be longer.
    return DEFAULT_RECORD_BYTES if max_bytes is None else max(0, max_bytes - max(max_bytes // 8, 1_024))


def _state(figures: Mapping[str, Any]) -> dict[str, Any]:
    if figures["done"]:
        return {**figures, "state": "done", "note": "the source has ended"}
    if figures["paused"]:
        return {**figures, "state": "waiting", "note": figures["paused"]}
    note = figures["trouble"] or ""
    if figures.get("away"):
        note = f"its channel is not available: {figures['spooled']:,} records are spooled"
    return {**figures, "state": "connected" if figures["connected"] else "waiting", "note": note}


async def _attempted(loops: Collection[IngestLoop], stop: threading.Event) -> None:
    """Wait until each source was opened or an attempt has failed, with a timeout: recovery can take long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_TIMEOUT):
            while not stop.is_set() and not all(loop.attempted for loop in loops):  # noqa: ASYNC110 (as in until_set)
                await asyncio.sleep(0.02)


def _unwrapped(work: Callable[[], None]) -> None:
    """Run, and raise the first known error of an exception group."""
    try:
        work()
    except BaseExceptionGroup as group:
        expected, _ = group.split(PenstockError)
        error: BaseException = expected or group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
