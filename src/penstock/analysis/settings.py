"""`[spark]` of penstock.toml."""

from datetime import timedelta
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.core.clock import Duration
from penstock.core.settings import Section

_PROFILES = {"throughput": {"jit": "thorough", "memory": "2g"}}
"""The defaults of a profile; those of latency are the defaults of the fields."""


class SparkSettings(Section):
    profile: Literal["latency", "throughput"] = Field(
        "latency",
        description="latency: at speed at once; throughput: more records for the same CPU",
    )
    master: str = Field(
        "local", description="local: this machine, with as many slots as the queries need; or any Spark master"
    )
    memory: str = Field("1g", description="the heap of the driver", pattern=r"^\d+[mg]$")
    checkpoints: str = Field("", description="where queries remember how far they are; empty: in the state folder")
    real_time_batch: Duration = Field(
        timedelta(seconds=60),
        description="how long a real-time batch lasts: longer means fewer pauses and a larger replay after a crash",
    )
    every: Duration = Field(timedelta(seconds=5), description="how often a query in micro-batches runs")
    jit: Literal["quick", "thorough"] = Field(
        "quick", description="quick: the JVM is at speed at once; thorough: at full speed, after minutes of compiling"
    )
    shuffle_partitions: int = Field(
        2, ge=1, description="partitions of state; a checkpoint keeps its own, until penstock state rescale changes it"
    )
    state_batch: int = Field(
        100_000,
        ge=1,
        description="how many records of a channel a query with state in Python takes at once: those of a key are held "
        "in memory together",
    )
    real_time_queries: int = Field(1, ge=0, description="how many queries may run in real time at once")
    poison_limit: int = Field(
        100,
        ge=0,
        description="how many records that make a query fail it may leave out; with more of them it is stopped",
    )
    answers: str = Field(
        "127.0.0.1:0",
        pattern=r"^\S+:\d{1,5}$",
        description="where the analysis answers for the state of its queries; port 0: a free one",
    )
    conf: dict[str, str] = Field(default_factory=dict, description="settings of Spark itself, by their own names")

    @property
    def reads_ahead(self) -> bool:
        return self.profile == "throughput"

    @field_validator("answers")
    @classmethod
    def _at_a_port(cls, value: str) -> str:
        if int(value.rpartition(":")[2]) > 65_535:
            raise ValueError("ports end at 65535")
        return value

    @model_validator(mode="before")
    @classmethod
    def _of_the_profile(cls, values: Any) -> Any:
        return {**_PROFILES.get(str(values.get("profile")), {}), **values} if isinstance(values, dict) else values

    @field_validator("real_time_batch")
    @classmethod
    def _at_least_five_seconds(cls, value: timedelta) -> timedelta:
        if value < timedelta(seconds=5):
            raise ValueError("Spark takes real-time batches of 5 seconds or more")
        return value
