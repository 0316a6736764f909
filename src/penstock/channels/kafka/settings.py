"""`[kafka]` in penstock.toml."""

from typing import Literal

from pydantic import Field

from penstock.core.settings import Section


class KafkaSettings(Section):
    replicas: int | None = Field(
        None, ge=1, description="copies of each record; empty: three, or one per broker if there are fewer"
    )
    compression: Literal["none", "lz4", "snappy", "zstd", "gzip"] = "lz4"
    conf: dict[str, str] = Field(default_factory=dict, description="settings of librdkafka, by their own names")
