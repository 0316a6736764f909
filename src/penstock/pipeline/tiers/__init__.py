"""The tiers, each as it runs in a process of its own. Here the strangers are introduced to each other."""

import importlib
import logging
import threading
from collections.abc import Callable
from enum import StrEnum

from penstock.pipeline.checks import check
from penstock.pipeline.description import Description
from penstock.pipeline.tiers.topics import bring_about
from penstock.pipeline.wiring import Wiring

log = logging.getLogger(__name__)


class Tier(StrEnum):
    """Each is the function `run` in the module of its name."""

    COLLECT = "collect"
    ANALYSE = "analyse"
    LOAD = "load"
    AUDIT = "audit"
    DELIVER = "deliver"


Ready = Callable[[], None]


def run(tier: Tier, description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Run a tier until `stop`; `ready` is called once it does its work."""
    check(description, wiring)
    # Imported here: each tier has libraries of its own, and a process needs only one of them.
    module = importlib.import_module(f"penstock.pipeline.tiers.{tier}")
    if tier is not Tier.ANALYSE:
        bring_about(wiring.bind(), description, log.info)
    module.run(description, wiring, stop, ready)
