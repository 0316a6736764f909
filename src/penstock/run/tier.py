"""The tiers, each as it runs in a process of its own. Here the strangers are introduced to each other."""

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
    """Each is the function `run` in the module of its name."""

    COLLECT = "collect"
    ANALYSE = "analyse"
    LOAD = "load"
    AUDIT = "audit"
    DELIVER = "deliver"


Ready = Callable[[], None]


def run(tier: Tier, description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Run a tier until `stop`; `ready` is called once it does its work."""
    check(description, config)
    # Imported here: each tier has libraries of its own, and a process needs only one of them.
    module = importlib.import_module(f"penstock.run.{tier}")
    if tier is not Tier.ANALYSE:
        bring_about(config.bind(), description, log.info)
    module.run(description, config, stop, ready)


def bring_about(channels: Channels, description: Description, say: Callable[[str], None]) -> None:
    """Make and extend what is declared; what is there and different is told, and stays as it is."""
    done = channels.ensure(topics(description))
    if done.made:
        say(f"channels made: {len(done.made)}")
    for name in done.extended:
        say(f"channel {name} has more partitions now: some keys lie in others than before")
    for difference in done.differences:
        say(f"{difference}; it stays as it is")


async def until_set(stop: threading.Event) -> None:
    """Wait for an event of threads; a thread that waited for it could not be cancelled."""
    while not stop.is_set():  # noqa: ASYNC110 (an asyncio.Event belongs to its loop, the handler runs outside of it)
        await asyncio.sleep(0.05)
