"""Carts: they hold what was put in and not taken out, and some products go together."""

from collections import Counter
from itertools import combinations
from typing import Any

import orjson
import pytest
from carts import PAIRS, PRODUCTS, Carts

START = 1_700_000_000_000_000
SENDERS = 4


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    carts = Carts(seed=7)
    return [orjson.loads(carts.document(n % SENDERS, n // SENDERS + 1, START + n * 5_000)) for n in range(48_000)]


def bought(found: list[dict[str, Any]]) -> list[set[str]]:
    return [{item["product"] for item in step["items"]} for step in found if step["action"] == "checkout"]


def test_a_document_has_the_shape_of_a_step(found: list[dict[str, Any]]) -> None:
    for step in found:
        if step["action"] == "checkout":
            assert list(step) == ["cart", "customer", "action", "at", "items", "total"]
            assert step["items"]
        else:
            assert list(step) == ["cart", "customer", "action", "at", "product", "name", "quantity", "price"]
            assert step["action"] in ("add", "remove")
            assert 0 <= int(step["product"][1:]) < PRODUCTS
            assert step["quantity"] >= 1
            assert step["price"] > 0


def test_a_cart_is_bought_with_what_it_holds_and_then_nothing_more_happens_to_it(found: list[dict[str, Any]]) -> None:
    held: dict[str, dict[str, int]] = {}
    owners: dict[str, str] = {}
    done = set()
    for step in found:
        cart = step["cart"]
        assert cart not in done
        assert owners.setdefault(cart, step["customer"]) == step["customer"]
        products = held.setdefault(cart, {})
        if step["action"] == "add":
            products[step["product"]] = products.get(step["product"], 0) + step["quantity"]
        elif step["action"] == "remove":
            assert products.pop(step["product"]) == step["quantity"]
        else:
            assert {item["product"]: item["quantity"] for item in step["items"]} == products
            assert step["total"] == pytest.approx(sum(item["price"] * item["quantity"] for item in step["items"]))
            done.add(cart)
    assert 0.5 < len(done) / len(held) < 0.85


def test_a_price_is_always_the_same(found: list[dict[str, Any]]) -> None:
    sold = [step for step in found if "product" in step]
    assert len({(step["product"], step["name"], step["price"]) for step in sold}) == len(
        {step["product"] for step in sold}
    )


def test_some_products_are_bought_together_far_more_often_than_by_chance(found: list[dict[str, Any]]) -> None:
    baskets = bought(found)
    alone = Counter(product for basket in baskets for product in basket)
    together = Counter(pair for basket in baskets for pair in combinations(sorted(basket), 2))

    def lift(pair: tuple[str, str]) -> float:
        return together[pair] * len(baskets) / (alone[pair[0]] * alone[pair[1]])

    strong = [pair for pair, times in together.items() if times >= 15 and lift(pair) > 5]
    assert PAIRS / 2 < len(strong) <= PAIRS
    # Each product has one partner at most.
    assert len({product for pair in strong for product in pair}) == 2 * len(strong)
    assert sum(lift(pair) < 2.5 for pair in together) > 0.8 * len(together)


def test_customers_are_busy_at_the_same_time(found: list[dict[str, Any]]) -> None:
    assert len({step["cart"] for step in found[:16]}) == 16
    assert len({step["cart"] for step in found[:64]}) == 16


def test_few_products_are_put_into_most_carts(found: list[dict[str, Any]]) -> None:
    added = Counter(step["product"] for step in found if step["action"] == "add")
    assert sum(times for _, times in added.most_common(PRODUCTS // 5)) > 0.4 * added.total()
