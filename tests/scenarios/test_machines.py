"""Vending machines: what is sold is gone, what is empty is refilled."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import orjson
import pytest
from grid import BLOCKS, blocks
from machines import CAPACITY, MACHINES, PRODUCTS, Machines

START = 1_700_000_000_000_000
SENDERS = 3
FULL = dict(zip(PRODUCTS, CAPACITY, strict=True))


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """Per machine, what happened."""
    machines = Machines(seed=7)
    gathered = defaultdict(list)
    for n in range(SENDERS * MACHINES * 300):
        event = orjson.loads(machines.document(n % SENDERS, n // SENDERS + 1, START + n * 5_000))
        gathered[event["machine"]].append(event)
    return gathered


def test_a_document_has_the_shape_of_an_event(found: dict[str, list[dict[str, Any]]]) -> None:
    assert len(found) == SENDERS * MACHINES
    for event in (event for events in found.values() for event in events):
        assert list(event) == ["machine", "lat", "lon", "event", "product", "price", "stock", "at"]
        assert all(0 <= event["stock"][product] <= FULL[product] for product in PRODUCTS)
        assert (event["price"] is not None) == (event["event"] == "sale")
        assert (event["product"] is None) == (event["event"] == "refill")


def test_a_machine_stays_where_it_stands_in_the_city(found: dict[str, list[dict[str, Any]]]) -> None:
    for events in found.values():
        ((lat, lon),) = {(event["lat"], event["lon"]) for event in events}
        x, y = blocks(lat, lon)
        assert -0.01 <= x <= BLOCKS + 0.01
        assert -0.01 <= y <= BLOCKS + 0.01
    assert len({events[0]["lat"] for events in found.values()}) > 5


def test_a_sale_takes_one_and_a_refill_brings_all(found: dict[str, list[dict[str, Any]]]) -> None:
    for events in found.values():
        for before, then in pairwise(events):
            product, stock = then["product"], dict(before["stock"])
            if then["event"] == "refill":
                stock = FULL
            elif then["event"] == "sale":
                stock[product] -= 1
            else:
                assert then["event"] == "empty"
                assert stock[product] == 0
            assert then["stock"] == stock


def test_machines_are_refilled_at_irregular_distances_and_not_all_at_once(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    refills = {
        machine: [n for n, event in enumerate(events) if event["event"] == "refill"]
        for machine, events in found.items()
    }
    distances = {later - first for times in refills.values() for first, later in pairwise(times)}
    assert len(distances) > 5
    assert 24 <= min(distances) <= max(distances) <= 40
    assert len({times[0] for times in refills.values()}) > 10


def test_now_and_then_something_is_sold_out(found: dict[str, list[dict[str, Any]]]) -> None:
    events = [event for events in found.values() for event in events]
    assert 0.005 < sum(event["event"] == "empty" for event in events) / len(events) < 0.1


def test_water_is_bought_most(found: dict[str, list[dict[str, Any]]]) -> None:
    sold = [event["product"] for events in found.values() for event in events if event["event"] == "sale"]
    assert max(PRODUCTS, key=sold.count) == "water"
