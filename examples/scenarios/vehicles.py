"""Vehicles on the streets of a city: each is on a tour, and slower when all are on their way.

How far a vehicle has come is the integral of its speed over time, which has a closed form; its tours all have the same
length, the last part of which it stands at its depot. So where it is follows from the moment alone.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import orjson
from grid import BLOCK, Crossing, crossing, position
from scenario import Scenario

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn

VEHICLES = 25
"""So many belong to each sender, and report by turns."""
HOUR = 3_600_000_000

# What share of its free speed a vehicle has at each full hour of the day (UTC), and evenly changing in between.
FLOW = (1.0, 1.0, 1.0, 1.0, 1.0, 0.95, 0.8, 0.55, 0.4, 0.6, 0.75, 0.75, 0.7, 0.7, 0.75, 0.7, 0.55, 0.38, 0.42, 0.6, 0.8,
        0.9, 0.95, 1.0, 1.0)  # fmt: skip
KINDS = (("taxi", 44.0), ("taxi", 44.0), ("van", 38.0), ("van", 38.0), ("car", 46.0), ("car", 46.0), ("truck", 32.0),
         ("bus", 28.0))  # fmt: skip
"""And the free speed of each, in km/h."""

_TOUR = 120
"""Blocks from one departure to the next."""
_FLOWN = (0.0, *accumulate((one + other) / 2 for one, other in pairwise(FLOW)))
_NORTH, _EAST, _SOUTH, _WEST = 0, 90, 180, 270


@dataclass(kw_only=True)
class Vehicles(Scenario):
    """Positions of vehicles that the seed makes: their kinds, their depots, and where each tour goes."""

    name: str = "vehicles"
    sender: str = "fleet"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seed = drawn(self.seed, 6)

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The report `number` of `sender`, at `time`: of one of its vehicles."""
        which = (number - 1) % VEHICLES
        bits = drawn(self._seed, sender, which)
        kind, free = KINDS[bits & 7]
        free *= 0.9 + 0.2 * (bits >> 3 & 0xFF) / 256
        days, hours = divmod(time / HOUR, 24)
        hour = int(hours)
        part, flow, change = hours - hour, FLOW[hour], FLOW[hour + 1] - FLOW[hour]
        flown = days * _FLOWN[24] + _FLOWN[hour] + part * (flow + change * part / 2)
        # Not all depart at once.
        tour, gone = divmod(free * flown * 1_000 / BLOCK + (bits >> 11 & 0xFFF), _TOUR)
        x, y, heading = self._on_tour(bits, int(tour), gone)
        lat, lon = position(x, y)
        speed = 0.0 if heading is None else free * (flow + change * part)
        return orjson.dumps(
            {
                "vehicle": f"{sender}-{which:02d}",
                "kind": kind,
                "lat": lat,
                "lon": lon,
                "speed": round(speed, 1),
                "heading": heading,
                "street": f"Street {y:.0f}" if heading in (_EAST, _WEST) else f"Avenue {x:.0f}",
                "at": time // 1_000,
            }
        )

    def _on_tour(self, key: int, tour: int, gone: float) -> tuple[float, float, int | None]:
        """Where a vehicle is that has come so far on a tour, and where it is heading; None at its depot."""
        depot = here = crossing(key >> 24)
        left, turn, bits, back = _TOUR, 0, 0, False
        while not back:
            bits = bits >> 20 if turn % 3 else drawn(key, tour, turn)
            turn += 1
            there = crossing(bits)
            # Only so far that it is back at its depot in time.
            if back := _apart(here, there) + _apart(there, depot) > left:
                there = depot
            length = _apart(here, there)
            if gone < length:
                return _between(here, there, gone, bool(bits >> 16 & 1))
            here, gone, left = there, gone - length, left - length
        return *depot, None


def _apart(one: Crossing, other: Crossing) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _between(here: Crossing, there: Crossing, gone: float, street_first: bool) -> tuple[float, float, int]:
    """So far on the way from here to there, which has one corner."""
    (x, y), (to_x, to_y) = here, there
    along_street, along_avenue = abs(to_x - x), abs(to_y - y)
    if street_first and gone >= along_street:
        x, gone = to_x, gone - along_street
        on_street = False
    elif not street_first and gone >= along_avenue:
        y, gone = to_y, gone - along_avenue
        on_street = True
    else:
        on_street = street_first
    if on_street:
        return (x + gone, y, _EAST) if to_x > x else (x - gone, y, _WEST)
    return (x, y + gone, _NORTH) if to_y > y else (x, y - gone, _SOUTH)
