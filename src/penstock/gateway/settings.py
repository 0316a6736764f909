"""`[gateway]` of penstock.toml: limits and timeouts."""

from datetime import timedelta

from pydantic import Field

from penstock.core.clock import Duration
from penstock.core.settings import Section


class GatewaySettings(Section):
    """Limits for one request unless stated otherwise. Sizes are in bytes."""

    sender: str = Field(
        "gateway",
        min_length=1,
        description="the sender name of records that come without an identity; unique for each gateway",
    )
    body: int = Field(8 << 20, ge=1, description="the size of a body")
    memory: int = Field(
        64 << 20, ge=1, description="the size of all bodies in flight, and of all records that are not acknowledged"
    )
    upload: Duration = Field(timedelta(seconds=60), description="the time for a body to arrive")
    records: int = Field(10_000, ge=1, description="records in a body, and in a response")
    record: int = Field(900_000, ge=1, description="the size of a record; below the limit of the middleware itself")
    key: int = Field(16 << 10, ge=1, description="the size of a key")
    headers: int = Field(16 << 10, ge=1, description="the size of all headers of a record")
    answer: int = Field(8 << 20, ge=1, description="the size of a response; it may exceed this by a few records")
    wait: Duration = Field(timedelta(seconds=60), description="the longest wait of a long poll")
    send_timeout: Duration = Field(
        timedelta(seconds=10), description="the time for a channel to acknowledge; then the response is 503"
    )
    idle_timeout: Duration = Field(
        timedelta(seconds=10),
        description="a connection is closed when its client sends no request, or reads nothing, for this time",
    )
    polls: int = Field(100, ge=1, description="concurrent long polls, of all clients")
    members: int = Field(50, ge=1, description="concurrent consumer sessions, of all clients")
    session_timeout: Duration = Field(
        timedelta(seconds=60), description="a consumer session without a request for this time leaves its group"
    )
    connections: int = Field(1_000, ge=1, description="concurrent connections")
