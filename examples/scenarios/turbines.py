"""Gas turbines and their sensors: each sender is one turbine, and some drift slowly away from health.

A turbine is serviced after every 6,000 numbers. In one of four such spans something begins to fail, somewhere in its
middle third, and gets worse until the service.
"""

from dataclasses import dataclass
from math import sin, tau

import orjson
from scenario import Scenario, normals

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn

SERVICE = 6_000
"""So many numbers lie between two services."""
DAY = 86_400_000  # in milliseconds, as all times of a document

_SMOOTH = 64


@dataclass(kw_only=True)
class Turbines(Scenario):
    """Readings of turbines that the seed makes: how each of them runs, and when it fails."""

    name: str = "turbines"
    sender: str = "turbine"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noise, self._swings, self._spans, self._units = (drawn(self.seed, 4, what) for what in range(4))

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The reading `number` of the turbine `sender`, at `time`."""
        at = time // 1_000
        unit, noise, normal = drawn(self._units, sender), drawn(self._noise, sender, number), normals()
        # The load follows the hours of the day, and the demand of the minute.
        load = 0.78 + 0.12 * sin(tau * (at % DAY / DAY - 0.35)) + 0.04 * self._swing(sender, number)
        rpm = 3_000 + 2.5 * normal[noise & 0xFFF]
        temperature = 470 + 95 * load + 12 * (unit & 0xFF) / 256 + 2.5 * normal[noise >> 12 & 0xFFF]
        vibration = 1.3 + 0.6 * load + 0.3 * (unit >> 8 & 0xFF) / 256 + 0.1 * normal[noise >> 24 & 0xFFF]
        power = (41 + 2 * (unit >> 16 & 0xFF) / 256) * load + 0.25 * normal[noise >> 36 & 0xFFF]
        worse, bearing = self._drift(sender, number)
        if bearing:
            vibration += 2.2 * worse
            temperature += 6 * worse
            rpm += 6 * worse * normal[noise >> 48 & 0xFFF]
        else:  # Deposits on the blades: more heat, less power.
            temperature += 32 * worse
            power *= 1 - 0.1 * worse
            vibration += 0.15 * worse
        return orjson.dumps(
            {
                "turbine": f"turbine-{sender:02d}",
                "rpm": round(rpm, 1),
                "temperature": round(temperature, 1),
                "vibration": round(vibration, 3),
                "power": round(power, 2),
                "at": at,
                "healthy": not worse,
            }
        )

    def _swing(self, sender: int, number: int) -> float:
        """A smooth course between draws that lie 64 numbers apart, within about ±3."""
        knot, rest = divmod(number, _SMOOTH)
        normal, part = normals(), rest / _SMOOTH
        before = normal[drawn(self._swings, sender, knot) & 0xFFF]
        after = normal[drawn(self._swings, sender, knot + 1) & 0xFFF]
        return before + (after - before) * part * part * (3 - 2 * part)

    def _drift(self, sender: int, number: int) -> tuple[float, bool]:
        """How far a turbine has drifted, from 0 (healthy) to 1; and whether it is the bearing, or the blades."""
        # Not all are serviced at once.
        span, location = divmod(number - 1 + drawn(self._units, sender, 1) % SERVICE, SERVICE)
        # By turns: of any four neighbours in a span one fails.
        if (sender + drawn(self._spans, span)) % 4:
            return 0.0, False
        bits = drawn(self._spans, span, sender)
        onset = SERVICE // 3 + (bits >> 8) % (SERVICE // 3)
        return max(0, location - onset + 1) / (SERVICE - onset), bool(bits & 1)
