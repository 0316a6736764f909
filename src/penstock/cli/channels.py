"""The channels that a command works on: those at an address, or those of the pipeline that runs in a folder."""

from collections.abc import Sequence
from pathlib import Path

from penstock.audit.writers import protected
from penstock.channels.binders import bind
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, printable
from penstock.pipeline.config import Config
from penstock.run.services import here

OURS = "penstock."
"""How the names begin of what pipelines keep for themselves."""


def found(folder: Path, profile: str | None, servers: str | None) -> Channels:
    """The channels at `servers` (an address, or host:port of a Kafka), or those of the folder."""
    config = Config.read(folder, profile)
    if servers is None:
        return here(config).bind()
    return bind(servers if "://" in servers else f"kafka://{servers}", config.kafka)


def there(channels: Channels, names: Sequence[str], *, create: bool = False, hint: str = "") -> None:
    """Return if the channels are there, or were made; Misconfigured with the way out otherwise."""
    if not channels.promise.replay:
        channels.ensure([Topic(name) for name in names])
        return
    known = channels.names()
    for name in names:
        if name in known:
            continue
        if create:
            channels.ensure([Topic(name)])
            continue
        close = f"{alike} Or " if (alike := did_you_mean(name, known, "")) else ""
        raise Misconfigured(
            f"channel {printable(name)}",
            f"there is none of that name at {channels.where}",
            f"{close}make it: penstock topics --create --topic {printable(name)}{hint}",
        )


def require_writable(channels: Channels, name: str) -> None:
    """Misconfigured for a result, for dead letters and for an internal channel: these have writers of their own."""
    if (refusal := protected(name, channels)) is not None:
        raise Misconfigured(f"channel {printable(name)}", *refusal)
