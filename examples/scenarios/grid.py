"""A city of straight streets, for what moves or stands in it: 24 by 24 blocks of 150 metres."""

from math import cos, radians

BLOCKS = 24
BLOCK = 150.0
Crossing = tuple[int, int]
"""How many blocks east and north of the city's corner."""

SOUTH, WEST = 41.38, 2.14
_METRES = 111_320  # in a degree of latitude
_NORTHWARD = BLOCK / _METRES
_EASTWARD = BLOCK / (_METRES * cos(radians(SOUTH)))


def crossing(bits: int) -> Crossing:
    """One of the 25 by 25 crossings, by the last sixteen bits."""
    return (bits & 0xFF) * (BLOCKS + 1) >> 8, (bits >> 8 & 0xFF) * (BLOCKS + 1) >> 8


def position(x: float, y: float) -> tuple[float, float]:
    """Latitude and longitude of what is x blocks east and y blocks north of the city's corner."""
    return round(SOUTH + y * _NORTHWARD, 6), round(WEST + x * _EASTWARD, 6)


def blocks(lat: float, lon: float) -> tuple[float, float]:
    """The way back: how many blocks east and north of the corner."""
    return (lon - WEST) / _EASTWARD, (lat - SOUTH) / _NORTHWARD
