import json

from penstock.clock import Micros
from penstock.contracts import Entry
from penstock.stores.figures import Figures


class HandClock:
    """A clock that stands still until it is moved."""

    seconds = 1_000.0

    def now(self) -> Micros:
        return int(self.seconds * 1e6)

    def elapsed(self) -> float:
        return self.seconds


def entry(**headers: bytes) -> Entry:
    return Entry("rsvps", 0, 0, 0, None, b"", tuple(headers.items()))


def test_the_figures_are_told_as_json_can_hold_them() -> None:
    clock = HandClock()
    figures = Figures(clock)
    figures.lags(10)
    clock.seconds += 2
    figures.wrote([entry(time=b"1001000000"), entry(time=b"?"), entry()], rows=2, refused=1)
    figures.says("waiting", "Redis is away")
    told = json.loads(json.dumps(figures.told()))
    assert (told["count"], told["rate"], told["refused"], told["lag"]) == (2, 1.0, 1, 7)
    assert (told["state"], told["why"]) == ("waiting", "Redis is away")
    assert (told["latency"]["count"], told["latency"]["max"]) == (1, 1_000)
