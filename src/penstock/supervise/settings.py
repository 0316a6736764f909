"""What may be set about the services of this machine."""

from typing import Literal

from pydantic import Field, field_validator

from penstock.core.settings import Section


class LocalSettings(Section):
    """Kafka and Redis as `penstock run` starts them. A port that is not set is free, and the same in the next run."""

    brokers: int | None = Field(default=None, description="1, 3 or 5; empty: as many as there were, or one")
    kafka_port: int | None = Field(default=None, ge=1, le=65535)
    kafka_memory: str = Field(default="384m", pattern=r"^[1-9][0-9]*[mg]$")
    redis_port: int | None = Field(default=None, ge=1, le=65535)
    reserve: int = Field(
        256 << 20,
        ge=0,
        description="bytes that stay free on the disk of the state folder; "
        "with less, sources wait and an alarm is raised",
    )
    redis_fsync: Literal["everysec", "always"] = "everysec"

    @field_validator("brokers")
    @classmethod
    def _odd(cls, brokers: int | None) -> int | None:
        if brokers not in (None, 1, 3, 5):
            raise ValueError("2F + 1 brokers go on when F of them are lost: use 1, 3 or 5")
        return brokers
