"""The channels of a pipeline, brought about by whichever tier comes first."""

import logging

from penstock.contracts import Channels
from penstock.pipeline.description import Description
from penstock.pipeline.wiring import topics

log = logging.getLogger(__name__)


def bring_about(channels: Channels, description: Description) -> None:
    """Make and extend what is declared; what is there and different is told, and stays as it is."""
    done = channels.ensure(topics(description))
    for name in done.extended:
        log.warning("channel %s has more partitions now: some keys lie in others than before", name)
    for difference in done.differences:
        log.warning("%s; it stays as it is", difference)
