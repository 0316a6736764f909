"""What totals did lately."""

from penstock.audit.trail import OVER, Standstill, Trail


def test_what_was_there_before_the_first_call_is_no_growth() -> None:
    trail = Trail()
    assert trail.reach(0, 1_000) == (0,)
    assert trail.reach(1, 1_010) == (10,)


def test_growth_of_long_ago_is_forgotten() -> None:
    trail = Trail()
    trail.reach(0, 0)
    assert trail.reach(1, 100) == (100,)
    trail.reach(OVER / 2, 100)
    assert trail.reach(OVER, 100) == (0,)


def test_growth_of_the_last_half_is_always_known() -> None:
    trail = Trail()
    for second in range(1_000):
        (grown,) = trail.reach(second, second)
        assert min(second, OVER / 2) <= grown <= OVER


def test_who_counts_less_than_before_has_begun_anew() -> None:
    trail = Trail()
    trail.reach(0, 1_000, 10)
    assert trail.reach(1, 5, 2) == (0, 0)
    assert trail.reach(2, 7, 3) == (2, 1)


def test_the_other_totals_may_shrink_a_little() -> None:
    trail = Trail()
    trail.reach(0, 1_000, 10.01)
    assert trail.reach(1, 1_001, 10.0)[0] == 1


def test_without_input_nothing_stands_still() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, 100) for at in (0, 60, 3_600)] == [0, 0, 0]


def test_the_time_counts_from_when_the_input_came() -> None:
    watch = Standstill()
    watch.look(0, (7,), False)
    assert [watch.look(at, (7,), True) for at in (3_600, 3_601, 3_700)] == [0, 1, 100]


def test_a_step_ends_the_standstill() -> None:
    watch = Standstill()
    assert [watch.look(at, (state,), True) for at, state in [(0, 7), (50, 7), (51, 8), (61, 8)]] == [0, 50, 0, 10]


def test_input_is_seen_by_what_arrived_when_nobody_says_that_it_waits() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, total) for at, total in [(0, 100), (20, 101), (50, 102)]] == [0, 0, 30]


def test_what_is_counted_right_after_a_step_may_be_what_the_step_has_taken() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, total) for at, total in [(0, 95), (1, 100), (500, 100)]] == [0, 0, 0]


def test_a_channel_that_began_anew_is_input_when_it_grows() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, total) for at, total in [(0, 95), (20, 0), (30, 1), (40, 2)]] == [0, 0, 0, 10]
