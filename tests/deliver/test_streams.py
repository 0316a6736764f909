"""How much a client may say."""

from penstock.deliver.streams import Allowance


class Hand:
    at = 0.0

    def now(self) -> int:
        return 0

    def elapsed(self) -> float:
        return self.at


def test_a_burst_is_allowed_and_then_so_much_per_second() -> None:
    clock = Hand()
    allowance = Allowance(clock, burst=3, per_second=1)
    assert [allowance.spend() for _ in range(4)] == [True, True, True, False]
    clock.at = 3.5
    assert [allowance.spend() for _ in range(3)] == [True, True, False]
