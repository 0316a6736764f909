"""The configuration of an environment: the sections of penstock.toml, and the addresses and paths that follow."""

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
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.settings import Section, load
from penstock.core.text import SIMULATED
from penstock.deliver.delivery import DeliverSettings
from penstock.gateway.settings import GatewaySettings
from penstock.pipeline.description import Channel, Description, SourceSpec
from penstock.supervise.folder import NAME, LocalSettings

LOCAL = "local"
LOCALS = ("kafka://", "redis://")
"""Addresses of services that a run starts itself."""


class ChannelSettings(Section):
    """The middleware of the channels."""

    address: str = Field(
        "kafka://",
        description="kafka://host:port,…, redis://host:port/db, file://PATH or tcp://host:port; "
        "without a host: a service that the run starts",
    )
    lost: Literal["stop", "skip"] = Field(
        "stop",
        description="what a reader does if retention has removed its next records: "
        "stop; or skip, and the audit counts them as missing",
    )


class CollectSettings(Section):
    spool: int = Field(
        1 << 30,
        ge=0,
        description="bytes of disk per source for records while its channel is not available; 0: the source waits",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes at the port of each source that listens; the first one runs all other sources",
    )
    worker: int = Field(0, ge=0, description="the number of this process; set by penstock run")
    standby: bool = Field(
        False,
        description="several collectors can run, on several machines: one collects, and if it fails, "
        "another takes over",
    )


class RedisSettings(Section):
    url: str = Field(LOCAL, description="redis://host:port/db; local: a server that the run starts")


class PageSettings(DeliverSettings):
    host: str = Field("127.0.0.1", description="the address at which the page is served")
    port: int | None = Field(None, ge=1, le=65535, description="its port; empty: 8787 if it is free, otherwise any")


class SourceSettings(Section):
    """Other addresses of sources, by their names."""

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
    """The folder of the pipeline. Relative paths start here."""
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

    def with_services(self, kafka: str | None, redis: str | None) -> "Config":
        """This configuration with local services: Kafka's brokers, and the address of Redis."""
        url, address = self.redis.url, self.channels.address
        if url == LOCAL and redis is not None:
            url = redis
        if address == "kafka://" and kafka is not None:
            address = f"kafka://{kafka}"
        elif address == "redis://" and url != LOCAL:
            address = url
        return self.with_addresses(address, url)

    def with_addresses(self, address: str, redis: str) -> "Config":
        """This configuration with other addresses of the channels and of Redis."""
        return replace(
            self,
            channels=self.channels.model_copy(update={"address": address}),
            redis=self.redis.model_copy(update={"url": redis}),
        )

    def bind(self) -> Channels:
        """The channels; Misconfigured if their address is that of a service that a run starts."""
        address = self.with_services(None, None).channels.address
        if address in LOCALS:
            raise Misconfigured(
                "[channels] address",
                f"it is {address}, but no such service runs here",
                "set the address of the service",
            )
        base, separator, options = address.partition("?")
        if base.startswith("file://") and not base.startswith("file:///"):
            relative = unquote(base.removeprefix("file://"))
            folder = self.folder.resolve() / (relative or f"{NAME}/channels")
            address = f"{folder.as_uri()}{separator}{options}"
        return bind(address, self.kafka)

    def source_address(self, source: SourceSpec) -> str:
        """The address of a source: that of the settings, else that of the pipeline."""
        addresses = self.sources.model_extra or {}
        # Names from environment variables are in lower case.
        return str(addresses.get(source.name.lower(), addresses.get(source.name, source.url)))

    def lake_path(self, url: str) -> str:
        """The path of a lake, `delta://PATH`: relative to the pipeline, absolute, or on an object store."""
        rest = url.removeprefix("delta://")
        return rest if "://" in rest else str(self.folder / rest)


def parse_simulation(url: str) -> tuple[str, dict[str, str]] | None:
    """The name and options of `simulate://NAME?rate=200&no-resume&…`; None for any other address."""
    parts = urlsplit(url)
    if parts.scheme != SIMULATED:
        return None
    return parts.netloc, {name: values[-1] for name, values in parse_qs(parts.query, True).items()}


def topics(description: Description) -> list[Topic]:
    """All topics of a pipeline."""
    found = []
    for channel in description.channels.values():
        found.append(_topic(channel))
        if not channel.result_of:
            found.append(Topic(channel.dead, 1, channel.replicas, config=_dead_letter_config(channel.config)))
    found += [
        Topic(description.heartbeats, retention=timedelta(days=7)),
        Topic(description.bookmarks, compacted=True),
        Topic(description.status, compacted=True),
    ]
    return found


def _dead_letter_config(config: Mapping[str, str]) -> Mapping[str, str]:
    """A dead letter is a whole record with the reason, so it may be larger."""
    size = config.get(_MAX_SIZE, "")
    return {_MAX_SIZE: str(int(size) + _REASON_SIZE)} if size.isdigit() and int(size) > _DEFAULT_SIZE else {}


def _topic(channel: Channel) -> Topic:
    if channel.result_of is None:
        return Topic(
            channel.name, channel.partitions, channel.replicas, channel.compacted, channel.retention, channel.config
        )
    # At least a day, so that a store that was down for hours still finds all rows.
    retention = None if channel.retention is None else max(channel.retention, _SHORTEST_RETENTION)
    return Topic(channel.name, channel.partitions, channel.replicas, True, retention)


_SHORTEST_RETENTION = timedelta(days=1)
_MAX_SIZE, _DEFAULT_SIZE, _REASON_SIZE = "max.message.bytes", 1 << 20, 1 << 16
