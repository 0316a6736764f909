"""The wiring of an environment: every section of penstock.toml, and the places that follow from it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from pydantic import ConfigDict, Field

from penstock.analysis.settings import SparkSettings
from penstock.audit.settings import AuditSettings
from penstock.channels.kafka import Kafka, KafkaSettings, Topic
from penstock.deliver.settings import DeliverSettings
from penstock.errors import Misconfigured
from penstock.pipeline.description import Channel, Description, SourceSpec
from penstock.settings import Section, load
from penstock.supervise.folder import NAME
from penstock.supervise.settings import LocalSettings

SIMULATED = "simulate"


class RedisSettings(Section):
    url: str = Field("local", description="redis://host:port/db; local: a server that is started here")


class PageSettings(DeliverSettings):
    host: str = Field("127.0.0.1", description="the address at which the page is served")
    port: int | None = Field(None, ge=1, le=65535, description="its port; empty: 8787 if it is free, otherwise any")


class SourceSettings(Section):
    """`[sources]`: another address for a source, by its name."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, str]


SECTIONS: dict[str, type[Section]] = {
    "kafka": KafkaSettings,
    "redis": RedisSettings,
    "spark": SparkSettings,
    "page": PageSettings,
    "audit": AuditSettings,
    "sources": SourceSettings,
    "local": LocalSettings,
}


@dataclass(frozen=True)
class Wiring:
    folder: Path
    """Where the pipeline lives; relative paths begin here."""
    kafka: KafkaSettings
    redis: RedisSettings
    spark: SparkSettings
    page: PageSettings
    audit: AuditSettings
    sources: SourceSettings
    local: LocalSettings

    @classmethod
    def read(cls, folder: Path, profile: str | None = None, environ: Mapping[str, str] | None = None) -> "Wiring":
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

    def channels(self) -> Kafka:
        if self.kafka.servers == "local":
            raise Misconfigured(
                "[kafka] servers", "it is local, and this is no run that starts one", "give its address"
            )
        return Kafka(self.kafka.servers, self.kafka)

    def address(self, source: SourceSpec) -> str:
        """Where a source is heard: the settings' word over the pipeline's."""
        told = self.sources.model_extra or {}
        # The environment knows names in lower case only.
        return str(told.get(source.name.lower(), told.get(source.name, source.url)))

    def path(self, url: str) -> str:
        """The place of a lake, `delta://PATH`: relative to the pipeline, absolute, or on an object store."""
        rest = url.removeprefix("delta://")
        return rest if "://" in rest else str(self.folder / rest)


def shown(url: str) -> str:
    """An address for the eyes of others: without the user, the password, or the token that it may hold."""
    bare = re.sub(r"://[^/?#]*@", "://", url)
    return bare if simulated(url) is not None else bare.partition("?")[0]


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
            found.append(Topic(channel.dead, 1, channel.replicas))
    found += [
        Topic(description.heartbeats, keep=timedelta(days=7)),
        Topic(description.bookmarks, compacted=True, config=_SHORT),
        Topic(description.status, compacted=True, config=_SHORT),
    ]
    return found


# Figures, accounts and results change all the time: small segments let the cleaner take the outdated ones away soon.
_SHORT = {"segment.ms": "600000", "segment.bytes": str(32 * 1024 * 1024), "min.cleanable.dirty.ratio": "0.3"}


def _topic(channel: Channel) -> Topic:
    if channel.result_of is None:
        return Topic(channel.name, channel.partitions, channel.replicas, keep=channel.keep)
    # Rows that perish soon stay in the channel for a while: a store that is away for hours must still find them.
    keep = None if channel.keep is None else max(channel.keep, _LEAST)
    return Topic(channel.name, channel.partitions, channel.replicas, True, keep, _SHORT)


_LEAST = timedelta(days=1)
