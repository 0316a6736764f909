"""The wiring of an environment: every section of penstock.toml, and the places that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import ConfigDict, Field

from penstock.analysis.settings import SparkSettings
from penstock.audit.settings import AuditSettings
from penstock.channels.binders import bind
from penstock.channels.kafka.settings import KafkaSettings
from penstock.collect.settings import CollectSettings
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.settings import Section, load
from penstock.core.text import SIMULATED
from penstock.deliver.delivery import DeliverSettings
from penstock.gateway.settings import GatewaySettings
from penstock.pipeline.description import Channel, Description, SourceSpec
from penstock.supervise.folder import NAME
from penstock.supervise.settings import LocalSettings

LOCAL = "local"
LOCALS = ("kafka://", "redis://")
"""Addresses of what a run starts by itself."""


class ChannelSettings(Section):
    """`[channels]`: the middleware that holds them."""

    address: str = Field(
        "kafka://",
        description="kafka://host:port,…, redis://host:port/db, file://PATH or tcp://host:port; "
        "without a host: what a run starts and keeps here",
    )
    lost: Literal["stop", "skip"] = Field(
        "stop",
        description="what a reader does whose next records retention has removed: "
        "stop, for a person to look; or skip, and the audit counts them as missing",
    )


class RedisSettings(Section):
    url: str = Field(LOCAL, description="redis://host:port/db; local: a server that is started here")


class PageSettings(DeliverSettings):
    host: str = Field("127.0.0.1", description="the address at which the page is served")
    port: int | None = Field(None, ge=1, le=65535, description="its port; empty: 8787 if it is free, otherwise any")


class SourceSettings(Section):
    """`[sources]`: another address for a source, by its name."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, str]


SECTIONS: dict[str, type[Section]] = {
    "channels": ChannelSettings,
    "kafka": KafkaSettings,
    "redis": RedisSettings,
    "spark": SparkSettings,
    "page": PageSettings,
    "audit": AuditSettings,
    "gateway": GatewaySettings,
    "collect": CollectSettings,
    "sources": SourceSettings,
    "local": LocalSettings,
}


@dataclass(frozen=True)
class Config:
    folder: Path
    """Where the pipeline lives; relative paths begin here."""
    channels: ChannelSettings
    kafka: KafkaSettings
    redis: RedisSettings
    spark: SparkSettings
    page: PageSettings
    audit: AuditSettings
    gateway: GatewaySettings
    collect: CollectSettings
    sources: SourceSettings
    local: LocalSettings

    @classmethod
    def read(cls, folder: Path, profile: str | None = None, environ: Mapping[str, str] | None = None) -> "Config":
        return cls(folder, **cast(dict[str, Any], load(SECTIONS, folder, profile, environ)))

    @property
    def state(self) -> Path:
        return self.folder / NAME

    @property
    def checkpoints(self) -> str:
        return self.spark.checkpoints or str(self.state.absolute() / "checkpoints")

    @property
    def ledger(self) -> Path:
        return self.state / "audit" / "ledger.db"

    def at(self, kafka: str | None, redis: str | None) -> "Config":
        """The same wiring on services of this machine: Kafka's brokers, and the address of Redis."""
        url, address = self.redis.url, self.channels.address
        if url == LOCAL and redis is not None:
            url = redis
        if address == "kafka://" and kafka is not None:
            address = f"kafka://{kafka}"
        elif address == "redis://" and url != LOCAL:
            address = url
        return self.placed(address, url)

    def placed(self, address: str, redis: str) -> "Config":
        """The same wiring, with its channels and Redis at these addresses."""
        return replace(
            self,
            channels=self.channels.model_copy(update={"address": address}),
            redis=self.redis.model_copy(update={"url": redis}),
        )

    def bind(self) -> Channels:
        """The channels; Misconfigured where they are to be started here, and this is no run that does it."""
        address = self.at(None, None).channels.address
        if address in LOCALS:
            raise Misconfigured(
                "[channels] address", f"it is {address}, and nothing was started here", "give its address"
            )
        place, mark, options = address.partition("?")
        if place.startswith("file://") and not place.startswith("file:///"):
            told = unquote(place.removeprefix("file://"))
            folder = self.folder.resolve() / (told or f"{NAME}/channels")
            address = f"{folder.as_uri()}{mark}{options}"
        return bind(address, self.kafka)

    def address(self, source: SourceSpec) -> str:
        """Where a source is heard: the settings' word over the pipeline's."""
        told = self.sources.model_extra or {}
        # The environment knows names in lower case only.
        return str(told.get(source.name.lower(), told.get(source.name, source.url)))

    def path(self, url: str) -> str:
        """The place of a lake, `delta://PATH`: relative to the pipeline, absolute, or on an object store."""
        rest = url.removeprefix("delta://")
        return rest if "://" in rest else str(self.folder / rest)


def simulated(url: str) -> tuple[str, dict[str, str]] | None:
    """The name and options of `simulate://NAME?rate=200&no-resume&…`; None for the address of somebody real."""
    parts = urlsplit(url)
    if parts.scheme != SIMULATED:
        return None
    return parts.netloc, {name: values[-1] for name, values in parse_qs(parts.query, True).items()}


def topics(description: Description) -> list[Topic]:
    """Every topic that a pipeline needs."""
    found = []
    for channel in description.channels.values():
        found.append(_topic(channel))
        if not channel.result_of:
            found.append(Topic(channel.dead, 1, channel.replicas, config=_as_large(channel.config)))
    found += [
        Topic(description.heartbeats, retention=timedelta(days=7)),
        Topic(description.bookmarks, compacted=True),
        Topic(description.status, compacted=True),
    ]
    return found


def _as_large(config: Mapping[str, str]) -> Mapping[str, str]:
    """For dead letters: what a query refuses lies there whole, and with its reason."""
    told = config.get(_LARGEST, "")
    return {_LARGEST: str(int(told) + _REASON)} if told.isdigit() and int(told) > _USUAL else {}


def _topic(channel: Channel) -> Topic:
    if channel.result_of is None:
        return Topic(
            channel.name, channel.partitions, channel.replicas, channel.compacted, channel.retention, channel.config
        )
    # Rows that perish soon stay in the channel for a while: a store that is away for hours must still find them.
    keep = None if channel.retention is None else max(channel.retention, _LEAST)
    return Topic(channel.name, channel.partitions, channel.replicas, True, keep)


_LEAST = timedelta(days=1)
_LARGEST, _USUAL = "max.message.bytes", 1 << 20
_REASON = 1 << 16
