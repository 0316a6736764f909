"""`[kafka]` of penstock.toml."""

from typing import Literal

from pydantic import Field

from penstock.core.settings import Section


class KafkaSettings(Section):
    replicas: int | None = Field(
        None, ge=1, description="copies of each record; empty: three, or as many as there are brokers"
    )
    compression: Literal["none", "lz4", "snappy", "zstd", "gzip"] = "lz4"
    conf: dict[str, str] = Field(default_factory=dict, description="settings of the client itself, by their own names")
