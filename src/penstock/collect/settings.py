"""`[collect]` of penstock.toml."""

from pydantic import Field

from penstock.core.settings import Section


class CollectSettings(Section):
    spool: int = Field(
        1 << 30,
        ge=0,
        description="bytes of disk for the records of a source while their channel is away; 0: the source waits",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes behind the port of each source that listens; others are heard by the first",
    )
    worker: int = Field(0, ge=0, description="which of them this process is; a run tells it")
    standby: bool = Field(
        False,
        description="several collectors may be started, on several machines: one collects, and when it falls silent "
        "another takes over",
    )
