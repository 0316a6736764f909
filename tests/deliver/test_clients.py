"""How much a client may say."""

from penstock.deliver.clients import RateLimit
from penstock.testing import ManualClock


def test_a_burst_and_then_a_rate() -> None:
    clock = ManualClock()
    rate_limit = RateLimit(clock, burst=3, per_second=1)
    assert [rate_limit.spend() for _ in range(4)] == [True, True, True, False]
    clock.move(3.5)
    assert [rate_limit.spend() for _ in range(3)] == [True, True, False]
