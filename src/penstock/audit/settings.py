"""`[audit]` of penstock.toml."""

from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from penstock.core.clock import Duration
from penstock.core.settings import Section
from penstock.core.signatures import parse_secret


class AuditSettings(Section):
    engine: Literal["auto", "python", "spark"] = Field(
        "auto",
        description="how headers are read; auto: by Python while the audit keeps up, by Spark when it is far behind",
    )
    behind: int = Field(200_000, ge=1, description="number of entries behind from which auto uses Spark")
    grace: Duration = Field(
        timedelta(seconds=10),
        ge=timedelta(0),
        description="how long a record that is due is in flight before it is missing",
    )
    silent_after: Duration = Field(
        timedelta(seconds=60),
        gt=timedelta(0),
        description="a sender is silent if others sent for this long, and it did not",
    )
    gone_after: Duration = Field(
        timedelta(days=1),
        gt=timedelta(0),
        description="a sender or process that was silent for longer has left, and its alarm ends",
    )
    away_after: Duration = Field(
        timedelta(seconds=10),
        gt=timedelta(0),
        description="a process that sends no report for this long is away: the verdict is not known",
    )
    stale_after: Duration = Field(
        timedelta(seconds=20),
        gt=timedelta(0),
        description="the verdict is not known if records wait for a stage and its account does not change this long",
    )
    stalled_after: Duration = Field(
        timedelta(seconds=120),
        gt=timedelta(0),
        description="a stage is stalled if it has input and makes no progress for this long",
    )
    event_time_off: Duration = Field(
        timedelta(days=365),
        gt=timedelta(0),
        description="event times further than this from the time of reading are an alarm: a wrong unit?",
    )
    refused_share: float = Field(
        0.05,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="more than this share refused in the last minutes is an alarm",
    )
    expiring_share: float = Field(
        0.8,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="an unread record that is older than this share of its retention is an alarm",
    )
    webhook: str = Field("", description="where alarms are posted, http:// or https://; empty: nowhere")
    secret: SecretStr = Field(
        SecretStr(""), description="signs what is posted, as Standard Webhooks do; whsec_ and base64, or any text"
    )

    @field_validator("webhook")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if not value:
            return value
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ValueError("write it in ASCII, without spaces; other characters as %XX")
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError('give an address such as "https://example.org/alarms"')
        if "@" in parts.netloc:
            raise ValueError('leave out user and password; the receiver checks the signature, see "secret"')
        return value

    def key(self) -> bytes:
        """Return the key that signs the alarms; empty without a secret. Raise Misconfigured if it is invalid."""
        return parse_secret("[audit] secret", self.secret.get_secret_value())
