"""`[collect]` of penstock.toml."""

from pydantic import Field

from penstock.settings import Section


class CollectSettings(Section):
    spool: int = Field(
        1 << 30,
        ge=0,
        description="bytes of disk for the records of a source while their channel is away; 0: the source waits",
    )
