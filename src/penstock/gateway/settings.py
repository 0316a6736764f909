"""`[gateway]` of penstock.toml: how much the gateway takes, gives and waits."""

from datetime import timedelta

from pydantic import Field

from penstock.core.clock import Duration
from penstock.core.settings import Section


class GatewaySettings(Section):
    """Limits, each for one request unless it says otherwise. Sizes are in bytes."""

    sender: str = Field(
        "gateway",
        min_length=1,
        description="in whose name records without an identity are numbered; each gateway needs a name of its own",
    )
    body: int = Field(8 << 20, ge=1, description="the size of a body")
    memory: int = Field(
        64 << 20, ge=1, description="the size of all bodies under way together, and of all not acknowledged"
    )
    upload: Duration = Field(timedelta(seconds=60), description="how long a body may take to arrive")
    records: int = Field(10_000, ge=1, description="records in a body, and in an answer")
    record: int = Field(
        900_000, ge=1, description="the size of a record; what the middleware itself refuses has to lie above it"
    )
    key: int = Field(16 << 10, ge=1, description="the size of a key")
    headers: int = Field(16 << 10, ge=1, description="the size of all headers of a record")
    answer: int = Field(8 << 20, ge=1, description="the size of an answer; it may be some records longer")
    wait: Duration = Field(timedelta(seconds=60), description="how long a long poll may wait")
    acknowledged: Duration = Field(
        timedelta(seconds=10), description="how long a channel may take to acknowledge, before the answer is 503"
    )
    patience: Duration = Field(
        timedelta(seconds=10),
        description="how long a client may leave an answer unread, or ask for nothing, before it is dropped",
    )
    polls: int = Field(100, ge=1, description="long polls at the same time, of all clients")
    members: int = Field(50, ge=1, description="members of groups at the same time, of all clients")
    silence: Duration = Field(
        timedelta(seconds=60), description="after how long a member that asks for nothing has left its group"
    )
    connections: int = Field(1_000, ge=1, description="connections at the same time")
