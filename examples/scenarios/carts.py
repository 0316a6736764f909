"""Shopping carts: what is put in, taken out and bought, and some products that are bought together.

A sender has four customers at a time. Each of them fills two carts within twelve steps, so that any step is found
by its number, and what the cart held before by going through its few steps again.
"""

from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import NamedTuple

import orjson
from scenario import Scenario, normals

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn, mixed, slots

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "copper", "striped", "small", "large", "folding", "old")
THINGS = ("kettle", "lamp", "chair", "mug", "rug", "pan", "clock", "basket", "vase", "towel", "knife", "tray", "shelf",
          "candle", "apron", "bowl")  # fmt: skip
PRODUCTS = len(COLOURS) * len(THINGS)
PAIRS = 24
CUSTOMERS = 2_000

_LANES = 4
_STEPS = 12


class Step(NamedTuple):
    """What happens to a cart: how many of which product; None when all is bought."""

    action: str
    product: int | None
    quantity: int


@dataclass(kw_only=True)
class Carts(Scenario):
    """Carts of a shop that the seed makes: its products, their prices, and which go together."""

    name: str = "carts"
    sender: str = "shop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps, self._products = (drawn(self.seed, 5, what) for what in range(2))

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The step `number` in the carts of `sender`, at `time`."""
        location, lane = divmod(number - 1, _LANES)
        visit, step = divmod(location, _STEPS)
        bits = drawn(self._steps, sender, lane, visit)
        first = 4 + bits % 5
        second = step >= first
        length = _STEPS - first if second else first
        bought, held = self._gone(drawn(bits, second), length, step - first if second else step)
        document: dict[str, object] = {
            "cart": f"{sender}-{(2 * visit + second) * _LANES + lane}",
            "customer": f"u{_CUSTOMER_SLOTS[drawn(bits, second, 1) & 0xFFF]}",
            "action": bought.action,
            "at": time // 1_000,
        }
        if bought.product is None:
            document["items"] = [self._item(product, quantity) for product, quantity in held.items()]
            document["total"] = sum(self._prices[product] * quantity for product, quantity in held.items()) / 100
        else:
            document |= self._item(bought.product, bought.quantity)
        return orjson.dumps(document)

    def _gone(self, bits: int, length: int, last: int) -> tuple[Step, dict[int, int]]:
        """The step `last` of a cart, and what it holds after it (when it is bought: what was bought)."""
        buys = bits & 0xFF < 180
        held: dict[int, int] = {}
        partner: int | None = None
        for step in range(last + 1):
            bits = mixed(bits)
            if buys and held and step == length - 1:
                bought = Step("checkout", None, 0)
            elif held and bits & 7 == 0:
                product = list(held)[(bits >> 3 & 0xFF) % len(held)]
                bought, partner = Step("remove", product, held.pop(product)), None
            else:
                together = partner is not None and partner not in held and bits >> 11 & 0xFF < 150
                product = partner if together and partner is not None else _PRODUCT_SLOTS[bits >> 19 & 0xFFF]
                bought, partner = Step("add", product, _QUANTITIES[bits >> 31 & 7]), self._partners.get(product)
                held[product] = held.get(product, 0) + bought.quantity
        return bought, held

    def _item(self, product: int, quantity: int) -> dict[str, object]:
        colour, thing = divmod(product, len(THINGS))
        return {
            "product": f"p{product:03d}",
            "name": f"{COLOURS[colour]} {THINGS[thing]}",
            "quantity": quantity,
            "price": self._prices[product] / 100,
        }

    @cached_property
    def _prices(self) -> list[int]:
        """In cents."""
        draws = (drawn(self._products, product) for product in range(PRODUCTS))
        return [round(1_900 * exp(0.7 * normals()[bits & 0xFFF])) for bits in draws]

    @cached_property
    def _partners(self) -> dict[int, int]:
        """Products that are bought together, each with the other."""
        shuffled = sorted(range(PRODUCTS), key=lambda product: drawn(self._products, product, 1))
        pairs = list(zip(shuffled[:PAIRS], shuffled[PAIRS : 2 * PAIRS], strict=True))
        return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


_PRODUCT_SLOTS = slots(PRODUCTS, 0.7)
_CUSTOMER_SLOTS = slots(CUSTOMERS, 0.5)
_QUANTITIES = (1, 1, 1, 1, 1, 1, 2, 3)
