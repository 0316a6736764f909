"""`[collect]` of penstock.toml."""

from pydantic import Field

from penstock.core.settings import Section


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
