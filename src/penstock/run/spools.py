"""Where the records of a pipeline wait on disk: the spool of each source, and those that no source has any more."""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.dedup import SpoolDedup
from penstock.collect.reconnecting import backoff
from penstock.collect.spool import Spool
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.core.scan import scan
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.sources import can_be_shared, worker_name

log = logging.getLogger(__name__)

_UNSET = (
    "as it is set now nobody brings them to their channel",
    "run it with the channels that it had, [collect] spool above 0 and no standby, until none waits",
)
"""Why records stay where they wait, and the way out."""
_LONG_BEFORE = 300 * 1_000_000
"""Microseconds: clocks differ, too."""


def spool_of(name: str, config: Config, channels: Channels) -> Spool | None:
    """Where its records wait while the channels are away, which those in files of this machine never are.

    Not beside a standby: what waits on the disk of one machine the other does not know, and would take once more.
    """
    # A tier that was started alone has no folder yet.
    config.state.mkdir(exist_ok=True)
    spool = _spool(name, config)
    if _used(config, channels):
        return spool
    if next(spool.records(), None):
        why, fix = _UNSET
        raise Misconfigured(f"source {name}", f"records that were acknowledged wait on disk, and {why}", fix)
    return None


def left(description: Description, config: Config, channels: Channels) -> list[Spool]:
    """Spools whose source or worker is no more, and in which records wait all the same.

    Misconfigured when they are for a channel that is not of this pipeline, or spools are not used now.
    """
    workers = {
        source.name: config.collect.workers if can_be_shared(source, config) else 1 for source in description.sources
    }
    names = {worker_name(name, worker) for name, count in workers.items() for worker in range(count)}
    ours = {topic.name for topic in topics(description)}
    in_channel = []
    for spool in waiting(config):
        if spool.name in names or _held(spool):
            continue
        into = Counter(channel for channel, _ in spool.records())
        why, fix = "", ""
        if not _used(config, channels):
            why, fix = _UNSET
        elif foreign := sorted(into.keys() - ours):
            why = f"{', '.join(foreign)} is no channel of this pipeline"
            fix = "declare it, or run the pipeline that has it, until none waits"
        if why:
            problem = f"{into.total():,} records that were acknowledged wait there, and {why}"
            raise Misconfigured(str(_folder(config) / spool.name), problem, fix)
        in_channel.append(spool)
    return in_channel


def waiting(config: Config) -> Iterator[Spool]:
    """Those in which records wait, whoever they belong to."""
    folder = _folder(config)
    for name in SqliteChannels(folder).names() if folder.exists() else ():
        spool = _spool(name, config)
        if next(spool.records(), None):
            yield spool


async def bring(spool: Spool, channels: Channels, stop: asyncio.Event) -> None:
    """Bring what waits there into its channels; what does not arrive before `stop` goes on waiting."""
    log.warning("%s: nobody collects by this name any more; what waits on disk is brought to its channel", spool.name)
    bringing, stopping = asyncio.create_task(_brought(spool, channels)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((bringing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if bringing.done():
            bringing.result()
    finally:
        bringing.cancel()
        stopping.cancel()
        await asyncio.gather(bringing, return_exceptions=True)


async def _brought(spool: Spool, channels: Channels) -> None:
    for delay in backoff():
        try:
            sought = await asyncio.to_thread(_sought, spool, channels)
            break
        except Unavailable:
            await asyncio.sleep(delay)
    async with channels.sender() as sender, spool.open(sender, sought.in_channel) as spooling:
        await spooling.forwarded()


def _sought(spool: Spool, channels: Channels) -> SpoolDedup:
    """Which of them their channels hold: they were on their way, too, not long before the first one came to disk."""
    sought, since = SpoolDedup(spool.records()), max(0, (spool.oldest() or 0) - _LONG_BEFORE)
    for channel in {channel for channel, _ in spool.records()}:
        for entry in scan(channels, channel, channels.since(channel, since)):
            if (origin := Origin.read(entry.headers)) is not None:
                sought.observe(channel, origin)
    return sought


def _used(config: Config, channels: Channels) -> bool:
    alone = not config.collect.standby
    return alone and config.collect.spool > 0 and channels.promise.durable and not isinstance(channels, SqliteChannels)


def _held(spool: Spool) -> bool:
    """Another collector has it open, such as that of another pipeline in this folder."""
    with suppress(Misconfigured), spool.disk.hold(spool.name):
        return False
    return True


def _spool(name: str, config: Config) -> Spool:
    return Spool(SqliteChannels(_folder(config)), name, config.collect.spool, free=partial(_free, config.state))


def _folder(config: Config) -> Path:
    return config.state / "spool"


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
