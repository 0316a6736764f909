"""The channels that a command works on: those at an address, or those of the pipeline that runs in a folder."""

from collections.abc import Sequence
from pathlib import Path

from penstock.audit.writers import protected
from penstock.channels.binders import bind
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, printable
from penstock.pipeline.config import Config
from penstock.run.services import with_running_services

INTERNAL = "penstock."
"""The prefix of channels and groups that pipelines use internally."""


def find_channels(folder: Path, profile: str | None, servers: str | None) -> Channels:
    """The channels at `servers` (an address, or host:port of Kafka), or those of the pipeline in the folder."""
    config = Config.read(folder, profile)
    if servers is None:
        return with_running_services(config).bind()
    return bind(servers if "://" in servers else f"kafka://{servers}", config.kafka)


def require_channels(channels: Channels, names: Sequence[str], *, create: bool = False, hint: str = "") -> None:
    """Misconfigured unless all of them exist. `create` creates those that are missing."""
    if not channels.promise.replay:
        channels.ensure([Topic(name) for name in names])
        return
    existing = channels.names()
    for name in names:
        if name in existing:
            continue
        if create:
            channels.ensure([Topic(name)])
            continue
        similar = f"{guess} Or " if (guess := did_you_mean(name, existing, "")) else ""
        raise Misconfigured(
            f"channel {printable(name)}",
            f"not found at {channels.where}",
            f"{similar}create it: penstock topics --create --topic {printable(name)}{hint}",
        )


def require_writable(channels: Channels, name: str) -> None:
    """Misconfigured for results, dead letters and internal channels: only the pipeline writes to them."""
    if (refusal := protected(name, channels)) is not None:
        raise Misconfigured(f"channel {printable(name)}", *refusal)
