"""Ads that are shown, and clicks that lag behind them: nothing is kept, a click finds its impression by its number.

A sender's numbers are parted into blocks of four. Three of them are impressions; the fourth may be the click on one
impression of an earlier block, and is an impression, too, when that was not clicked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import orjson
from scenario import Scenario, normals

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn, slots
from penstock.simulate.rsvps import TOPICS

ADS = 40
CAMPAIGNS = 12
VISITORS = 3_000

_BLOCK = 4
_CLASSES = 512
_CROWDED = 8


@dataclass(kw_only=True)
class Ads(Scenario):
    """Impressions and clicks of a world that the seed makes: its ads, how well each is liked, and who sees them."""

    name: str = "ads"
    sender: str = "site"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._impressions, self._blocks, ads, lags = (drawn(self.seed, 1, what) for what in range(4))
        self._lags = _lags(lags)
        self._campaigns = [TOPICS[drawn(ads, ad) % CAMPAIGNS] for ad in range(ADS)]
        # Of 256 that could click on it, so many do: 8 to 135.
        self._pulls = [8 + drawn(ads, ad, 1) % 128 for ad in range(ADS)]

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The impression or click `number` of `sender`, at `time`."""
        block, location = divmod(number - 1, _BLOCK)
        if location == self._turn(sender, block)[0] and (clicked := self._clicked(sender, block)) is not None:
            return self._written("click", sender, clicked, time)
        return self._written("impression", sender, number, time)

    def _written(self, what: str, sender: int, impression: int, time: Micros) -> bytes:
        bits = drawn(self._impressions, sender, impression)
        ad = _AD_SLOTS[bits & 0xFFF]
        document = {
            "type": what,
            "impression": f"{sender}-{impression}",
            "ad": f"a{ad + 1}",
            "campaign": self._campaigns[ad],
            "visitor": f"v{_VISITOR_SLOTS[bits >> 12 & 0xFFF]}",
            "at": time // 1_000,
        }
        if what == "impression":
            document["cost"] = round(0.004 * 2 ** normals()[bits >> 24 & 0xFFF], 5)
        return orjson.dumps(document)

    def _turn(self, sender: int, block: int) -> tuple[int, int]:
        """In a block, the place that may be a click; and of the other three, the one that may be clicked later."""
        bits = drawn(self._blocks, sender, block)
        turn = bits & 3
        return turn, (turn + 1 + (bits >> 2 & 0xFF) * 3 // 256) % _BLOCK

    def _clicked(self, sender: int, block: int) -> int | None:
        """The number of the impression on which this block may have the click; None when nobody clicked on it."""
        lag = self._lags[(block + sender * 37) % _CLASSES]
        if not lag or lag > block:
            return None
        earlier = block - lag
        impression = earlier * _BLOCK + self._turn(sender, earlier)[1] + 1
        bits = drawn(self._impressions, sender, impression)
        return impression if bits >> 40 & 0xFF < self._pulls[_AD_SLOTS[bits & 0xFFF]] else None


def _lags(seed: int) -> Sequence[int]:
    """Per class of blocks, by how many blocks its clicks lag behind: 15 on average, one in eight 200; 0 for no click.

    Each class comes upon a class of its own, so that no impression is clicked twice.
    """
    free, lags = set(range(_CLASSES)), []
    for which in range(_CLASSES):
        chance = ((drawn(seed, which) >> 40) + 0.5) / (1 << 24)
        wanted = 1 + int(-log(chance) * (200 if which % 8 == 0 else 15))
        lag = next((lag for lag in range(wanted, wanted + _CROWDED) if (which - lag) % _CLASSES in free), 0)
        if lag:
            free.discard((which - lag) % _CLASSES)
        lags.append(lag)
    return lags


_AD_SLOTS = slots(ADS, 0.8)
_VISITOR_SLOTS = slots(VISITORS, 0.5)
