"""Which channels a command is about: those at an address, or those of what runs in a folder."""

from pathlib import Path

from penstock.channels.binders import bind
from penstock.core.contracts import Channels
from penstock.pipeline.services import here
from penstock.pipeline.wiring import Wiring


def found(folder: Path, profile: str | None, servers: str | None) -> Channels:
    """The channels at `servers` (an address, or host:port of a Kafka), or those of the folder."""
    wiring = Wiring.read(folder, profile)
    if servers is None:
        return here(wiring).bind()
    return bind(servers if "://" in servers else f"kafka://{servers}", wiring.kafka)
