"""The channels of a pipeline, brought about by whoever of its processes comes first."""

from collections.abc import Callable

from penstock.core.contracts import Channels
from penstock.pipeline.description import Description
from penstock.pipeline.wiring import topics


def bring_about(channels: Channels, description: Description, say: Callable[[str], None]) -> None:
    """Make and extend what is declared; what is there and different is told, and stays as it is."""
    done = channels.ensure(topics(description))
    if done.made:
        say(f"channels made: {len(done.made)}")
    for name in done.extended:
        say(f"channel {name} has more partitions now: some keys lie in others than before")
    for difference in done.differences:
        say(f"{difference}; it stays as it is")
