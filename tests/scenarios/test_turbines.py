"""Turbines: the healthy ones stay as they are, and who compares a failing one with itself sees it drift."""

from itertools import groupby, pairwise
from statistics import fmean, stdev
from typing import Any

import orjson
import pytest
from turbines import DAY, SERVICE, Turbines

START = 1_700_000_000_000_000
UNITS = 8


def readings(turbine: int, count: int, seed: int = 7) -> list[dict[str, Any]]:
    turbines = Turbines(seed=seed)
    return [
        orjson.loads(turbines.document(turbine, number, START + number * 100_000)) for number in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def found() -> list[list[dict[str, Any]]]:
    """Per turbine, a little more than two spans."""
    return [readings(turbine, 2 * SERVICE + 500) for turbine in range(UNITS)]


def failures(found: list[list[dict[str, Any]]]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Per failure that can be seen whole: what came before it, and its last hundreds of readings."""
    seen = []
    for turbine in found:
        spans = [(healthy, list(some)) for healthy, some in groupby(turbine, key=lambda one: one["healthy"])]
        for (well, before), (ill, during) in pairwise(spans):
            if well and not ill and len(before) >= 1_000 and during[-1] is not turbine[-1]:
                seen.append((before[-1_000:], during[-300:]))
    return seen


def test_a_document_has_the_shape_of_a_reading(found: list[list[dict[str, Any]]]) -> None:
    for turbine, its in enumerate(found):
        for reading in its:
            assert list(reading) == ["turbine", "rpm", "temperature", "vibration", "power", "at", "healthy"]
            assert reading["turbine"] == f"turbine-{turbine:02d}"
            assert 2_950 < reading["rpm"] < 3_050
            assert 480 < reading["temperature"] < 640
            assert 0.5 < reading["vibration"] < 6
            assert 15 < reading["power"] < 50


def test_some_fail_and_most_do_not(found: list[list[dict[str, Any]]]) -> None:
    ill = fmean(not reading["healthy"] for its in found for reading in its)
    assert 0.03 < ill < 0.25
    assert any(all(reading["healthy"] for reading in its) for its in found)


def test_a_failure_begins_slowly_and_is_seen_before_the_service(found: list[list[dict[str, Any]]]) -> None:
    seen = failures(found)
    assert seen
    for before, during in seen:
        # What does not follow from the load: the bearing, or the heat that the power has cost.
        assert drifted([one["vibration"] for one in before], [one["vibration"] for one in during]) or drifted(
            [one["temperature"] - 2.2 * one["power"] for one in before],
            [one["temperature"] - 2.2 * one["power"] for one in during],
        )


def drifted(before: list[float], during: list[float]) -> bool:
    return fmean(during) > fmean(before) + 2.5 * stdev(before)


def test_nothing_jumps_when_a_failure_begins(found: list[list[dict[str, Any]]]) -> None:
    for its in found:
        for first, then in pairwise(its):
            if first["healthy"] and not then["healthy"]:
                assert abs(then["vibration"] - first["vibration"]) < 0.8
                assert abs(then["temperature"] - first["temperature"]) < 20


def test_the_load_follows_the_day() -> None:
    turbines = Turbines(seed=7)

    def power(hour: int) -> float:
        at = START // 1_000 // DAY * DAY * 1_000 + hour * DAY // 24 * 1_000
        return fmean(orjson.loads(turbines.document(sender, 1, at))["power"] for sender in range(200))

    assert power(14) > 1.2 * power(2)
