"""The feed, without I/O: which records are due at a moment, what follows after a resume, how messages are spelled.

Record n (from 0) of the feed is due at start + n/rate. It belongs to sender n % senders, whose numbers are 1, 2, 3, …
Nothing is kept: a message is made when a client is ready for it, so a slow client costs no memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

from penstock.core.clock import Micros
from penstock.core.contracts import SenderNumbers
from penstock.core.errors import Misconfigured, Refused
from penstock.simulate.documents import Documents

END = b'{"end":true}'
SECOND = 1_000_000


@dataclass(frozen=True)
class Feed:
    """Documents, when each of them is due, and who sends it.

    The epoch is the second since 1970 at which the feed starts. Started again with the same epoch, a feed goes on as if
    it had never been away.
    """

    documents: Documents
    rate: float
    senders: int
    epoch: int
    count: int | None = None
    numbered: bool = True
    called: str = "meetup"
    """What its senders are called, before their number."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= SECOND:
            raise Misconfigured(
                "the feed", f"its rate is {self.rate:g}", "give more than 0, at most 1,000,000 a second"
            )
        if not 1 <= self.senders <= 10_000:
            raise Misconfigured("the feed", f"it has {self.senders} senders", "give 1 to 10,000")
        if self.count is not None and self.count < 0:
            raise Misconfigured("the feed", f"its count is {self.count}", "give 0 or more")

    def name(self, sender: int) -> str:
        return f"{self.called}-{sender:02d}"

    def time_of(self, n: int) -> Micros:
        """When record n is due."""
        return self.epoch * SECOND + int(n * SECOND / self.rate)

    def due(self, now: Micros) -> int:
        """How many records are due by now: those before this n."""
        n = max(0, int((now - self.epoch * SECOND) * self.rate / SECOND))
        # Rounding may miss by one; `time_of` decides.
        while self.time_of(n) <= now:
            n += 1
        while n and self.time_of(n - 1) > now:
            n -= 1
        return n if self.count is None else min(n, self.count)

    def ended(self, n: int) -> bool:
        """Whether the records before n are all that will ever be."""
        return self.count is not None and n >= self.count

    def message(self, n: int) -> bytes:
        sender, number, time = n % self.senders, n // self.senders + 1, self.time_of(n)
        document = self.documents(sender, number, time)
        if not self.numbered:
            return document
        return b'%b%b"feed":{"sender":"%b","epoch":%d,"seq":%d,"time":%d}}' % (
            document[:-1],
            b"" if document == b"{}" else b",",
            self.name(sender).encode(),
            self.epoch,
            number,
            time,
        )

    def heartbeats(self, n: int, now: Micros) -> bytes:
        """Each sender's last number among the records before n."""
        rounds, rest = divmod(n, self.senders)
        return orjson.dumps(
            {
                "heartbeats": [
                    {
                        "sender": self.name(sender),
                        "epoch": self.epoch,
                        "seq": rounds + (sender < rest),
                        "time": now,
                    }
                    for sender in range(self.senders)
                ]
            }
        )

    def following(self, after: SenderNumbers, now: Micros) -> "Following":
        """What a client is owed that holds these numbers already.

        Numbers of another epoch are none of this one. Nobody can hold what was not sent yet: such a claim counts as all
        that was, so that the worst it does is that some records come twice.
        """
        rounds, rest = divmod(self.due(now), self.senders)
        held = []
        for sender in range(self.senders):
            epoch, seq = after.get(self.name(sender), (self.epoch, 0))
            held.append(min(seq, rounds + (sender < rest)) if epoch == self.epoch else 0)
        return Following(self, held)

    def from_now(self, now: Micros) -> "Following":
        """What a client is owed that asks for nothing of the past."""
        return Following(self, [0] * self.senders, self.due(now))


class Following:
    """How far one client is: `n` is the next record of the feed, and what it holds beyond that is passed over."""

    def __init__(self, feed: Feed, held: list[int], n: int | None = None) -> None:
        self._feed = feed
        self._held = held
        self.n = min(seq * feed.senders + sender for sender, seq in enumerate(held)) if n is None else n

    def take(self, now: Micros, most: int) -> Iterator[bytes]:
        """The next messages that are due, up to `most` of them, in the order of their numbers."""
        until = min(self._feed.due(now), self.n + most)
        while self.n < until:
            n, self.n = self.n, self.n + 1
            if n // self._feed.senders >= self._held[n % self._feed.senders]:
                yield self._feed.message(n)

    @property
    def ended(self) -> bool:
        return self._feed.ended(self.n)


def asked(message: bytes) -> SenderNumbers:
    """What a client holds, from its first message: `{"after": {"meetup-07": [epoch, number]}}`. Refused otherwise."""
    try:
        document = orjson.loads(message)
    except orjson.JSONDecodeError as error:
        raise Refused("a resume", "it is not JSON") from error
    after = document.get("after") if isinstance(document, Mapping) else None
    if not isinstance(after, Mapping):
        raise Refused("a resume", 'it has to be {"after": {sender: [epoch, number]}}')
    return {sender: _place(place) for sender, place in after.items()}


def _place(place: object) -> tuple[int, int]:
    match place:
        case [int(epoch), int(seq)] if seq >= 0 and not isinstance(epoch, bool) and not isinstance(seq, bool):
            return epoch, seq
    raise Refused("a resume", "a sender's place has to be [epoch, number]")
