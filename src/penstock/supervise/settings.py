"""Settings of the local services."""

from typing import Literal

from pydantic import Field, field_validator

from penstock.core.settings import Section


class LocalSettings(Section):
    """Kafka and Redis as `penstock run` starts them. Without a port it takes a free one, and keeps it."""

    brokers: int | None = Field(default=None, description="1, 3 or 5; empty: the number of the existing cluster, or 1")
    kafka_port: int | None = Field(default=None, ge=1, le=65535)
    kafka_memory: str = Field(default="384m", pattern=r"^[1-9][0-9]*[mg]$")
    redis_port: int | None = Field(default=None, ge=1, le=65535)
    reserve: int = Field(
        256 << 20,
        ge=0,
        description="bytes that have to stay free on the disk of the state folder; "
        "below that, sources wait and an alarm is raised",
    )
    redis_fsync: Literal["everysec", "always"] = "everysec"

    @field_validator("brokers")
    @classmethod
    def _odd(cls, brokers: int | None) -> int | None:
        if brokers not in (None, 1, 3, 5):
            raise ValueError("use 1, 3 or 5: a cluster of 2F + 1 brokers survives the loss of F")
        return brokers
