"""The spools of a pipeline: that of each source, and those whose source no longer exists."""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.spool import Spool, SpoolDedup
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured, Unavailable, backoff
from penstock.core.record import Origin
from penstock.core.scan import scan
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.sources import can_be_shared, worker_name

log = logging.getLogger(__name__)

_UNSET = (
    "with the current settings the collector does not send them to their channel",
    "run it with the former channels, [collect] spool above 0 and no standby, until the spool is empty",
)
"""The problem and its fix."""
_LONG_BEFORE = 300 * 1_000_000
"""Microseconds: clocks also differ."""


def spool_of(name: str, config: Config, channels: Channels) -> Spool | None:
    """The spool of a source; None if spools are not used: for channels on the local disk, or with a standby.

    The standby does not know the spool of the other machine, and would ingest its records again.
    """
    # A tier that is started alone has no folder yet.
    config.state.mkdir(exist_ok=True)
    spool = _spool(name, config)
    if _used(config, channels):
        return spool
    if next(spool.records(), None):
        why, fix = _UNSET
        raise Misconfigured(f"source {name}", f"acknowledged records wait on disk, and {why}", fix)
    return None


def orphaned(description: Description, config: Config, channels: Channels) -> list[Spool]:
    """The spools with records whose source or worker no longer exists.

    Misconfigured if they are for a channel of another pipeline, or spools are not used now.
    """
    workers = {
        source.name: config.collect.workers if can_be_shared(source, config) else 1 for source in description.sources
    }
    names = {worker_name(name, worker) for name, count in workers.items() for worker in range(count)}
    ours = {topic.name for topic in topics(description)}
    in_channel = []
    for spool in waiting(config):
        if spool.name in names or _is_held(spool):
            continue
        into = Counter(channel for channel, _ in spool.records())
        why, fix = "", ""
        if not _used(config, channels):
            why, fix = _UNSET
        elif foreign := sorted(into.keys() - ours):
            why = f"{', '.join(foreign)} is not a channel of this pipeline"
            fix = "declare it, or run its pipeline, until the spool is empty"
        if why:
            problem = f"{into.total():,} acknowledged records wait there, and {why}"
            raise Misconfigured(str(_folder(config) / spool.name), problem, fix)
        in_channel.append(spool)
    return in_channel


def waiting(config: Config) -> Iterator[Spool]:
    """All spools with records."""
    folder = _folder(config)
    for name in SqliteChannels(folder).names() if folder.exists() else ():
        spool = _spool(name, config)
        if next(spool.records(), None):
            yield spool


async def forward(spool: Spool, channels: Channels, stop: asyncio.Event) -> None:
    """Send the records of a spool to their channels, until it is empty or `stop` is set."""
    log.warning("%s: its source no longer exists; the records on disk are sent to their channel", spool.name)
    forwarding, stopping = asyncio.create_task(_send_all(spool, channels)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((forwarding, stopping), return_when=asyncio.FIRST_COMPLETED)
        if forwarding.done():
            forwarding.result()
    finally:
        forwarding.cancel()
        stopping.cancel()
        await asyncio.gather(forwarding, return_exceptions=True)


async def _send_all(spool: Spool, channels: Channels) -> None:
    for delay in backoff():
        try:
            sent = await asyncio.to_thread(_already_sent, spool, channels)
            break
        except Unavailable:
            await asyncio.sleep(delay)
    async with channels.sender() as sender, spool.open(sender, sent) as spooling:
        await spooling.forwarded()


def _already_sent(spool: Spool, channels: Channels) -> SpoolDedup:
    """The records that their channels have already: they were in flight shortly before the first was spooled."""
    sent, since = SpoolDedup(spool.records()), max(0, (spool.oldest() or 0) - _LONG_BEFORE)
    for channel in {channel for channel, _ in spool.records()}:
        for entry in scan(channels, channel, channels.since(channel, since)):
            if (origin := Origin.read(entry.headers)) is not None:
                sent.observe(channel, origin)
    return sent


def _used(config: Config, channels: Channels) -> bool:
    alone = not config.collect.standby
    return alone and config.collect.spool > 0 and channels.promise.durable and not isinstance(channels, SqliteChannels)


def _is_held(spool: Spool) -> bool:
    """Whether another collector has it open, such as that of another pipeline in this folder."""
    with suppress(Misconfigured), spool.disk.hold(spool.name):
        return False
    return True


def _spool(name: str, config: Config) -> Spool:
    return Spool(
        SqliteChannels(_folder(config)), name, config.collect.spool, free=lambda: shutil.disk_usage(config.state).free
    )


def _folder(config: Config) -> Path:
    return config.state / "spool"
