"""Latencies of the last minutes."""

from penstock.core.metrics import RecentSketch, Sketch, SketchWindow
from penstock.testing import ManualClock


def test_what_is_older_than_five_minutes_is_forgotten() -> None:
    clock = ManualClock()
    recent = RecentSketch(clock)
    recent.add(9_000)
    for _ in range(11):
        clock.move(30)
        recent.add(10)
    found = recent.summary()
    assert found
    assert found["max"] == 10
    assert recent.sketch().count == 10


def test_silence_forgets_all() -> None:
    clock = ManualClock()
    recent = RecentSketch(clock)
    recent.add(5)
    clock.move(400)
    assert recent.summary() is None


def test_a_sketch_that_never_empties_is_looked_at_over_five_minutes() -> None:
    clock = ManualClock()
    lately = SketchWindow(clock)
    whole = Sketch()
    whole.add(9_000)
    assert lately.update(_copy(whole)).count == 0
    for _ in range(12):
        clock.move(30)
        whole.add(10)
        found = lately.update(_copy(whole))
    assert found.count == 10
    assert (found.summary() or {})["max"] < 11


def _copy(sketch: Sketch) -> Sketch:
    return Sketch.from_json(sketch.to_json())
