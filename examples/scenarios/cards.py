"""Card transactions, with a rare fraud hidden among them, and the truth for whoever wants to be scored.

A fraud is a burst on one card: small amounts to try it, then large ones, far away from where it is used otherwise,
within some tens of numbers of a sender. Travel, large amounts and small ones alone are honest, too.
"""

from dataclasses import dataclass
from functools import cached_property
from math import acos, cos, exp, radians, sin

import orjson
from scenario import Scenario, normals

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn, slots
from penstock.simulate.rsvps import CITIES, City

CARDS = 10_000
FAR = 3_000
"""A fraud happens at least so many kilometres from the card's home."""

# A usual amount, and by how much of a power of e the amounts spread.
CATEGORIES = (
    ("groceries", 28.0, 0.7), ("groceries", 28.0, 0.7), ("groceries", 28.0, 0.7), ("restaurant", 24.0, 0.6),
    ("restaurant", 24.0, 0.6), ("coffee", 4.5, 0.4), ("coffee", 4.5, 0.4), ("transport", 3.2, 0.5), ("fuel", 52.0, 0.4),
    ("clothing", 60.0, 0.7), ("pharmacy", 15.0, 0.7), ("books", 18.0, 0.6), ("electronics", 190.0, 0.9),
    ("online", 35.0, 0.9), ("online", 35.0, 0.9), ("hotel", 160.0, 0.6),
)  # fmt: skip
_MERCHANTS = 400

_BLOCK = 64
_ONE_IN = 24
"""Of so many blocks of a sender's numbers, one holds a fraud."""


@dataclass(kw_only=True)
class Cards(Scenario):
    """Transactions of a world that the seed makes: its cards, where they live, and who is robbed."""

    name: str = "cards"
    sender: str = "acquirer"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._payments, self._blocks, self._cards = (drawn(self.seed, 3, what) for what in range(3))

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The transaction `number` of `sender`, at `time`."""
        bits = drawn(self._payments, sender, number)
        chance = drawn(bits, 1)
        stolen = self._stolen(sender, number - 1)
        if stolen is None:
            card = _card(bits >> 40)
            home, means = self._owner(card)
            travels = bits >> 12 & 0xFF < 10
            city = CITIES[_CITY_SLOTS[bits >> 20 & 0xFFF]] if travels else home
            category, usual, spread = CATEGORIES[bits >> 32 & 0xF]
            amount = usual * means * exp(spread * normals()[chance & 0xFFF])
        else:
            card, city, large = stolen
            category = ("online", "electronics")[large]
            # Small: some coins, below what is asked about. Large: hundreds, as quickly as it goes.
            amount = (480 if large else 1.4) * exp(0.4 * normals()[chance & 0xFFF])
        return orjson.dumps(
            {
                "transaction": f"{sender}-{number}",
                "card": f"c{card:04d}",
                "amount": max(0.01, round(amount, 2)),
                "category": category,
                "merchant": f"m{(chance >> 12 & 0xFFFF) % _MERCHANTS:03d}",
                "city": city.name,
                "country": city.country,
                "lat": round(city.lat + ((chance >> 28 & 0xFFFF) - 32768) / 330_000, 5),
                "lon": round(city.lon + ((chance >> 44 & 0xFFFF) - 32768) / 330_000, 5),
                "at": time // 1_000,
                "label": "ok" if stolen is None else "fraud",
            }
        )

    def _stolen(self, sender: int, n: int) -> tuple[int, City, bool] | None:
        """The card, the city, and whether it is a large amount; None where the transaction is honest."""
        block, location = divmod(n, _BLOCK)
        bits = drawn(self._blocks, sender, block)
        if bits % _ONE_IN:
            return None
        bits >>= 8
        small, large, gap, begin = 3 + bits % 3, 2 + bits // 3 % 3, 2 + (bits >> 8 & 1), (bits >> 9) % 40
        turn, between = divmod(location - begin, gap)
        if between or not 0 <= turn < small + large:
            return None
        card = _card(bits >> 16)
        far = self._far[self._owner(card)[0]]
        return card, far[(bits >> 36 & 0xFFFF) % len(far)], turn >= small

    def _owner(self, card: int) -> tuple[City, float]:
        """Where a card lives, and how much more or less than usual is spent with it."""
        bits = drawn(self._cards, card)
        return CITIES[_CITY_SLOTS[bits & 0xFFF]], exp(0.3 * normals()[bits >> 12 & 0xFFF])

    @cached_property
    def _far(self) -> dict[City, list[City]]:
        return {city: [other for other in CITIES if kilometres(city, other) >= FAR] for city in CITIES}


def kilometres(one: City, other: City) -> float:
    """Between two cities, on a round earth."""
    north, south = radians(one.lat), radians(other.lat)
    angle = sin(north) * sin(south) + cos(north) * cos(south) * cos(radians(one.lon - other.lon))
    return 6_371 * acos(min(1.0, angle))


def _card(bits: int) -> int:
    """Some cards are used more than others: ten at a time, because there are more of them than slots."""
    return _CARD_SLOTS[bits & 0xFFF] * _SIMILAR + (bits >> 12 & 0xFF) % _SIMILAR


_SIMILAR = 10
_CARD_SLOTS = slots(CARDS // _SIMILAR, 0.3)
_CITY_SLOTS = slots(len(CITIES), 0.7)
