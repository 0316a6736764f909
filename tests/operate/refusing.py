"""Dead letters, as Spark writes them."""

from penstock.core.record import Headers, Origin
from penstock.operate.dead_letters import Letter
from penstock.testing import MemoryChannels

BEGIN = 1_700_000_000_000_000
UNFIT = "it is not JSON"


def refused(
    channels: MemoryChannels,
    seq: int | None,
    value: bytes | None = b"{",
    reason: str = UNFIT,
    sender: str = "kiosk",
    key: bytes | None = None,
    own: Headers = (),
    location: str | None = None,
) -> Letter:
    """A letter in rsvps.dead: all headers of the record, and after them the reason and the place."""
    identity = Origin(sender, 1, seq, BEGIN).headers() if seq is not None else []
    location = location or f"rsvps:0:{len(channels.entries('rsvps.dead')) + 100}"
    headers = [*identity, *own, ("reason", reason.encode()), ("place", location.encode())]
    return Letter.of(channels.append("rsvps.dead", value, key, headers))
