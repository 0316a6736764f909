"""Runs a tier in its own process. The modules of this package connect the tiers."""

import asyncio
import importlib
import logging
import threading
from collections.abc import Callable
from enum import StrEnum

from penstock.core.contracts import Channels
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.plan.checks import check

log = logging.getLogger(__name__)


class Tier(StrEnum):
    """A tier is the function `run` of the module with its name."""

    COLLECT = "collect"
    ANALYSE = "analyse"
    LOAD = "load"
    AUDIT = "audit"
    DELIVER = "deliver"


Ready = Callable[[], None]


def run(tier: Tier, description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Run a tier until `stop` is set; call `ready` once it works."""
    check(description, config)
    # Imported here: each tier has its own libraries, and a process needs only those of one tier.
    module = importlib.import_module(f"penstock.run.{tier}")
    if tier is not Tier.ANALYSE:
        ensure_channels(config.bind(), description, log.info)
    module.run(description, config, stop, ready)


def ensure_channels(channels: Channels, description: Description, say: Callable[[str], None]) -> None:
    """Create and extend the declared channels; `say` gets the changes and the remaining differences."""
    result = channels.ensure(topics(description))
    if result.made:
        say(f"channels created: {len(result.made)}")
    for name in result.extended:
        say(f"channel {name} has more partitions now: some keys have another partition")
    for difference in result.differences:
        say(f"{difference}; it is not changed")


async def wait_until_set(stop: threading.Event) -> None:
    """Wait for a threading.Event in a way that can be cancelled."""
    while not stop.is_set():  # noqa: ASYNC110 (an asyncio.Event belongs to its loop, the handler runs outside of it)
        await asyncio.sleep(0.05)
