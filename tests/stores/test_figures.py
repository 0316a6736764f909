import json

from penstock.core.contracts import Entry
from penstock.stores.figures import Figures
from penstock.testing.clock import ManualClock


def entry(**headers: bytes) -> Entry:
    return Entry("rsvps", 0, 0, 0, None, b"", tuple(headers.items()))


def test_the_figures_are_told_as_json_can_hold_them() -> None:
    clock = ManualClock(now=1_000_000_000)
    figures = Figures(clock)
    figures.lags(10)
    clock.move(2)
    figures.wrote([entry(time=b"1001000000"), entry(time=b"?"), entry()], rows=2, refused=1)
    figures.says("waiting", "Redis is away")
    told = json.loads(json.dumps(figures.told()))
    assert (told["count"], told["rate"], told["refused"], told["lag"]) == (2, 1.0, 1, 7)
    assert (told["state"], told["why"]) == ("waiting", "Redis is away")
    assert (told["latency"]["count"], told["latency"]["max"]) == (1, 1_000)
