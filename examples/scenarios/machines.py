"""Vending machines in a city: every sale lowers the stock, and a refill brings it back.

A machine is filled twice within 64 of its events, at irregular distances. Its stock is found by going through the
events since then again: there are a few dozen at most.
"""

from dataclasses import dataclass

import orjson
from grid import BLOCKS, crossing, position
from scenario import Scenario

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn

MACHINES = 10
"""So many belong to each sender, and something happens at them by turns."""
PRODUCTS = ("water", "cola", "crisps", "chocolate", "nuts", "mints")
CAPACITY = (12, 10, 8, 8, 5, 5)
PRICES = (1.5, 2.0, 1.8, 1.6, 2.4, 1.2)

# What a buyer wants, by four bits.
_WANTED = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5)
_ROUND = 64


@dataclass(kw_only=True)
class Machines(Scenario):
    """Events of machines that the seed makes: where they stand, and what is bought there."""

    name: str = "machines"
    sender: str = "operator"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places, self._rounds = (drawn(self.seed, 9, what) for what in range(2))

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The event `number` at the machines of `sender`, at `time`."""
        turn, which = divmod(number - 1, MACHINES)
        machine = drawn(self._places, sender, which)
        # Not all are filled at once.
        past, location = divmod(turn + (machine & 0x3F), _ROUND)
        event, product, stock = _happening(drawn(self._rounds, machine, past), location)
        x, y = crossing(machine >> 8)
        # Somewhere on the way from one crossing to the next.
        lat, lon = position(min(x, BLOCKS - 1) + (machine >> 24 & 0xFF) / 256, y)
        return orjson.dumps(
            {
                "machine": f"{sender}-{which}",
                "lat": lat,
                "lon": lon,
                "event": event,
                "product": None if product is None else PRODUCTS[product],
                "price": PRICES[product] if product is not None and event == "sale" else None,
                "stock": dict(zip(PRODUCTS, stock, strict=True)),
                "at": time // 1_000,
            }
        )


def _happening(bits: int, location: int) -> tuple[str, int | None, list[int]]:
    """What happens at this place of a round: the event, the product, and the stock afterwards."""
    second = 24 + bits % 17
    filled = second if location >= second else 0
    stock = list(CAPACITY)
    if location == filled:
        return "refill", None, stock
    wishes = sum(drawn(bits, part) << 64 * part for part in range(4))
    for step in range(filled + 1, location + 1):
        product = _WANTED[wishes >> 4 * step & 0xF]
        event = "sale" if stock[product] else "empty"
        stock[product] -= event == "sale"
    return event, product, stock
