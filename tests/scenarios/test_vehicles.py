"""Vehicles: they stay on the streets, move as fast as they say, and crawl in rush hours."""

from itertools import pairwise
from statistics import fmean
from typing import Any

import orjson
import pytest
from grid import BLOCK, BLOCKS, blocks
from vehicles import VEHICLES, Vehicles

MIDNIGHT = 1_699_920_000_000_000  # UTC
HOUR = 3_600_000_000


def trip(vehicle: int, start: int, seconds: int, every: int = 1_000_000) -> list[dict[str, Any]]:
    vehicles = Vehicles(seed=7)
    return [orjson.loads(vehicles.document(3, vehicle + 1, start + n * every)) for n in range(seconds)]


def at(hour: float) -> list[dict[str, Any]]:
    vehicles = Vehicles(seed=7)
    timestamp = MIDNIGHT + int(hour * HOUR)
    return [orjson.loads(vehicles.document(n % 20, n // 20 + 1, timestamp)) for n in range(20 * VEHICLES)]


def test_a_document_has_the_shape_of_a_report() -> None:
    for report in at(12):
        assert list(report) == ["vehicle", "kind", "lat", "lon", "speed", "heading", "street", "at"]
        assert report["kind"] in ("taxi", "van", "car", "truck", "bus")
        assert 0 <= report["speed"] < 60
        assert report["heading"] in (0, 90, 180, 270, None)


def test_vehicles_report_by_turns_and_keep_their_kind() -> None:
    vehicles = Vehicles(seed=7)
    reports = [orjson.loads(vehicles.document(3, number, MIDNIGHT + number)) for number in range(1, 3 * VEHICLES + 1)]
    assert [report["vehicle"] for report in reports] == [f"3-{n % VEHICLES:02d}" for n in range(3 * VEHICLES)]
    assert len({(report["vehicle"], report["kind"]) for report in reports}) == VEHICLES


def test_they_are_on_the_streets_of_the_city() -> None:
    for report in at(12) + at(3.3):
        x, y = blocks(report["lat"], report["lon"])
        assert -0.01 <= x <= BLOCKS + 0.01
        assert -0.01 <= y <= BLOCKS + 0.01
        name, number = report["street"].split()
        assert (y if name == "Street" else x) == pytest.approx(int(number), abs=0.01)


@pytest.mark.parametrize("vehicle", range(4))
def test_they_move_as_fast_as_they_say_and_never_jump(vehicle: int) -> None:
    moved = 0
    for first, then in pairwise(trip(vehicle, MIDNIGHT + 7 * HOUR, 7_200)):
        (x, y), (to_x, to_y) = blocks(first["lat"], first["lon"]), blocks(then["lat"], then["lon"])
        metres = (abs(to_x - x) + abs(to_y - y)) * BLOCK
        assert metres < 60 / 3.6
        if first["heading"] == then["heading"] is not None and first["street"] == then["street"]:
            moved += 1
            assert metres == pytest.approx(first["speed"] / 3.6, abs=0.5)
    assert moved > 4_000


def test_their_heading_is_where_they_go() -> None:
    ways = {0: (0, 1), 90: (1, 0), 180: (0, -1), 270: (-1, 0)}
    for first, then in pairwise(trip(2, MIDNIGHT, 2_000)):
        if first["heading"] == then["heading"] is not None and first["street"] == then["street"]:
            (x, y), (to_x, to_y) = blocks(first["lat"], first["lon"]), blocks(then["lat"], then["lon"])
            east, north = ways[first["heading"]]
            assert (to_x - x) * east + (to_y - y) * north > 0


def test_they_crawl_in_rush_hours() -> None:
    def speed(hour: float) -> float:
        return fmean(report["speed"] for report in at(hour) if report["speed"])

    assert speed(8) < 0.5 * speed(3)
    assert speed(17.5) < 0.6 * speed(12.5)


def test_midnight_is_an_hour_like_another() -> None:
    (before,) = trip(5, MIDNIGHT - 1, 1)
    (after,) = trip(5, MIDNIGHT, 1)
    assert (before["lat"], before["lon"]) == pytest.approx((after["lat"], after["lon"]), abs=1e-5)


def test_they_rest_at_their_depot_for_a_while() -> None:
    resting = fmean(report["heading"] is None for report in at(12) + at(18) + at(1))
    assert 0.02 < resting < 0.3
    depots = {(report["lat"], report["lon"]) for report in trip(1, MIDNIGHT, 3_000, 10_000_000) if not report["speed"]}
    assert len(depots) == 1
