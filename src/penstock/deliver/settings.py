"""What can be set about the delivery."""

from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, Field

from penstock.core.clock import Duration
from penstock.core.settings import Section


def _list(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class DeliverSettings(Section):
    """The page and the feeds."""

    clients: int = Field(1_000, ge=1, description="how many clients may follow feeds at the same time")
    origins: Annotated[tuple[str, ...], BeforeValidator(_list)] = Field(
        (), description='other sites whose pages may follow feeds, such as "https://example.org"'
    )
    connections: int = Field(
        2_000, ge=1, description="connections at the same time: those who follow feeds, and all others"
    )
    patience: Duration = Field(
        timedelta(seconds=10),
        description="how long a client may leave a message unread, or a request unfinished, before it is dropped",
    )
